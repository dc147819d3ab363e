"""Text files with separators, corpora with attributes, and web archives."""

import gzip
import json
import random
import re
import subprocess
import sys

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import documents
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.formats import text as text_format
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.errors import UserError
from tests.data.corpus.test_maps import documents as prepared

EOT = "<|endoftext|>"


def run(*args):
    return prepare.main([*map(str, args), "--workers", "1"])


@pytest.mark.parametrize(
    ("separator", "text", "expected"),
    [
        (EOT, f"one{EOT}two\n{EOT}{EOT}three", ["one", "two\n", "three"]),
        (EOT, f"one\n{EOT}\ntwo\n\n{EOT}\r\n{EOT}\n", ["one\n", "two\n\n"]),
        (EOT, f"{EOT}\n\none{EOT}\ntwo", ["\none", "\ntwo"]),
        ("\\n\\n", "one\n\ntwo\n\n\nthree\n\n\n\nfour\n", ["one", "two", "\nthree", "four\n"]),
        ("\\n", "one\n \ntwo", ["one", "two"]),
        ("aa", "1aaa2aaaa3", ["1", "a2", "3"]),
        ("§", "ä§ö", ["ä", "ö"]),
        ("x\\\\n", "1x\\n2", ["1", "2"]),
        (EOT, "no separator", ["no separator"]),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_text_is_split_at_separators(tmp_path, separator, text, expected, encoding):
    (tmp_path / "a.txt").write_bytes(text.encode(encoding))
    run(tmp_path / "a.txt", "--output", tmp_path / "out", "--separator", separator)
    assert prepared(tmp_path / "out") == expected


@pytest.mark.parametrize("chunk", [1, 5, 16, 1 << 20])
def test_separators_are_recognized_across_reads(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(text_format, "_CHUNK", chunk)
    monkeypatch.setattr(documents, "PART_BYTES", 4)
    rng = random.Random(0)
    texts = ["".join(rng.choices("ab\n", k=rng.randrange(40))) for _ in range(50)]
    (tmp_path / "a.txt").write_text("abab".join(texts))
    (source,) = find_inputs([tmp_path / "a.txt"], separator=b"abab")
    every, whole = text_parts([source]), {}
    for part in every:
        whole[part.document] = whole.get(part.document, "") + part.text
    alone = re.compile(r"(?<![^\n])abab\n|abab")
    expected = [text for text in alone.split("abab".join(texts)) if text.strip()]
    assert list(whole.values()) == expected


def test_long_documents_take_bounded_memory(tmp_path):
    with (tmp_path / "a.txt").open("wb") as file:
        for _ in range(2):
            for _ in range(150):
                file.write(b"words of a line\n" * (1 << 16))
            file.write(EOT.encode())
    code = (
        "import resource, sys, pathlib\n"
        "from jaxforge.data.corpus.documents import text_parts\n"
        "from jaxforge.data.corpus.inputs import find_inputs\n"
        "found = find_inputs([pathlib.Path(sys.argv[1])], separator=b'<|endoftext|>')\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "parts = [(part.document, part.size, part.last) for part in text_parts(found)]\n"
        "print(sum(size for _, size, _ in parts), sum(last for *_, last in parts),\n"
        "      (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "a.txt")]
    size, ends, mib = subprocess.run(
        command, capture_output=True, text=True, check=True
    ).stdout.split()
    assert (int(size), int(ends)) == (2 * 150 << 20, 2)
    assert int(mib) < 40


def test_separated_documents_are_held_out_and_mapped(tmp_path):
    (tmp_path / "a.txt").write_text(EOT.join(f"text {i}" for i in range(40)))
    path = tmp_path / "f.py"
    path.write_text("def f(r):\n    return {'text': r['text'].upper()}\n")
    options = ("--separator", EOT, "--map", f"{path}:f", "--validation-fraction", "0.3")
    run(tmp_path / "a.txt", "--output", tmp_path / "out", *options)
    train, held_out = (prepared(tmp_path / "out", name) for name in ("train", "validation"))
    assert sorted(train + held_out) == sorted(f"TEXT {i}" for i in range(40))
    assert 4 <= len(held_out) <= 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jsonl", "--separator", "x"], "--separator is for text files, and no INPUT is one"),
        (["a.warc.gz"], "WARC files hold web pages and not their text. Extract the text"),
        (["b.warc.wet.gz"], "with datatrove or trafilatura, and prepare these"),
    ],
)
def test_unsuitable_input_is_refused(tmp_path, arguments, message):
    for name in ("a.txt", "a.jsonl", "a.warc.gz", "b.warc.wet.gz"):
        (tmp_path / name).write_text('{"text": "x"}' if "json" in name else "text")
    with pytest.raises(UserError, match=re.escape(message)):
        run(tmp_path / arguments[0], *arguments[1:], "--output", tmp_path / "out")


def dolma(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"id": str(i), "text": t, "source": s, "metadata": {"a": [i]}, "added": "2024-01-01"}
            for i, (t, s) in enumerate(texts)]  # fmt: skip
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_documents_of_dolma_are_read_with_their_sources(tmp_path):
    root = tmp_path / "corpus"
    dolma(root / "documents" / "0.json.gz", [("one", "wiki"), ("two", "books")])
    dolma(root / "documents" / "1.jsonl.gz", [("three", "wiki")])
    path = root / "attributes" / "tags" / "0.json.gz"
    path.parent.mkdir(parents=True)
    path.write_bytes(gzip.compress(b'{"id": "0", "attributes": {}}\n'))
    (root / "README.md").write_text("# About")
    options = ("--glob", "*.json.gz,*.jsonl.gz", "--exclude", "attributes/*")
    run(root, "--output", tmp_path / "out", *options, "--source-field", "source")
    assert prepared(tmp_path / "out") == ["one", "two", "three"]
    sources = Manifest.read(tmp_path / "out" / "train").statistics.sources
    assert {s.name: s.documents for s in sources} == {"wiki": 2, "books": 1}
