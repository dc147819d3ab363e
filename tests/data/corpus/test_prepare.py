import dataclasses
import math
import os
import resource
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest

from jaxforge.cli.running import run_main
from jaxforge.commands import prepare
from jaxforge.data.corpus import documents, ingest
from jaxforge.data.corpus.documents import split_of, text_parts
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.writer import token_dtype
from jaxforge.data.tokens import TokenShards
from jaxforge.errors import UserError
from jaxforge.tools.starting import preparation

TEXTS = {"b.txt": "bee\n", "a.py": "print('ä')\n", "sub/c.md": "# sea\n", "sub/d.rst": "no\n"}
COMMAND = [sys.executable, "-m", "jaxforge.prepare"]


@pytest.fixture
def corpus(tmp_path):
    for name, text in TEXTS.items():
        path = tmp_path / "corpus" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    return tmp_path / "corpus"


def run(*args):
    return prepare.main([str(arg) for arg in args])


def tokens(directory):
    paths = [path for path in sorted(directory.iterdir()) if path.name.startswith("shard")]
    return np.concatenate(
        [np.load(path) if path.suffix == ".npy" else np.fromfile(path, "<u2") for path in paths]
    )


def expected(*names):
    return [i for name in names for i in (*TEXTS[name].encode(), 256)]


def snapshot(directory):
    """All files but the config, which has the paths of this one."""
    paths = (p for p in directory.rglob("*") if p.is_file() and p.name != "train.toml")
    return {path.relative_to(directory): path.read_bytes() for path in paths}


def settings(output):
    return tomllib.loads((output / "train.toml").read_text("utf-8"))


def test_documents_are_sorted_and_end_with_eos(corpus, tmp_path, capsys):
    output = tmp_path / "out"
    assert run(corpus, "--output", output) == 0
    assert tokens(output / "train").tolist() == expected("a.py", "b.txt", "sub/c.md")
    manifest = Manifest.read(output / "train")
    assert (manifest.documents, manifest.eos_id, manifest.vocab_size) == (3, 256, 257)
    assert (manifest.dtype, manifest.tokenizer) == ("uint16", "byte")
    assert manifest.tokenizer_sha256 == load_tokenizer(output / "tokenizer").fingerprint
    table, reported = capsys.readouterr().out.split("\n\n", 1)
    assert reported.endswith(f"Next:\n  jaxforge train --config {output}/train.toml\n")
    said = settings(output)
    assert said["model"]["vocab_size"] == 257
    shards = TokenShards(said["data"]["dataset_path"], "*.npy", 5, vocab_size=257)
    assert len(shards) == 25 // 6
    assert load_tokenizer(said["data"]["tokenizer_path"]).vocab_size == 257
    frequencies = np.bincount(tokens(output / "train")) / 25
    entropy = -sum(f * math.log(f) for f in frequencies if f)
    assert f"{entropy:.4f} nats" in table
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


def test_globs_select_files(corpus, tmp_path):
    (corpus / "empty.txt").touch()
    names = lambda *args, **options: [d.name for d in find_inputs(*args, **options)]  # noqa: E731
    assert names([corpus]) == ["a.py", "b.txt", "sub/c.md", "sub/d.rst"]
    assert names([corpus], ["*.rst", "*.md"]) == ["sub/c.md", "sub/d.rst"]
    assert names([corpus], exclude=["sub/*", "a*"]) == ["b.txt"]
    assert names([corpus / "sub" / "d.rst", corpus / "sub"], ["*.md"]) == ["c.md", "d.rst"]
    assert names([corpus, corpus / "b.txt", corpus / "sub"], ["*.txt", "*.md"]) == [
        "b.txt",
        "sub/c.md",
    ]  # each once
    with pytest.raises(UserError, match=r"no text in .*\*\.c and no --exclude"):
        names([corpus], ["*.c"], exclude=["x"])
    with pytest.raises(UserError, match=r"INPUT .*nowhere does not exist"):
        names([tmp_path / "nowhere"])


def test_tokens_do_not_depend_on_format_or_shard_size(corpus, tmp_path):
    run(corpus, "--output", tmp_path / "npy")
    run(corpus, "--output", tmp_path / "bin", "--format", "bin", "--shard-tokens", 7)
    assert settings(tmp_path / "bin")["data"]["file_pattern"] == "*.bin"
    assert len(list((tmp_path / "bin" / "train").glob("*.bin"))) == 4
    assert (tokens(tmp_path / "bin" / "train") == tokens(tmp_path / "npy" / "train")).all()


