"""Text as people have it: one file, with marks, among pictures, or given to training as it is."""

import codecs
import json
import os
import re
import tempfile
from pathlib import Path

import numpy as np
import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import documents
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.corpus.manifest import Manifest
from jaxforge.data.tokens import TokenShards
from jaxforge.errors import UserError

END = 256


def run(*args):
    return prepare.main([*map(str, args), "--workers", "1"])


def tokens(directory):
    return np.concatenate([np.load(path) for path in sorted(directory.glob("shard*"))]).tolist()


def text(directory):
    return bytes(token for token in tokens(directory) if token != END).decode()


def lines(n):
    return "".join(f"line {i} ü\n" for i in range(n))


@pytest.mark.parametrize("part_bytes", [50, 1 << 20])
def test_single_file_holds_out_its_last_lines(tmp_path, monkeypatch, part_bytes):
    monkeypatch.setattr(documents, "PART_BYTES", part_bytes)
    (tmp_path / "a.txt").write_text(lines(100), "utf-8")
    run(tmp_path / "a.txt", "--output", tmp_path / "out", "--validation-fraction", "0.1")
    train, held_out = (text(tmp_path / "out" / split) for split in ("train", "validation"))
    assert train + held_out == lines(100)
    assert train.endswith("\n")
    assert len(held_out) == pytest.approx(0.1 * len(lines(100)), abs=20)
    for split in ("train", "validation"):
        assert tokens(tmp_path / "out" / split)[-1] == END
        assert Manifest.read(tmp_path / "out" / split).documents == 1


def test_single_line_is_cut_at_a_character(tmp_path):
    (tmp_path / "a.txt").write_text("ü" * 999, "utf-8")
    run(tmp_path / "a.txt", "--output", tmp_path / "out", "--validation-fraction", "0.25")
    train, held_out = (text(tmp_path / "out" / split) for split in ("train", "validation"))
    assert train + held_out == "ü" * 999
    assert len(held_out) in (249, 250)


def test_cut_is_in_what_max_bytes_leaves(tmp_path):
    (tmp_path / "a.txt").write_text(lines(100), "utf-8")
    run(tmp_path, "--output", tmp_path / "out", "--validation-fraction", 0.5, "--max-bytes", 100)
    train, held_out = (text(tmp_path / "out" / split) for split in ("train", "validation"))
    assert lines(100).startswith(train + held_out)
    assert 30 < len(held_out.encode()) < 70


def test_first_tokens_are_held_out_of_any_documents(tmp_path):
    records = [json.dumps({"text": f"{i:09}\n"}) for i in range(100)]
    (tmp_path / "a.jsonl").write_text("\n".join(records))
    run(tmp_path / "a.jsonl", "--output", tmp_path / "out", "--validation-tokens", 115)
    train, held_out = (tokens(tmp_path / "out" / split) for split in ("train", "validation"))
    assert held_out[-1] == END
    assert len(held_out) == 116
    whole = [i for n in range(100) for i in (*f"{n:09}\n".encode(), END)]
    assert held_out[:-1] + train == whole
    counts = [
        Manifest.read(tmp_path / "out" / split).documents for split in ("train", "validation")
    ]
    assert counts == [90, 11]
    run(tmp_path / "a.jsonl", "--output", tmp_path / "even", "--validation-tokens", 110)
    assert len(tokens(tmp_path / "even" / "validation")) == 110
    with pytest.raises(UserError, match="--validation-tokens 99999 leaves nothing to train on"):
        run(tmp_path / "a.jsonl", "--output", tmp_path / "all", "--validation-tokens", 99999)


