"""Tokenizer files of strangers, which panic, abort, or take memory and time without end."""

import json
import subprocess
import sys

import pytest

from jaxforge.commands import prepare
from jaxforge.data.corpus import untrusted_tokenizer
from jaxforge.data.corpus.tokenizer import HFTokenizer, train_bpe
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.untrusted_tokenizer import is_risky
from jaxforge.errors import UserError

CORPUS = ["the cat sat on the mat\n"] * 5


@pytest.fixture(scope="module")
def plain():
    return json.loads(train_bpe(CORPUS, 280)._file)


def save(directory, document, **neighbours):
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(document))
    settings = {"tokenizer_config": {"eos_token": "<|endoftext|>"}, **neighbours}
    for name, value in settings.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (directory / f"{name}.json").write_text(text)
    return directory


def pattern(regex):
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"pre_tokenizer": split}


def precompiled(charsmap):
    return {"normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap}}


DO_NOT_LOAD = {
    "panics": (precompiled("AAAA"), r"not a tokenizer\.json \(.*charsmap"),
    "aborts": (precompiled("/////w=="), r"not a tokenizer\.json \(memory allocation"),
    "pattern": (pattern("(a"), r"not a tokenizer\.json \("),
}


@pytest.mark.parametrize("name", DO_NOT_LOAD)
def test_files_that_cannot_be_loaded_are_refused(tmp_path, plain, capfd, name):
    change, message = DO_NOT_LOAD[name]
    with pytest.raises(UserError, match=rf"cannot use .*tokenizer\.json: {message}"):
        load_tokenizer(save(tmp_path / "t", plain | change))
    assert capfd.readouterr().err == ""


def test_sparse_ids_are_refused(tmp_path, plain):
    model = plain["model"]
    for largest, is_refused in ((10**9, True), (1 << 20, True), ((1 << 20) - 1, False)):
        vocab = {**model["vocab"], "cat": largest}
        path = save(tmp_path / "t", plain | {"model": {**model, "vocab": vocab, "merges": []}})
        if is_refused:
            with pytest.raises(UserError, match=f"tokens, and one of them the id {largest:,}"):
                load_tokenizer(path)
        else:
            assert load_tokenizer(path).vocab_size == largest + 1


def replace(pattern, content):
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(*steps, kind="normalizers"):
    return {"type": "Sequence", kind: list(steps)}


def prepend(text):
    return {"type": "Prepend", "prepend": text}


SECTIONS = {
    "a long prefix": ("normalizer", prepend("a" * 101)),
    "prefixes": ("normalizer", sequence(*[prepend("a" * 51)] * 2)),
    "a longer text": ("normalizer", replace("a", "b" * 11)),
    "doublings": ("normalizer", sequence(*[replace("a", "aa")] * 4)),
    "a longer prefix": ("normalizer", sequence(prepend("a" * 60), replace("a", "aa"))),
    "nested": ("normalizer", sequence(sequence(replace("", "a" * 11)))),
    "decoder": ("decoder", sequence(replace("a", "b" * 11), kind="decoders")),
}


@pytest.mark.parametrize("name", SECTIONS)
def test_normalizers_that_lengthen_texts_are_refused(plain, name):
    section, value = SECTIONS[name]
    with pytest.raises(ValueError, match=f"its {section} makes texts more than 10 times as long"):
        HFTokenizer(json.dumps(plain | {section: value}).encode(), None)


def test_usual_normalizers_are_accepted(plain):
    steps = [prepend("▁"), replace(" ", "▁"), replace("``", '"'), replace("...", "…"),
             {"type": "NFKC"}, {"type": "Lowercase"}]  # fmt: skip
    decoder = sequence(replace("▁", " "), {"type": "Fuse"}, kind="decoders")
    document = plain | {"normalizer": sequence(*steps), "decoder": decoder}
    assert HFTokenizer(json.dumps(document).encode(), None).encode("a b")


@pytest.mark.parametrize("ids", [[2**32 - 1], [280], [0] * 101])
def test_post_processor_outside_of_the_vocabulary_is_refused(plain, ids):
    special = {"id": "<x>", "ids": ids, "tokens": ["<x>"] * len(ids)}
    single = [
        {"SpecialToken": {"id": "<x>", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ]
    processor = {"type": "TemplateProcessing", "single": single, "pair": single,
                 "special_tokens": {"<x>": special}}  # fmt: skip
    message = "adds 101 tokens to each text" if len(ids) > 100 else f"adds the id {ids[0]:,}"
    with pytest.raises(ValueError, match=f"its post-processor {message}"):
        HFTokenizer(json.dumps(plain | {"post_processor": processor}).encode(), None)


NESTED = "[" * 10_000 + "]" * 10_000


@pytest.mark.parametrize(
    ("neighbours", "message"),
    [
        ({"special_tokens_map": NESTED}, r"special_tokens_map\.json: maximum recursion"),
        ({"tokenizer_config": NESTED}, r"tokenizer_config\.json: maximum recursion"),
        ({"tokenizer_config": {"chat_template": [1]}}, "chat_template .*must be a text, or a list"),
        (
            {"tokenizer_config": {"chat_template": [{}]}},
            "chat_template .*must be a text, or a list",
        ),
    ],
)
def test_damaged_files_next_to_tokenizer_raise(tmp_path, plain, neighbours, message):
    with pytest.raises(UserError, match=message):
        load_tokenizer(save(tmp_path / "t", plain, **neighbours))


def test_templates_by_name_are_read(tmp_path, plain):
    settings = {"chat_template": {"default": "a", "tools": "b"}, "eos_token": "<|endoftext|>"}
    tokenizer = load_tokenizer(save(tmp_path / "t", plain, tokenizer_config=settings))
    assert tokenizer.chat["chat_template"] == "a"


def test_risky_files_are_recognized(plain):
    for change in (pattern(" "), precompiled("AAAA")):
        assert is_risky(json.dumps(plain | change).encode())
    assert is_risky(rb'{"type": "Pre\u0063ompiled"}')
    assert not is_risky(json.dumps(plain).encode())
    assert not is_risky(rb'{"vocab": {"\\u00": 1}}')  # a backslash, as code has it


def test_risky_file_loads_in_child_once(plain, monkeypatch):
    file = json.dumps(plain | pattern("t")).encode()
    assert HFTokenizer(file, None).encode("the") == HFTokenizer(file, None).encode("the")
    monkeypatch.setattr(untrusted_tokenizer.subprocess, "run", None)
    HFTokenizer(file, None)
    HFTokenizer(json.dumps(plain | pattern("u")).encode(), None, is_checked=True)


def run(tmp_path, text, tokenizer):
    (tmp_path / "a.txt").write_text(text)
    command = [tmp_path / "a.txt", "--output", tmp_path / "out", "--tokenizer", tokenizer]
    return prepare.main([*map(str, command), "--workers", "1"])


def test_unencodable_texts_are_refused(tmp_path, plain, capfd):
    unknown = {"type": "WordLevel", "unk_token": "no", "vocab": {"a": 0, "<|endoftext|>": 1}}
    tokenizer = save(tmp_path / "t", plain | {"model": unknown, "added_tokens": []})
    with pytest.raises(UserError, match=r"fails on a text \(WordLevel error: Missing .*: correct"):
        run(tmp_path, "b", tokenizer)
    panics = save(tmp_path / "u", plain | pattern("(a+)+$"))
    with pytest.raises(UserError, match=r"fails on a text \(Onig: .*retry-limit.*: correct"):
        run(tmp_path, "a" * 3000 + "b", panics)
    assert "panicked" not in capfd.readouterr().err


def test_risky_tokenizer_encodes_in_child_process(tmp_path, plain):
    tokenizer = save(tmp_path / "t", plain | pattern("[a-z]+"))
    run(tmp_path, "the cat\n", tokenizer)
    assert load_tokenizer(tmp_path / "out" / "tokenizer").is_risky


SLOW = """
from jaxforge.data.corpus import workers
def endless(texts):
    while True:
        pass
def work(connection):
    workers.serve(connection, endless)
if __name__ == "__main__":
    try:
        with workers.Workers(1, work) as pool:
            pool.submit([("train", "text", True, True)]).result()
    except workers.UserError as error:
        print(error)
"""


@pytest.mark.processes
def test_endless_encoding_ends(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    command = [sys.executable, tmp_path / "slow.py"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "the tokenizer takes more than ten times as long" in ran.stdout