def test_runs_are_deterministic(corpus, tmp_path):
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"text {i}\n" * i)
    options = ("--tokenizer", "bpe", "--vocab-size", "300", "--validation-fraction", "0.3")
    for name in ("a", "b"):
        run(corpus, "--output", tmp_path / name, *options)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_validation_split_is_stable_and_whole(corpus, tmp_path):
    for i in range(60):
        (corpus / f"{i}.txt").write_text(f"{i}\n")
    fraction = ("--validation-fraction", "0.25")
    run(corpus, "--output", tmp_path / "a", *fraction)
    assert settings(tmp_path / "a")["eval"] == {"enabled": False}  # 53 tokens
    run(corpus, "--output", tmp_path / "b", *fraction, "--exclude", "[1-3]*", "--format", "bin")
    decode = lambda path: set(bytes(t % 256 for t in tokens(path)).split(b"\0"))  # noqa: E731
    train, held_out = (decode(tmp_path / "a" / split) for split in ("train", "validation"))
    assert train & held_out == {b""}
    assert len(train | held_out) == 64
    assert 5 < len(held_out) < 25
    assert decode(tmp_path / "b" / "validation") < held_out
    with pytest.raises(UserError, match="puts 0 of 2 documents into validation"):
        run(corpus, "--output", tmp_path / "c", "--glob", "0.txt,1.txt", fraction[0], "1e-9")


def test_split_depends_on_names_only():
    splits = [split_of(f"{i}.txt", 0.5) for i in range(60)]
    assert splits == [split_of(f"{i}.txt", 0.5) for i in range(60)]
    assert 15 < splits.count("train") < 45
    assert split_of("0.txt", 0.0) == "train"


