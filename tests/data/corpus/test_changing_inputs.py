"""Inputs that change while `prepare` reads them end the command, and nothing of them is resumed."""

import gzip
import io
import json
import os
import pickle

import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from jaxforge.commands import prepare
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.huggingface import HuggingFace, load_dataset
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.records import TextField
from jaxforge.errors import InputChangedError
from tests.data.corpus.interruptions import snapshot

TEXTS = [f"text {i}" for i in range(6)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
TABLE = pyarrow.table({"text": TEXTS})


def packed(write):
    sink = io.BytesIO()
    write(sink)
    return sink.getvalue()


def write_arrow(sink):
    with pyarrow.ipc.new_file(sink, TABLE.schema) as writer:
        writer.write_table(TABLE, max_chunksize=2)


FILES = {
    "a.txt": b"|".join(text.encode() for text in TEXTS),
    "a.jsonl": LINES,
    "a.jsonl.gz": gzip.compress(LINES),
    "a.jsonl.zst": zstandard.compress(LINES),
    "a.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "a.csv": ("text\n" + "\n".join(TEXTS)).encode(),
    "a.parquet": packed(lambda sink: parquet.write_table(TABLE, sink)),
    "a.arrow": packed(write_arrow),
}


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def overwrite(path):
    path.write_bytes(path.read_bytes().replace(b"text 5", b"TEXT 5"))


def remove(path):
    path.unlink()


CHANGES = {
    cut: r"it had [\d,]+ bytes, and has",
    overwrite: "its time of modification is another",
    remove: "it does not exist any more",
}


@pytest.mark.parametrize("moment", ["before", "while"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", FILES)
def test_changed_file_raises(tmp_path, name, change, moment):
    path = tmp_path / name
    path.write_bytes(FILES[name])
    [source] = find_inputs([path], separator=b"|" if name == "a.txt" else b"")
    parts = text_parts([source], skip_bad=True)
    if moment == "while":
        next(parts)
    change(path)
    with pytest.raises(InputChangedError, match=f"{name} changed since it was planned: "):
        list(parts)
    with pytest.raises(InputChangedError, match=CHANGES[change]):
        source.check_unchanged()


def test_metadata_alone_is_no_change(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    parts = text_parts(find_inputs([path]))
    next(parts)
    path.chmod(0o600)
    os.link(path, tmp_path / "other")
    assert len(list(parts)) == 5


def test_end_before_the_last_record_is_checked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    parts = text_parts(find_inputs([path]), max_bytes=5)
    next(parts)
    overwrite(path)
    with pytest.raises(InputChangedError):
        list(parts)


def test_changed_saved_dataset_raises(tmp_path):
    import datasets

    datasets.Dataset.from_list([{"text": text} for text in TEXTS]).save_to_disk(tmp_path / "saved")
    source = HuggingFace.on_disk("saved", load_dataset(str(tmp_path / "saved")), TextField())
    parts = text_parts([source])
    next(parts)
    [path] = (tmp_path / "saved").glob("*.arrow")
    cut(path)
    with pytest.raises(InputChangedError, match=r"\.arrow changed since it was planned"):
        list(parts)


RULES = """
import os
from pathlib import Path

def replace(record):
    path, done = Path({path!r}), Path({path!r} + ".done")
    if record["text"].startswith("text 150 ") and not done.exists():
        done.touch()
        new = path.with_suffix(".new")
        new.write_bytes(path.read_bytes().replace(b"text 2", b"TEXT 2"))
        new.rename(path)
    return record
"""


def test_error_survives_its_way_between_processes():
    error = pickle.loads(pickle.dumps(InputChangedError("a.jsonl changed", "a.jsonl")))
    assert (str(error), error.source) == ("a.jsonl changed", "a.jsonl")


@pytest.fixture
def corpus(tmp_path):
    """Return a file, and the options of a map that replaces it at record 150."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i} ."}) + "\n" for i in range(300)))
    (tmp_path / "rules.py").write_text(RULES.format(path=str(path)))
    return path, ("--map", f"{tmp_path / 'rules.py'}:replace", "--unit-bytes", "2000")


def run(path, output, *options):
    return prepare.main([str(path), "--output", str(output), *options])


@pytest.mark.parametrize("options", [("--workers", "1"), ("--workers", "2"),
                                     ("--workers", "1", "--unit-bytes", "1000000")])  # fmt: skip
def test_replaced_input_is_prepared_anew(corpus, tmp_path, options, capsys):
    path, usual = corpus
    with pytest.raises(InputChangedError, match=r"a\.jsonl changed since it was planned"):
        run(path, tmp_path / "out", *usual, *options)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.partial").exists()
    assert "the same command resumes" not in capsys.readouterr().err
    alone = (*options, "--workers", "1")
    run(path, tmp_path / "out", *usual, *alone)
    run(path, tmp_path / "fresh", *usual, *alone)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "fresh")


def test_share_of_a_replaced_input_has_to_be_planned_again(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path, usual = corpus
    output, share = tmp_path / "out", ("--share", "0/1", "--workers", "1")
    run(path, output, *usual, "--slurm", "1")
    with pytest.raises(InputChangedError, match=r"a\.jsonl changed since it was planned"):
        run(path, output, *usual, *share)
    with pytest.raises(ValueError, match=r"planned otherwise: .*a\.jsonl changed .*Plan it again"):
        run(path, output, *usual, *share)
    run(path, output, *usual, "--workers", "1")
    run(path, tmp_path / "fresh", *usual, "--workers", "1")
    assert snapshot(output) == snapshot(tmp_path / "fresh")
