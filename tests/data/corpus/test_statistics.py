"""Statistics of prepared data against counts of the tokens on disk."""

import json

import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import documents, statistics
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.corpus.statistics import SourceCounts, Statistics

END = 256
FILES = {
    "web/a.jsonl": ["x" * 3, "y" * 100, "é" * 8],
    "web/b.jsonl": ["z" * 1000],
    "code/c.py": "print()\n",
    "d.txt": "Words. " * 40,
}


@pytest.fixture
def texts(tmp_path):
    for name, content in FILES.items():
        path = tmp_path / "texts" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        is_text = isinstance(content, str)
        lines = [content] if is_text else [json.dumps({"text": text}) + "\n" for text in content]
        path.write_text("".join(lines), "utf-8")
    return tmp_path / "texts"


def run(*args):
    return prepare.main([*map(str, args), "--workers", "1"])


def lengths(directory):
    """Return the tokens of each document, END included, from the shards."""
    shards = sorted(directory.glob("shard*.npy"))
    ends = np.flatnonzero(np.concatenate([np.load(shard) for shard in shards]) == END)
    return np.diff(ends, prepend=-1)


def check(directory):
    """Check counts by length against the shards; return the statistics."""
    manifest = Manifest.read(directory)
    counts, n_tokens = manifest.statistics, lengths(directory)
    n_bins = len(counts.documents_by_length)
    expected = [[], []]
    for i in range(n_bins):
        inside = n_tokens[(n_tokens >= 2**i) & (n_tokens < 2 ** (i + 1))]
        expected[0].append(len(inside))
        expected[1].append(inside.sum())
    assert list(counts.documents_by_length) == expected[0]
    assert list(counts.tokens_by_length) == expected[1]
    assert sum(expected[0]) == manifest.documents == sum(s.documents for s in counts.sources)
    assert sum(expected[1]) == manifest.tokens == sum(s.tokens for s in counts.sources)
    assert sum(s.bytes for s in counts.sources) == counts.bytes
    return counts


def test_counts_match_shards(texts, tmp_path):
    run(texts, "--output", tmp_path / "out")
    counts = check(tmp_path / "out" / "train")
    assert counts.sources == (
        SourceCounts("web", 4, 3 + 100 + 16 + 1000 + 4, 3 + 100 + 16 + 1000),
        SourceCounts("d.txt", 1, 281, 280),
        SourceCounts("code", 1, 9, 8),
    )


@pytest.mark.parametrize("n", [1, 57, 58, 900])
def test_counts_of_cut_document_match_shards(texts, tmp_path, n, monkeypatch):
    monkeypatch.setattr(documents, "PART_BYTES", 16)
    monkeypatch.setattr(documents, "LINE_BYTES", 16)
    run(texts, "--output", tmp_path / "out", "--validation-tokens", n)
    train, held_out = (check(tmp_path / "out" / name) for name in ("train", "validation"))
    assert train.bytes + held_out.bytes == 3 + 100 + 16 + 1000 + 8 + 280


def test_record_field_names_source(tmp_path):
    path = tmp_path / "a.jsonl"
    rows = [("one", "books"), ("two", "web"), ("three", "books"), ("four", None)]
    path.write_text("".join(json.dumps({"text": t, "source": s}) + "\n" for t, s in rows))
    run(path, "--output", tmp_path / "out", "--source-field", "source")
    sources = {s.name: s.documents for s in check(tmp_path / "out" / "train").sources}
    assert sources == {"books": 2, "web": 1, "a.jsonl": 1}


def test_merged_counts_equal_counts_of_whole(monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_SOURCES", 30)
    rng, whole, parts = np.random.default_rng(0), Statistics(), [Statistics() for _ in range(3)]
    for i, part in enumerate(parts):
        for _ in range(100):
            text = (f"source {rng.integers(40) + 20 * (i > 0)}", int(rng.integers(1, 999)), 7)
            part.add_text(*text, is_end=True)
            whole.add_text(*text, is_end=True)
    merged = Statistics()
    for part in parts:
        merged.merge(part)
    assert merged.documents_by_length == whole.documents_by_length
    assert merged.tokens_by_length == whole.tokens_by_length
    result = merged.summary(["rule"])
    assert len(result.sources) == statistics.LONGEST_LIST + 1
    assert result.sources[-1].name == ""
    assert sum(s.tokens for s in result.sources) == sum(whole.tokens_by_length)
    assert [r.rule for r in result.rules] == ["rule"]


def test_manifest_without_statistics_is_read(tmp_path, texts):
    run(texts, "--output", tmp_path / "out")
    path = tmp_path / "out" / "train" / "manifest.json"
    content = json.loads(path.read_text())
    del content["statistics"]
    path.write_text(json.dumps(content))
    assert Manifest.read(path.parent).statistics is None
