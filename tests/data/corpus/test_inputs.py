"""JSONL, Parquet and Hugging Face datasets: records in order, each a document."""

import gzip
import json
import re
import sys

import datasets
import numpy as np
import pyarrow
import pytest
import zstandard
from pyarrow import parquet

from jaxforge.commands import prepare
from jaxforge.data.corpus import documents
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.errors import UserError

TEXTS = [f"text {i} ä\n" * (i % 3 + 1) for i in range(50)]


def jsonl(texts, field="text"):
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def write(path, texts, field="text"):
    """`texts` in the format that the name of `path` says."""
    if path.suffix == ".parquet":
        table = pyarrow.table({field: texts, "other": list(range(len(texts)))})
        parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(jsonl(texts, field)))
    elif path.suffix == ".zst":
        path.write_bytes(zstandard.compress(jsonl(texts, field)))
    else:
        path.write_bytes(jsonl(texts, field))
    return path


def run(*args):
    return prepare.main([str(arg) for arg in args])


def documents_of(directory):
    tokens = np.load(directory / "shard_00000.npy").tolist()
    ends = [i for i, token in enumerate(tokens) if token == 256]
    assert ends[-1] == len(tokens) - 1
    assert Manifest.read(directory).documents == len(ends)
    starts = [0, *(end + 1 for end in ends[:-1])]
    return [bytes(tokens[a:b]).decode() for a, b in zip(starts, ends, strict=True)]


FORMATS = ("jsonl", "jsonl.gz", "jsonl.zst", "json.gz", "parquet")


@pytest.mark.parametrize("suffix", FORMATS)
def test_each_record_is_a_document(tmp_path, suffix):
    write(tmp_path / f"a.{suffix}", TEXTS, "content")
    run(tmp_path / f"a.{suffix}", "--output", tmp_path / "out", "--text-field", "content")
    assert documents_of(tmp_path / "out" / "train") == TEXTS


@pytest.mark.parametrize("suffix", FORMATS)
def test_records_are_numbered_in_order(tmp_path, suffix):
    [source] = find_inputs([write(tmp_path / f"a.{suffix}", TEXTS)])
    records = list(source.records())
    assert [record.number for record in records] == list(range(1, 51))
    assert [record.content.read().decode() for record in records] == TEXTS


def test_mixed_inputs_are_sorted_by_name(tmp_path):
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i, name in enumerate(("d.jsonl", "b.parquet", "a.jsonl.gz", "e.jsonl.zst")):
        write(corpus / name, TEXTS[10 * i : 10 * i + 10])
    (corpus / "c.txt").write_text("a file")
    run(corpus, "--output", tmp_path / "out")
    a, b, d, e = (TEXTS[start : start + 10] for start in (20, 10, 0, 30))
    assert documents_of(tmp_path / "out" / "train") == [*a, *b, "a file", *d, *e]


def saved(path):
    datasets.Dataset.from_dict({"text": TEXTS}, split="train").save_to_disk(path)


def saved_with_splits(path):
    train = datasets.Dataset.from_dict({"text": TEXTS})
    datasets.DatasetDict({"train": train, "test": train.select([3])}).save_to_disk(path)


def data_files(path):
    path.mkdir()
    write(path / "part-0.parquet", TEXTS[:20])
    write(path / "part-1.parquet", TEXTS[20:])


@pytest.mark.parametrize("make", [saved, saved_with_splits, data_files])
def test_hugging_face_datasets(tmp_path, make, monkeypatch):
    make(tmp_path / "set")
    (tmp_path / "z.txt").write_text("files first")
    arguments = (tmp_path / "z.txt", "--hf-dataset", tmp_path / "set")
    run(*arguments, "--output", tmp_path / "out")
    assert documents_of(tmp_path / "out" / "train") == ["files first", *TEXTS]
    with pytest.raises(UserError, match=r"dataset '.*set', config None, split 'no'"):
        run(*arguments, "--output", tmp_path / "b", "--hf-split", "no")
    with pytest.raises(UserError, match=r'set:train has no column "body"; it has text'):
        run(*arguments, "--output", tmp_path / "b", "--text-field", "body")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"needs datasets: pip install 'jaxforge\[data\]'"):
        run(*arguments, "--output", tmp_path / "b")


