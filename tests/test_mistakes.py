"""Messages for mistyped command lines, listed in `mistakes.txt`.

Each gives one message with problem and remedy, exit code 2 and no traceback, and writes nothing.
"""

import importlib
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxforge.cli.running import run_main
from jaxforge.commands import COMMANDS, dispatch, prepare, train

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^(\S.*)\n {4}(.*)$", re.MULTILINE)
MISTAKES = BLOCK.findall((ROOT / "tests" / "mistakes.txt").read_text().partition("\n\n")[2])


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a directory with texts, data, a run and invalid files."""
    here = tmp_path_factory.mktemp("here")
    (here / "debug.toml").write_text((ROOT / "configs" / "debug.toml").read_text())
    for name in ("texts", "empty", "torn"):
        (here / name).mkdir()
    (here / "texts" / "1.txt").write_text("words that repeat\n" * 100)
    (here / "broken.toml").write_text("[model\n")
    (here / "latin.toml").write_bytes("# café\n".encode("latin-1"))
    (here / "utf16.toml").write_bytes("[model]\ndim = 64\n".encode("utf-16"))
    (here / "vlm.toml").write_text("[vlm]\nx = 1\n")
    (here / "twice.toml").write_text("[model]\ndim = 64\ndim = 32\n")
    (here / "config.yaml").write_text("model:\n  hidden_size: 64\n")
    (here / "json.toml").write_text('{"model": {"dim": 64}}')
    (here / "one.jsonl").write_text('{"text": "hello there"}\n')
    for name in ("content.jsonl", "syntax.txt"):
        (here / name).write_text('{"id": 7, "content": "hello there"}\n')
    (here / "chats.jsonl").write_text('{"messages": []}\n')
    (here / "bad.jsonl").write_text('{"text": "hello\n')
    (here / "rules.py").write_text(
        "def keep(record):\n    return record\n\ndef fail(record):\n    return record['colour']\n"
    )
    (here / "pages.warc.gz").write_bytes(b"not read")
    (here / "torn.tar").write_bytes(b"not read")
    (here / "picture.png").write_bytes(np.random.default_rng(0).bytes(2000))
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(here)
        prepare.main(["texts", "--output", "data", "--workers", "1"])
        shard = Path("data/train/shard_00000.npy")
        Path("torn/shard_00000.npy").write_bytes(shard.read_bytes()[:100])
        train.main([
            "--config", "debug.toml", "--data.dataset_path=data/train", "--train.max_steps=4",
            "--data.tokenizer_path=data/tokenizer", "--model.vocab_size=320",
            "--checkpoint.dir=runs/done", "--checkpoint.interval=2",
        ])  # fmt: skip
    return here


def run_line(line, monkeypatch, capsys):
    """Return the output and exit code of a command line."""
    words = shlex.split(line)
    monkeypatch.setattr(sys, "argv", ["jaxforge", *words])
    command = COMMANDS.get(words[0])

    def main():
        if command is None:
            return dispatch.main(words)
        module = importlib.import_module(command.module)
        return module.main(words[1:])

    capsys.readouterr()
    try:
        code = run_main(main)
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().err


def tree(directory):
    return sorted((path, path.stat().st_mtime_ns) for path in directory.rglob("*"))


@pytest.mark.parametrize(("line", "answer"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_mistake_gets_documented_message(line, answer, here, monkeypatch, capsys):
    monkeypatch.chdir(here)
    before = tree(here / "data")
    code, stderr = run_line(line, monkeypatch, capsys)
    assert code == 2, stderr
    expected = answer.replace("{here}", str(here)).split("...")
    pattern = ".*".join(map(re.escape, expected))
    assert re.search(f"error: (.*\n)*.*{pattern}", stderr), stderr
    assert "Traceback" not in stderr
    assert "usage:" not in stderr
    assert tree(here / "data") == before