@pytest.mark.parametrize(
    "options",
    [
        ("--validation-tokens", "5", "--validation-fraction", "0.1"),
        ("--validation-tokens", "5", "--conversations"),
        ("--validation-tokens", "0"),
    ],
)
def test_conflicting_options_raise(tmp_path, options):
    with pytest.raises(UserError, match=r"validation-|--tokenizer|--vocab"):
        run(tmp_path, "--output", tmp_path / "out", *options)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_byte_order_marks_are_no_text(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("\nä\ufeffb\n".encode(encoding))
    (tmp_path / "b.txt").write_bytes(codecs.BOM_UTF16_BE + "c".encode("utf-16-be"))
    run(tmp_path, "--output", tmp_path / "out")
    assert text(tmp_path / "out" / "train") == "\nä\ufeffbc".replace("bc", "b\nc")


def test_json_lines_accept_bom_and_require_utf8(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', "utf-8-sig")
    run(tmp_path, "--output", tmp_path / "out")
    assert text(tmp_path / "out" / "train") == "a"
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n', "utf-16")
    with pytest.raises(UserError, match=r"a\.jsonl is in UTF-16.* iconv -f UTF-16 -t UTF-8"):
        run(tmp_path, "--output", tmp_path / "other")


def test_binary_files_are_named_before_reading(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for name in ("b.png", "c.png", "d"):
        (tmp_path / name).write_bytes(b"\x89PNG\0\0")
    with pytest.raises(UserError, match=r"3 file\(s\) hold NUL bytes.*b\.png.*--exclude '\*\.png' "
                                        r"--exclude d"):  # fmt: skip
        run(tmp_path, "--output", tmp_path / "out", "--glob", "*")
    assert not list(tmp_path.glob(".out*"))
    excluded = ("--exclude", "*.png", "--exclude", "d")
    run(tmp_path, "--output", tmp_path / "out", "--glob", "*", *excluded)
    assert text(tmp_path / "out" / "train") == "text"


def test_text_as_training_data_suggests_prepare(tmp_path):
    (tmp_path / "my texts").mkdir()
    (tmp_path / "my texts" / "a.md").write_text("text")
    command = (
        rf"data\.dataset_path: .*my texts holds text \(a\.md\).* jaxforge prepare '{tmp_path}/my "
        rf"texts' --output '{tmp_path}/my texts_tokens' .* jaxforge train --config '{tmp_path}/my "
        r"texts_tokens/train\.toml'"
    )
    with pytest.raises(UserError, match=command):
        TokenShards(tmp_path / "my texts", "*.npy", 8, vocab_size=300)
    with pytest.raises(UserError, match=r"holds text \(a\.md\)"):
        TokenShards(tmp_path / "my texts" / "a.md", "*.npy", 8, vocab_size=300)
    (tmp_path / "my texts" / "a.md").unlink()
    with pytest.raises(UserError, match=r"no file matches data\.file_pattern"):
        TokenShards(tmp_path / "my texts", "*.npy", 8, vocab_size=300)


@pytest.fixture
def without_rights():
    """Act as a user without rights, whom file permissions concern."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_unreadable_inputs_name_the_option(tmp_path, request):
    directory = Path(tempfile.mkdtemp())  # unlike tmp_path, below a directory that all may enter
    directory.chmod(0o755)
    for name in ("a", "b"):
        (directory / name).mkdir()
        (directory / name / "a.txt").write_text("text")
    (directory / "a" / "a.txt").chmod(0)
    (directory / "b").chmod(0)
    planned = find_inputs([directory / "a"])
    request.getfixturevalue("without_rights")
    denied = ".*: Permission denied; let this user read it, or "
    with pytest.raises(UserError, match=rf"cannot read .*a\.txt{denied}exclude it with --exclude"):
        find_inputs([directory / "a"])
    with pytest.raises(UserError, match=denied + "exclude it with --exclude"):
        find_inputs([directory])
    with pytest.raises(UserError, match=f"cannot read INPUT {denied}remove it"):
        find_inputs([directory / "b" / "a.txt"])
    excluded = ["b/*", "a/a.txt"]
    with pytest.raises(UserError, match=r"no file matches --glob \* and no --exclude"):
        find_inputs([directory], exclude=excluded)
    with pytest.raises(UserError, match=denied + "exclude it with --exclude"):
        list(text_parts(planned))


def test_blanks_at_the_ends_of_names_are_shown(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("text")
    meant = f"did you mean {tmp_path}/texts?"
    message = f"INPUT '{tmp_path}/texts ' does not exist; {meant}"
    with pytest.raises(UserError, match=re.escape(message)):
        run(f"{tmp_path}/texts ", "--output", tmp_path / "out")
    with pytest.raises(UserError, match=r"out ' begins or ends with a blank: remove it"):
        run(tmp_path / "texts", "--output", f"{tmp_path}/out ")


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_names_without_file_raise(tmp_path, name):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match=r"cannot read INPUT .*: (File name too|Too many levels)"):
        run(tmp_path / name, "--output", tmp_path / "out")


def test_links_out_of_the_corpus_are_named(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("inside")
    (tmp_path / "in" / "b.txt").symlink_to("a.txt")
    run(tmp_path / "in", "--output", tmp_path / "out")
    assert "links" not in capsys.readouterr().err
    (tmp_path / "secret").write_text("outside")
    (tmp_path / "in" / "[c].txt").symlink_to("../secret")
    run(tmp_path / "in", "--output", tmp_path / "out", "--overwrite")
    shown = f"{tmp_path}/in/[c].txt is {tmp_path}/secret; leave such out with --exclude"
    assert f"1 file(s) are links out of INPUT, and are read: {shown}" in capsys.readouterr().err
    assert "outside" in text(tmp_path / "out" / "train")
    (tmp_path / "link.txt").symlink_to("secret")  # named by the user
    run(tmp_path / "link.txt", "--output", tmp_path / "out", "--overwrite")
    assert "links" not in capsys.readouterr().err


@pytest.mark.parametrize(("content", "is_short"), [("hi", True), ("some words\n" * 9000, False)])
def test_short_text_gets_a_note(tmp_path, capsys, content, is_short):
    (tmp_path / "a.txt").write_text(content)
    run(tmp_path / "a.txt", "--output", tmp_path / "out")
    note = "In 100 updates each token is read 100 times, and the model repeats the text"
    assert (note in capsys.readouterr().out) == is_short