BAD = {
    "{": r"bad\.jsonl:2: not JSON \(",
    "[" * 100_000: r"bad\.jsonl:2: not JSON \(",
    '"text"': r"bad\.jsonl:2: not a JSON object",
    '{"texts": "a", "b": 1}': r'bad\.jsonl:2: no text in "text" \(it has: texts, b\)',
    '{"text": null}': r'bad\.jsonl:2: no text in "text"',
    '{"text": "\udcff"}': r"bad\.jsonl:2: not JSON \(",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_lines_raise_or_are_skipped_and_counted(tmp_path, line, capsys):
    content = f'{{"text": "good"}}\n{line}\n\n{{"text": ""}}\n{{"text": "end"}}'
    (tmp_path / "bad.jsonl").write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=BAD[line] + ".*--skip-bad"):
        run(tmp_path / "bad.jsonl", "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    run(tmp_path / "bad.jsonl", "--output", tmp_path / "out", "--skip-bad")
    assert documents_of(tmp_path / "out" / "train") == ["good", "end"]
    assert "left out as bad  1 records" in capsys.readouterr().out


def test_bad_rows_are_named(tmp_path):
    write(tmp_path / "a.parquet", ["a", None])
    with pytest.raises(UserError, match=r'a\.parquet:2: no text in "text" \(None\)'):
        run(tmp_path / "a.parquet", "--output", tmp_path / "out")
    with pytest.raises(UserError, match=r'a\.parquet has no column "x"; it has text, other'):
        run(tmp_path / "a.parquet", "--output", tmp_path / "out", "--text-field", "x")


@pytest.mark.parametrize("suffix", FORMATS[1:])
def test_truncated_files_are_refused(tmp_path, suffix):
    texts = [f"{i * i} and more text\n" for i in range(20_000)]
    path = write(tmp_path / f"a.{suffix}", texts)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(UserError, match=rf"cannot read .*a\.{suffix}: "):
        run(path, "--output", tmp_path / "out")


def test_undecompressable_input_is_refused(tmp_path):
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text"))
    with pytest.raises(UserError, match=r"a\.txt\.gz: of compressed files, only \.csv\.gz"):
        run(tmp_path / "a.txt.gz", "--output", tmp_path / "out")


def test_max_bytes_stops_at_line_of_record(tmp_path):
    write(tmp_path / "a.jsonl", ["one\n", "two\nthree\nfour\n", "five\n"])
    run(tmp_path / "a.jsonl", "--output", tmp_path / "out", "--max-bytes", 9)
    assert documents_of(tmp_path / "out" / "train") == ["one\n", "two\nthree\n"]


def test_records_are_held_out_by_file_and_number(tmp_path):
    write(tmp_path / "a.jsonl", TEXTS)
    write(tmp_path / "a.parquet", TEXTS)
    held_out = {}
    for name in ("a.jsonl", "a.parquet"):
        out = tmp_path / f"{name}.out"
        run(tmp_path / name, "--output", out, "--validation-fraction", 0.3)
        held_out[name] = documents_of(out / "validation")
        remaining = [text for text in TEXTS if text not in held_out[name]]
        assert documents_of(out / "train") == remaining
        expected = [
            t for i, t in enumerate(TEXTS, 1) if documents.hash_fraction(f"{name}:{i}") < 0.3
        ]
        assert held_out[name] == expected
    assert held_out["a.jsonl"] != held_out["a.parquet"]


def test_split_without_documents_is_refused(tmp_path):
    write(tmp_path / "a.jsonl", TEXTS[:1])
    with pytest.raises(UserError, match="puts 0 of 1 documents into validation"):
        run(tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation-fraction", 1e-6)
    (tmp_path / "b.jsonl").write_text('\n{"text": ""}\n')
    with pytest.raises(UserError, match="hold no text"):
        run(tmp_path / "b.jsonl", "--output", tmp_path / "out")


def test_lone_surrogate_becomes_a_replacement_character(tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}\n{"text": "c"}\n')
    run(tmp_path / "a.jsonl", "--output", tmp_path / "out")
    assert documents_of(tmp_path / "out" / "train") == ["a\ufffdb", "c"]
    assert re.search("not UTF-8 +1$", capsys.readouterr().out, re.MULTILINE)
