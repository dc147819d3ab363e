"""Resumed preparation gives the same shards, for any workers and any interruptions."""

import fcntl
import gzip
import json
import os
import re
import struct
import subprocess
import sys

import psutil
import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import ingest
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.errors import UserError
from jaxforge.storage import atomic_directory
from tests.data.corpus.interruptions import Interrupted, snapshot, stop_encoding, wait_for


@pytest.fixture
def corpus(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = "".join(json.dumps({"text": f"record {i}\n" * (i % 7)}) + "\n" for i in range(300))
    (corpus / "a.jsonl").write_text(lines)
    (corpus / "b.jsonl.gz").write_bytes(gzip.compress(lines.replace("record", "row").encode()))
    (corpus / "c.txt").write_bytes(b"a long text\n" * 2000 + b"\xff\n")
    return corpus


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(ingest, "BATCH_BYTES", 900)
    monkeypatch.setattr("jaxforge.data.corpus.documents.PART_BYTES", 1000)


def run(corpus, output, *args):
    options = ("--validation-fraction", "0.2", "--shard-tokens", "5000", "--workers", "1",
               "--unit-bytes", "4000")  # fmt: skip
    return prepare.main([*map(str, (corpus, "--output", output, *options, *args))])


@pytest.fixture
def interrupt(monkeypatch):
    """`interrupt(n)`: n batches are encoded, the next raises."""
    stop = stop_encoding(monkeypatch)
    return lambda limit: stop(limit or None)


@pytest.mark.parametrize("tokenizer", ["byte", "bpe"])
@pytest.mark.parametrize("file_format", ["npy", "bin"])
def test_interrupted_run_matches_without_repeated_units(
    corpus, tmp_path, interrupt, tokenizer, file_format, capsys
):
    options = ("--tokenizer", tokenizer, "--format", file_format)
    encoded = interrupt(0)
    run(corpus, tmp_path / "whole", *options)
    total, whole = len(encoded), capsys.readouterr().out
    for limit in (9, 13, 20):
        interrupt(limit)
        with pytest.raises(Interrupted):
            run(corpus, tmp_path / "out", *options)
        assert not (tmp_path / "out").exists()
    encoded = interrupt(0)
    capsys.readouterr()
    run(corpus, tmp_path / "out", *options)
    assert len(encoded) < total
    shown = capsys.readouterr()
    assert shown.out == whole.replace("whole", "out")
    assert "resuming from" in shown.err
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_shards_do_not_depend_on_workers(corpus, tmp_path, capsys):
    one_unit = ("--tokenizer", "bpe", "--unit-bytes", 1 << 28)
    run(corpus, tmp_path / "one", *one_unit)
    alone = capsys.readouterr().out
    run(corpus, tmp_path / "two", *one_unit, "--workers", "2")
    assert capsys.readouterr().out == alone.replace("one", "two")
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")


def test_resume_with_two_processes_after_one(corpus, tmp_path, interrupt):
    run(corpus, tmp_path / "whole")
    interrupt(12)
    with pytest.raises(Interrupted):
        run(corpus, tmp_path / "out")
    interrupt(0)
    run(corpus, tmp_path / "out", "--workers", "2")
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def touch(corpus):
    os.utime(corpus / "b.jsonl.gz", ns=(1, 1))


def remove(corpus):
    (corpus / "c.txt").unlink()


@pytest.mark.parametrize(
    ("change", "options", "why"),
    [
        (touch, (), r"b\.jsonl\.gz changed since"),
        (remove, (), r"c\.txt is gone since"),
        (None, ("--max-bytes", "3000"), "--max-bytes was None, and is 3000"),
    ],
)
def test_other_inputs_or_options_start_over(
    corpus, tmp_path, interrupt, change, options, why, capsys
):
    interrupt(12)
    with pytest.raises(Interrupted):
        run(corpus, tmp_path / "out")
    assert "finished parts stay in" in capsys.readouterr().err
    if change:
        change(corpus)
    interrupt(0)
    run(corpus, tmp_path / "out", *options)
    assert re.search(f"starting over: .*{why}", capsys.readouterr().err)
    run(corpus, tmp_path / "whole", *options)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_bad_record_does_not_cost_what_is_finished(corpus, tmp_path, interrupt, capsys):
    with (corpus / "a.jsonl").open("a") as file:
        file.write("bad\n")
    encoded = interrupt(0)
    with pytest.raises(UserError, match=r"a\.jsonl \(from byte \d+\):\d+: not JSON"):
        run(corpus, tmp_path / "out")
    before = len(encoded)
    encoded = interrupt(0)
    run(corpus, tmp_path / "out", "--skip-bad")
    shown = capsys.readouterr()
    assert "resuming from" in shown.err
    assert "left out as bad  1 records" in shown.out
    resumed = len(encoded)
    encoded = interrupt(0)
    run(corpus, tmp_path / "whole", "--skip-bad")
    assert before > 1
    assert resumed < len(encoded)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_another_tokenizer_starts_over(corpus, tmp_path, interrupt, capsys):
    for name, size in (("a", 260), ("b", 270)):
        options = ("--tokenizer", "bpe", "--vocab-size", size)
        run(corpus / "a.jsonl", tmp_path / name, *options)
    tokenizer = tmp_path / "tokenizer"
    load_tokenizer(tmp_path / "a" / "tokenizer").save(tokenizer)
    interrupt(12)
    with pytest.raises(Interrupted):
        run(corpus, tmp_path / "out", "--tokenizer", tokenizer)
    load_tokenizer(tmp_path / "b" / "tokenizer").save(tokenizer)
    interrupt(0)
    run(corpus, tmp_path / "out", "--tokenizer", tokenizer)
    assert "starting over: the tokenizer's sha256 was" in capsys.readouterr().err
    assert load_tokenizer(tmp_path / "out" / "tokenizer").vocab_size == 270


def test_one_process_at_a_time(corpus, tmp_path):
    output, plan = tmp_path / "out", {"options": {}, "inputs": []}
    busy = pytest.raises(UserError, match=r"another process is writing .*out; wait for it")
    with atomic_directory.atomic_directory(output, plan, marker="x"), busy:
        run(corpus, output)
    assert output.is_dir()


def test_shared_directory_is_made_once(tmp_path):
    code = """
import sys, time, pathlib
from jaxforge.storage.atomic_directory import atomic_directory
plan = {"options": {}, "inputs": []}
with atomic_directory(pathlib.Path(sys.argv[1]), plan, marker="x", shared=True) as s:
    if s:
        time.sleep(0.3)
        (s.out / "x").touch()
    print(bool(s))
"""
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    result = sorted(process.communicate()[0].strip() for process in processes)
    assert result == ["False", "False", "True"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_lock_file_removed_by_holder_is_no_error(tmp_path, monkeypatch):
    """Another process ends just before this one locks the file that it has opened."""
    flock, lock = fcntl.flock, tmp_path / ".out.lock"

    def late(*args):
        monkeypatch.setattr(fcntl, "flock", flock)
        lock.unlink()
        flock(*args)

    monkeypatch.setattr(fcntl, "flock", late)
    plan = {"options": {}, "inputs": []}
    with atomic_directory.atomic_directory(
        tmp_path / "out", plan, marker="x", shared=True
    ) as result:
        assert lock.exists()
        (result.out / "x").touch()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_existing_file_at_output_raises(tmp_path):
    (tmp_path / ".out.partial").touch()
    refused = pytest.raises(UserError, match=r"cannot write .*\.out\.partial: File exists")
    with refused, atomic_directory.atomic_directory(tmp_path / "out", {}, marker="x"):
        pass


SHARD = ".out.partial/out/train/shard_00000.npy"
SCRIPT = """
import sys
from jaxforge.commands import prepare
from jaxforge.cli.running import run_main
if __name__ == "__main__":
    sys.exit(run_main(prepare.main))
"""


@pytest.fixture
def command(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"all work and no play\n" * 500_000)
    (tmp_path / "script.py").write_text(SCRIPT)
    output = str(tmp_path / "out")
    return [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "corpus.txt"),
            "--output", output, "--workers", "2"]  # fmt: skip


@pytest.mark.processes
def test_killed_worker_is_an_error(command, tmp_path):
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    wait_for(tmp_path / SHARD, process)
    for child in psutil.Process(process.pid).children():
        if "spawn_main" in " ".join(child.cmdline()):
            child.kill()
            break
    shown = process.communicate()[1]
    assert process.returncode == 2
    assert "error: a worker process ended early" in shown


def die_within_a_message(connection, *_):
    connection.recv()
    os.write(connection.fileno(), struct.pack("!i", 100) + b"a part")


@pytest.mark.processes
def test_worker_killed_within_its_answer_is_an_error(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(ingest, "encode_batches", die_within_a_message)
    with pytest.raises(UserError, match="a worker process ended early"):
        run(corpus, tmp_path / "out", "--workers", "2", "--unit-bytes", 1 << 28)