@pytest.mark.parametrize("part_bytes", [1, 10, 1000])
def test_long_documents_are_read_in_parts(corpus, tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
    monkeypatch.setattr(ingest, "BATCH_BYTES", 25)
    text = "".join(f"line {i} ü\n" for i in range(50)) + "no newline at the end"
    (corpus / "b.txt").write_text(text, "utf-8")
    run(corpus / "b.txt", corpus / "a.py", "--output", tmp_path / "out", "--workers", 1)
    assert tokens(tmp_path / "out" / "train").tolist() == [
        *expected("a.py"),
        *text.encode(),
        256,
    ]
    assert Manifest.read(tmp_path / "out" / "train").documents == 2


def test_max_bytes_stops_at_a_line(corpus, tmp_path):
    (corpus / "b.txt").write_text("one\ntwo\nthree\n")
    run(corpus, "--output", tmp_path / "out", "--max-bytes", len(TEXTS["a.py"].encode()) + 5)
    text = bytes(t % 256 for t in tokens(tmp_path / "out" / "train")).decode()
    assert text == TEXTS["a.py"] + "\0one\ntwo\n\0"


def test_broken_utf8_is_replaced_and_counted(corpus, tmp_path, capsys):
    (corpus / "b.txt").write_bytes(b"\xff\nfine \xc3\xa9\n")
    run(corpus, "--output", tmp_path / "out", "--glob", "*.txt,*.md")
    assert "not UTF-8      1" in capsys.readouterr().out
    assert "\ufffd\nfine é\n".encode() in bytes(t % 256 for t in tokens(tmp_path / "out" / "train"))


def test_types_hold_the_vocabulary(corpus, tmp_path):
    assert token_dtype(None, 65536) == "uint16"
    assert token_dtype(None, 65537) == "uint32"
    assert token_dtype("uint32", 257) == "uint32"
    with pytest.raises(UserError, match="uint16 cannot hold a vocabulary of 65537; use uint32"):
        token_dtype("uint16", 65537)
    run(corpus, "--output", tmp_path / "out", "--dtype", "uint32")
    assert tokens(tmp_path / "out" / "train").dtype == np.uint32


def test_tokenizer_from_disk(corpus, tmp_path):
    run(corpus, "--output", tmp_path / "a", "--tokenizer", "bpe", "--vocab-size", 270)
    run(corpus, "--output", tmp_path / "b", "--tokenizer", tmp_path / "a" / "tokenizer")
    a, b = (snapshot(tmp_path / name / "train") for name in "ab")
    assert a[Path("shard_00000.npy")] == b[Path("shard_00000.npy")]
    assert snapshot(tmp_path / "a" / "tokenizer") == snapshot(tmp_path / "b" / "tokenizer")
    text = load_tokenizer(tmp_path / "b" / "tokenizer").decode(tokens(tmp_path / "b" / "train"))
    assert text == TEXTS["a.py"] + TEXTS["b.txt"] + TEXTS["sub/c.md"]
    (tmp_path / "a" / "tokenizer" / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="names no end-of-text token"):
        run(corpus, "--output", tmp_path / "c", "--tokenizer", tmp_path / "a" / "tokenizer")
    assert not any(path.name.startswith(".c") for path in tmp_path.iterdir())


def test_output_is_not_overwritten(corpus, tmp_path):
    output = tmp_path / "out"
    run(corpus, "--output", output)
    before = snapshot(output)
    with pytest.raises(UserError, match=r"exists; .*--overwrite"):
        run(corpus, "--output", output, "--glob", "*.py")
    with pytest.raises(UserError, match="not made by"):
        run(corpus, "--output", corpus, "--overwrite")
    assert snapshot(output) == before
    run(corpus, "--output", output, "--glob", "*.py", "--overwrite")
    assert tokens(output / "train").tolist() == expected("a.py")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus", "out"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_failure_leaves_output_unchanged(corpus, tmp_path, monkeypatch, overwrite):
    output = tmp_path / "out"
    if overwrite:
        run(corpus, "--output", output)
    before = snapshot(tmp_path)
    vanished = find_inputs([corpus])
    vanished[1].path.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(preparation, "find_inputs", lambda *_: vanished)
    for tokenizer in ("byte", "bpe"):
        with pytest.raises(UserError, match=r"b\.txt changed .*: it does not exist any more"):
            run(corpus, "--output", output, "--overwrite", "--tokenizer", tokenizer)
    (tmp_path / "elsewhere").rename(vanished[1].path)
    assert snapshot(tmp_path) == before


@pytest.fixture
def small_files():
    """A file system on which writes fail as on a full disk, after 256 KiB of a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_is_named_and_cleaned_up(corpus, tmp_path, request):
    (corpus / "long.txt").write_text("all work and no play\n" * 20_000)
    request.getfixturevalue("small_files")
    with pytest.raises(UserError, match=r"cannot write .*train/shard_00000\.npy: File too large"):
        run(corpus, "--output", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_unwritable_output(corpus, tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*Not a directory"):
        run(corpus, "--output", corpus / "b.txt" / "out")


@pytest.mark.parametrize(
    "args",
    [
        ["--vocab-size", "300"],
        ["--validation-fraction", "1"],
        ["--shard-tokens", "0"],
        ["--format", "zip"],
    ],
)
def test_wrong_arguments(corpus, tmp_path, args):
    with pytest.raises(UserError, match=args[0] if args else "--"):
        run(corpus, "--output", tmp_path / "out", *args)


def test_run_main(capsys):
    def fail():
        raise UserError("no such thing")

    def interrupt():
        raise KeyboardInterrupt

    assert run_main(lambda: 0) == 0
    assert run_main(fail) == 2
    assert capsys.readouterr().err == "error: no such thing\n"
    assert run_main(interrupt) == 130


@pytest.mark.processes
def test_killed_run_leaves_no_output(tmp_path):
    (tmp_path / "corpus.txt").write_bytes(b"all work and no play\n" * 2_000_000)
    command = [*COMMAND, str(tmp_path / "corpus.txt"), "--output", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    partial = tmp_path / ".out.partial"
    while not list(partial.glob("out/train/shard*")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert partial.exists()
    assert not (tmp_path / "out").exists()

    again = subprocess.run([*command, "--max-bytes", "1000"], capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    assert not partial.exists()
    assert len(tokens(tmp_path / "out" / "train")) == 48 * 21 + 1

    refused = subprocess.run(command, capture_output=True, text=True)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert len(refused.stderr.splitlines()) == 1


def test_empty_text_has_no_parts(tmp_path):
    (tmp_path / "a").write_text("x")
    result = find_inputs([tmp_path])
    (tmp_path / "a").write_text("")
    modified = (tmp_path / "a").stat().st_mtime_ns
    source = dataclasses.replace(result[0], size=0, modified=modified)
    assert list(text_parts([source])) == []


@pytest.mark.parametrize(
    ("size", "vocabulary"),
    [(0, 512), (300_000, 512), (7_000_000, 8192), (16_384_000, 32_768), (10**12, 32_768)],
)  # fmt: skip
def test_little_text_makes_few_tokens(size, vocabulary):
    assert preparation.suggested_vocab_size(size) == vocabulary


@pytest.mark.parametrize(("n", "options", "vocabulary"), [
    (400, (), 1024), (400, ("--max-bytes", 200_000), 512), (400, ("--vocab-size", 300), 300),
])  # fmt: skip
def test_vocabulary_of_records_follows_from_their_text(
    tmp_path, monkeypatch, capsys, n, options, vocabulary
):
    sizes = []
    train = preparation.train_bpe
    monkeypatch.setattr(
        preparation, "train_bpe", lambda texts, size: sizes.append(size) or train(texts, size)
    )
    line = "{" + f'"text": "{"some words of a text " * 62}"' + "}\n"  # 1,302 bytes of text
    (tmp_path / "a.jsonl").write_text(line * n)
    command = (tmp_path / "a.jsonl", "--output", tmp_path / "out", "--tokenizer", "bpe")
    run(*command, "--workers", 1, *options)
    assert sizes == [vocabulary]
    assert f"{vocabulary:,} tokens" in capsys.readouterr().err


@pytest.mark.parametrize(("said", "fraction"), [("5%", 0.05), ("0.05", 0.05), ("12.5%", 0.125)])
def test_fraction_may_be_in_percent(said, fraction):
    command = ["a", "--output", "b", "--validation-fraction", said]
    assert prepare.parser().parse_args(command).validation_fraction == fraction
