"""Input formats are one file each, from which names, help and documentation follow."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import formats
from jaxforge.errors import UserError

ROOT = Path(__file__).parents[3]
RECIPE = (ROOT / "CONTRIBUTING.md").read_text().partition("### An input format")[2]


@pytest.fixture
def with_recipe(tmp_path, monkeypatch):
    """Add the format of the recipe in CONTRIBUTING.md as a file of its own."""
    (tmp_path / "code").mkdir()
    code = re.search(r"```python\n(.*?)```", RECIPE, re.DOTALL)[1]
    (tmp_path / "code" / "mail.py").write_text(code)
    monkeypatch.setattr(formats, "__path__", [*formats.__path__, str(tmp_path / "code")])
    formats.by_suffix.cache_clear()
    yield
    monkeypatch.undo()
    formats.by_suffix.cache_clear()


def test_format_of_one_file_is_read(with_recipe, tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.MBOX").write_text("From x\nfirst\nFrom y\nsecond\n")
    (tmp_path / "in" / "b.jsonl").write_text(json.dumps({"text": "third"}))
    prepare.main([str(tmp_path / "in"), "--output", str(tmp_path / "out"), "--workers", "1"])
    tokens = np.load(tmp_path / "out" / "train" / "shard_00000.npy")
    texts = bytes(i if i < 256 else 0 for i in tokens).decode()
    assert texts == "first\n\0second\n\0third\0"
    assert ".mbox" in formats.listed_suffixes()
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"or of records: .*\.mbox"):
        prepare.main([str(tmp_path / "empty"), "--output", str(tmp_path / "none")])


def test_page_lists_every_format():
    page = (ROOT / "docs" / "data.md").read_text()
    for format_ in dict.fromkeys(formats.by_suffix().values()):
        names = ", ".join(f"`{suffix}`" for suffix in format_.suffixes)
        start = "any other file" if format_.is_text else names
        assert f"| {start} | {format_.documents} |" in page
    packable = [suffix for suffix, each in formats.by_suffix().items() if suffix in each.packable]
    assert f"| {', '.join(f'`{suffix}`' for suffix in packable)} with `.gz` or `.zst` |" in page
