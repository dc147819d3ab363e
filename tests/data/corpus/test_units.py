"""Corpora of several units of work: the same documents, for any number of workers."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tracemalloc

import numpy as np
import psutil
import pytest

from jaxforge.commands import prepare
from jaxforge.data.conversation_shards import ConversationShards
from jaxforge.data.corpus import ingest, manifest, unit_worker
from jaxforge.data.corpus.documents import split_of
from jaxforge.data.corpus.inputs import Unit, find_inputs, plan_units, sliced
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.errors import UserError
from tests.data.corpus.interruptions import Interrupted, snapshot, stop_encoding
from tests.machine import PATIENCE, wait_until

EOS = 256


def jsonl(name, n):
    return [f"{name} {i} " + "é\n" * (i * 7 % 23) for i in range(n)]


def lines(texts):
    return "".join(json.dumps({"text": text}) + "\n" for text in texts)


@pytest.fixture
def corpus(tmp_path):
    """Return a directory with files small and large, and its texts in order."""
    directory = tmp_path / "corpus"
    directory.mkdir()
    texts = []
    for name, n in (("a", 5), ("b", 300), ("c", 1), ("d", 40), ("e", 200)):
        records = jsonl(name, n)
        texts += records
        content = lines(records).encode()
        if name == "d":
            (directory / "d.jsonl.gz").write_bytes(gzip.compress(content))
        else:
            (directory / f"{name}.jsonl").write_bytes(content)
    (directory / "f.txt").write_text("a text " * 50)
    return directory, [*texts, "a text " * 50]


def run(corpus, output, *args):
    return prepare.main([*map(str, (corpus, "--output", output, "--workers", 1, *args))])


def tokens_of(directory):
    return np.concatenate([np.load(path) for path in sorted(directory.glob("shard_*.npy"))])


def test_units_hold_all_documents_in_order(corpus, tmp_path, capsys):
    directory, texts = corpus
    expected = [token for text in texts for token in (*text.encode(), EOS)]
    run(directory, tmp_path / "one")
    whole = capsys.readouterr().out
    assert [path.name for path in (tmp_path / "one" / "train").glob("shard*")] == [
        "shard_00000.npy"
    ]
    for unit_bytes in (700, 5000):
        output = tmp_path / f"out{unit_bytes}"
        run(directory, output, "--unit-bytes", unit_bytes, "--shard-tokens", 900)
        assert tokens_of(output / "train").tolist() == expected
        shown = capsys.readouterr().out
        table = re.compile(r"(documents|tokens|bytes per token|unigram entropy) .*")
        assert [m[0] for m in table.finditer(shown)] == [m[0] for m in table.finditer(whole)]
        manifest = Manifest.read(output / "train")
        assert (manifest.tokens, manifest.documents) == (len(expected), len(texts))
        assert manifest.statistics == Manifest.read(tmp_path / "one" / "train").statistics
        names = [shard.file for shard in manifest.shards]
        assert names == sorted(names)
        assert len(names) > 3
        assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize("options", [(), ("--tokenizer", "bpe", "--vocab-size", "300")])
def test_shards_do_not_depend_on_workers(corpus, tmp_path, options):
    options = (*options, "--unit-bytes", "2500", "--validation-fraction", "0.2")
    for workers in ("1", "2"):
        run(corpus[0], tmp_path / workers, *options, "--workers", workers)
    assert snapshot(tmp_path / "1") == snapshot(tmp_path / "2")


@pytest.mark.parametrize("n_bytes", [1, 50, 333, 100_000])
@pytest.mark.parametrize("end", [b"\n", b""])
def test_slices_of_lines_hold_each_line_once(tmp_path, n_bytes, end):
    path = tmp_path / "a.jsonl"
    texts = jsonl("a", 20)
    path.write_bytes(lines(texts).encode() + b"\n" * 3 + b'{"text": "last"}' + end)
    slices = sliced(find_inputs([path]), n_bytes)
    contents = [record.content.read().decode() for part in slices for record in part.records()]
    assert contents == [*texts, "last"]
    assert len(slices) == -(-path.stat().st_size // n_bytes)


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("n", [1, 3, 1000])
def test_slices_of_tables_hold_each_row_once(tmp_path, kind, n):
    import pyarrow as pa
    import pyarrow.parquet

    texts = jsonl("a", 50)
    table, path = pa.table({"text": texts}), tmp_path / f"a.{kind}"
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=7)
    else:
        with pa.ipc.new_file(path, table.schema) as file:
            file.write_table(table, max_chunksize=7)
    (source,) = find_inputs([path])
    slices = source.slices(-(-path.stat().st_size // n))
    assert len(slices) > n // 2
    assert [r.content.read().decode() for p in slices for r in p.records()] == texts
    if kind == "parquet":  # whose rows keep their numbers
        assert [r.number for p in slices for r in p.records()] == list(range(1, 51))


def test_slices_of_hugging_face_datasets_hold_each_row_once(tmp_path):
    import datasets

    texts = jsonl("a", 50)
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(tmp_path / "saved")
    for name, unit_bytes in (("one", 1 << 20), ("many", 200)):
        options = ("--hf-dataset", tmp_path / "saved", "--unit-bytes", unit_bytes)
        prepare.main([*map(str, (*options, "--output", tmp_path / name, "--workers", 1))])
    assert len(list((tmp_path / "many" / "train").glob("shard*"))) > 3
    assert np.array_equal(tokens_of(tmp_path / "one" / "train"), tokens_of(tmp_path / "many/train"))


def test_split_of_documents_in_slices_follows_their_names(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = [f"record {i}" for i in range(100)]
    path.write_text(lines(texts))
    run(path, tmp_path / "out", "--unit-bytes", 1000, "--validation-fraction", 0.3)
    size = path.stat().st_size
    n, at, expected = -(-size // 1000), 0, []
    starts = [size * i // n for i in range(n)]
    counts = dict.fromkeys(starts, 0)
    for text in texts:
        start = max(s for s in starts if s <= at)
        counts[start] += 1
        if split_of(f"a.jsonl@{start}:{counts[start]}", 0.3) == "validation":
            expected += [*text.encode(), EOS]
        at += len(lines([text]))
    assert tokens_of(tmp_path / "out" / "validation").tolist() == expected


def test_text_file_alone_in_a_unit_stays_whole(tmp_path):
    for i in range(20):
        (tmp_path / f"{i}.txt").write_text(f"text {i}\n" * 50)
    options = ("--validation-fraction", "0.4", "--glob", "*.txt")
    run(tmp_path, tmp_path / "one", *options)
    run(tmp_path, tmp_path / "many", *options, "--unit-bytes", 1)
    for split in ("train", "validation"):
        tokens = [tokens_of(tmp_path / name / split) for name in ("one", "many")]
        assert np.array_equal(*tokens)


def test_options_that_need_the_order_make_one_unit(corpus, tmp_path):
    for options in (("--max-bytes", "3000"), ("--validation-tokens", "3000")):
        output = tmp_path / options[0]
        run(corpus[0], output, *options, "--unit-bytes", "500")
        assert (output / "train" / "shard_00000.npy").exists()


@pytest.fixture
def interrupt(monkeypatch):
    """`interrupt(n)`: n batches are encoded, the next raises."""
    monkeypatch.setattr(ingest, "BATCH_BYTES", 500)
    return stop_encoding(monkeypatch)


def test_finished_units_are_not_repeated(corpus, tmp_path, interrupt, capsys):
    options = ("--unit-bytes", 3000, "--validation-fraction", "0.2", "--shard-tokens", 700)
    encoded = interrupt(None)
    run(corpus[0], tmp_path / "whole", *options)
    total, whole = len(encoded), capsys.readouterr().out
    for limit in (9, 10, 12):
        interrupt(limit)
        with pytest.raises(Interrupted):
            run(corpus[0], tmp_path / "out", *options)
    shown = capsys.readouterr().err
    assert "resuming from" in shown
    assert "finished parts stay in" in shown
    encoded = interrupt(None)
    run(corpus[0], tmp_path / "out", *options)
    assert len(encoded) < total
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")
    assert capsys.readouterr().out == whole.replace("whole", "out")


def test_other_units_start_over(corpus, tmp_path, interrupt, capsys):
    interrupt(5)
    with pytest.raises(Interrupted):
        run(corpus[0], tmp_path / "out", "--unit-bytes", 3000)
    interrupt(None)
    run(corpus[0], tmp_path / "out", "--unit-bytes", 4000)
    assert "starting over: --unit-bytes was 3000, and is 4000" in capsys.readouterr().err
    run(corpus[0], tmp_path / "whole", "--unit-bytes", 4000)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_error_in_a_slice_names_file_and_record(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(lines(["x" * 80] * 20) + "bad\n" + lines(["x" * 80] * 20))
    (source,) = find_inputs([path])
    bad = path.read_text().index("bad")
    span = next(p.span for p in source.slices(500) if p.span.start <= bad < p.span.end)
    number = path.read_text()[:bad].count("\n") + 1
    before = len([1 for i in range(20) if 0 < i * 93 < span.start]) + 1
    assert path.read_text()[93] == "{"
    where = f"a.jsonl (from byte {span.start}):{number - before}: not JSON"
    with pytest.raises(UserError, match=re.escape(where)):
        run(path, tmp_path / "out", "--unit-bytes", 500)
    run(path, tmp_path / "out", "--unit-bytes", 500, "--skip-bad")
    assert Manifest.read(tmp_path / "out" / "train").documents == 40


def test_line_longer_than_a_unit_belongs_to_the_first(tmp_path):
    texts = ["a", "long " * 1000, "b"]
    path = tmp_path / "a.jsonl"
    path.write_text(lines(texts))
    run(path, tmp_path / "out", "--unit-bytes", 300)
    expected = [token for text in texts for token in (*text.encode(), EOS)]
    assert tokens_of(tmp_path / "out" / "train").tolist() == expected
    with pytest.raises(UserError, match=r"a\.jsonl \(from byte 0\):2: the record is larger than"):
        run(path, tmp_path / "out2", "--unit-bytes", 300, "--max-record-bytes", 4000)


def test_line_beyond_the_limit_is_never_in_memory(tmp_path):
    path = tmp_path / "a.jsonl"
    with path.open("w") as file:
        file.write('{"text": "a"}\n{"text": "')
        for _ in range(40):
            file.write("x" * (1 << 20))
        file.write('"}\n{"text": "b"}\n')
    sources = sliced(find_inputs([path], max_record_bytes=1 << 20), 15 << 20)
    tracemalloc.start()
    records = [(r.content.read(), r.problem) for source in sources for r in source.records()]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    limit = "a.jsonl (from byte 0):2: the record is larger than 1,048,576 bytes"
    assert records == [(b"a", ""), (b"", f"{tmp_path}/{limit}"), (b"b", "")]
    assert len(sources) == 3
    assert peak < 8 << 20


def test_inputs_are_grouped_up_to_the_size_of_a_unit(tmp_path):
    sizes = [10, 20, 30, 50, 100, 5, 5]
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.txt").write_text("x" * size)
    planned = plan_units(sliced(find_inputs([tmp_path]), 60), 60)
    assert [[source.weight for source in unit.inputs] for unit in planned] == [
        [10, 20, 30], [50], [100], [5, 5],
    ]  # fmt: skip
    assert [unit.files for unit in planned] == [3, 1, 1, 2]


def test_conversations_of_several_units_match_one(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text(
        "".join(
            json.dumps({"prompt": f"question {i}?", "completion": " yes" * (i % 9 + 1)}) + "\n"
            for i in range(80)
        )
    )
    read = []
    for name, unit_bytes in (("one", 1 << 20), ("many", 400)):
        run(path, tmp_path / name, "--conversations", "--unit-bytes", unit_bytes)
        lengths = np.fromfile(tmp_path / name / "train" / "lengths.uint32", "<u4")
        assert len(lengths) == 80
        shards = ConversationShards(tmp_path / name / "train", "*.npy", 64, "drop", vocab_size=257)
        assert shards.tokens == lengths.sum()
        read.append((tokens_of(tmp_path / name / "train").tolist(), lengths.tolist()))
    assert read[0] == read[1]
    assert len(list(tmp_path.glob("many/train/shard*"))) > 5


def test_machine_that_does_not_see_the_output_is_refused(tmp_path):
    """Else it would write its shards to a disk of its own."""
    options = manifest.Options(dtype="uint16")
    job = unit_worker.CorpusJob(tmp_path / "x" / "out", tmp_path / "x", options, "fingerprint")
    message = rf"{socket.gethostname()} does not see {tmp_path}/x: --output must be in a bucket"
    with pytest.raises(UserError, match=message):
        unit_worker.prepare_unit(job, Unit(0, ()))
    assert not (tmp_path / "x").exists()


SCRIPT = """
import sys
from jaxforge.commands import prepare
from jaxforge.cli.running import run_main
from jaxforge.data.corpus import ingest
if __name__ == "__main__":
    sys.exit(run_main(prepare.main))
