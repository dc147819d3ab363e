"""Page of a prepared corpus, against its manifest."""

import json
import os
import re
from html.parser import HTMLParser

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus.manifest import Manifest


class Cells(HTMLParser):
    """Rows of the tables, as text, and the tags."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.tags, self._cell = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        self._cell = tag in ("td", "th")
        if self._cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self._cell = False

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data


@pytest.fixture(scope="module")
def output(tmp_path_factory):
    """Prepare a corpus with hostile names."""
    root = tmp_path_factory.mktemp("page")
    maps = root / "maps.py"
    maps.write_text(
        "def long(r):\n    return r if len(r['text']) > 3 else None\nlong.rule = '<b>long</b>'\n"
    )
    folder = root / "in" / "<script>alert(1)</script>"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text(
        "".join(json.dumps({"text": "x" * n}) + "\n" for n in (1, 5, 6, 7, 30, 500))
    )
    latin = root / "in" / os.fsdecode(b"caf\xe9")
    latin.mkdir()
    (latin / "b.txt").write_text("text " * 100)
    prepare.main([
        str(root / "in"), "--output", str(root / "out"), "--workers", "1", "--map", f"{maps}:long",
        "--validation-fraction", "0.3",
    ])  # fmt: skip
    return root / "out"


def test_page_has_numbers_of_manifest(output):
    page = (output / "corpus.html").read_text()
    train, held_out = (Manifest.read(output / name) for name in ("train", "validation"))
    rows = Cells(page).rows
    assert ["<b>long</b>", "7", "6", "0", "1", "14.3%"] in rows
    for manifest in (train, held_out):
        assert f"<dd>{manifest.tokens:,}</dd>" in page
        for i, count in enumerate(manifest.statistics.documents_by_length):
            name = f"{2**i:,} to {2 ** (i + 1) - 1:,}"
            tokens = manifest.statistics.tokens_by_length[i]
            if count:
                assert [name, f"{count}", "", f"{tokens}", ""] in rows
        for source in manifest.statistics.sources:
            assert [source.name, str(source.documents), "", str(source.tokens), ""] in rows


def test_page_is_self_contained_and_escaped(output):
    page = (output / "corpus.html").read_text()
    tags = Cells(page).tags
    assert not [tag for tag, attrs in tags if tag == "script" or "src" in attrs or "href" in attrs]
    assert "&lt;script&gt;alert(1)" in page
    assert r"caf\udce9" in page
    assert re.search(r"default-src 'none'", page)
    assert "prefers-color-scheme: dark" in page