"""


@pytest.mark.processes
def test_killed_driver_leaves_no_process_and_resumes(tmp_path):
    (tmp_path / "corpus").mkdir()
    for i in range(8):
        (tmp_path / "corpus" / f"{i}.txt").write_bytes(b"all work and no play\n" * 20_000)
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "corpus", "--unit-bytes", 1000,
               "--output", tmp_path / "out", "--workers", 2]  # fmt: skip
    process = subprocess.Popen([*map(str, command)], stderr=subprocess.PIPE)
    finished = tmp_path / ".out.partial" / "parts"
    wait_until(lambda: len(list(finished.glob("*.json"))) > 1)
    family = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not psutil.wait_procs(family, timeout=PATIENCE)[1]
    before = {path.name: path.stat().st_mtime_ns for path in finished.glob("*.json")}
    assert 1 < len(before) < 8
    again = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert (again.returncode, "resuming from" in again.stderr) == (0, True), again.stderr
    run(tmp_path / "corpus", tmp_path / "whole", "--unit-bytes", 1000)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_progress_line_has_files_rate_and_time_left():
    from jaxforge.data.corpus.parts import Done, in_words

    first = Done(10, 0.1, 100, 1_000_000)
    now = Done(24, 0.25, 1234, 5_500_000)
    assert in_words(now, first, 200, 600.0) == (
        "25%, 24 of 200 files, 1,234 docs, 5.5 M tokens, 0.01 M/s, 0:50:00 left"
    )
    assert in_words(Done(1, None, 2, 30), Done(0, None, 0, 0), 3, 0.0) == (
        "1 of 3 files, 2 docs, 0.0 M tokens, 0.00 M/s"
    )
