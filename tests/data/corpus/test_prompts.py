"""Files of prompts, and what is said about those that are none."""

import io
import sys

import pytest

from jaxforge.errors import UserError
from jaxforge.tasks.prompts import STDIN, read_prompts


@pytest.fixture
def read(tmp_path):
    def read(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [(p.text, p.fields, p.location.rpartition("/")[2]) for p in read_prompts(path)]

    return read


def test_line_of_text_is_a_prompt(read):
    assert read("a.txt", "one\r\n\n three\u2028é\n") == [
        ("one", {}, "a.txt:1"), ("", {}, "a.txt:2"), (" three\u2028é", {}, "a.txt:3"),
    ]  # fmt: skip
    assert read("a.txt", "no end") == [("no end", {}, "a.txt:1")]


def test_objects_copy_other_fields(read):
    assert read("a.jsonl", '{"prompt": "x\\ny", "id": 7}\n{"k": [1], "prompt": ""}\n') == [
        ("x\ny", {"id": 7}, "a.jsonl:1"), ("", {"k": [1]}, "a.jsonl:2"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.json"])
def test_objects_are_read_by_any_name(read, name):
    assert read(name, '{"prompt": "x"}\n') == [("x", {}, f"{name}:1")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one\n\n", [("one", {}), ("", {})]),
        ('{"prompt": "x", "id": 7}\n', [("x", {"id": 7})]),
        ('{"text": "x"}', [('{"text": "x"}', {})]),
        ("[1]", [("[1]", {})]),
    ],
)
def test_standard_input_with_object_is_json_lines(content, expected, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content.encode())))
    prompts = read_prompts(STDIN)
    assert [(prompt.text, prompt.fields) for prompt in prompts] == expected
    assert prompts[0].location == "standard input:1"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "", "the file is empty"),
        ("a.txt", b"good\nb\xffd\n", r"a\.txt:2: not UTF-8 at byte 1 of the line"),
        ("a.jsonl", '{"prompt": "a"}\n{"prompt"\n', r"a\.jsonl:2: not JSON: .* at column"),
        ("a.jsonl", '{"text": "a"}', r'a\.jsonl:1: expected an object with a text as "prompt"'),
        ("a.jsonl", '{"prompt": 1}', r'a\.jsonl:1: expected an object with a text as "prompt"'),
        ("a.jsonl", '{"prompt": "a"}\n\n', r"a\.jsonl:2: not JSON"),
        ("a.jsonl", '{"prompt": ' + "[" * 100_000, r"a\.jsonl:1: not JSON: maximum recursion"),
        ("a.json", '[{"prompt": "a"}]', r'a\.json:1: expected an object with a text as "prompt"'),
        ("a.jsonl", '{"prompt": "\\ud800"}', r"a\.jsonl:1: half of a surrogate pair"),
        ("a.jsonl", '{"prompt": "a", "tokens": 1}', r'a\.jsonl:1: "tokens" is a field of the out'),
    ],
)
def test_errors_name_location(read, name, content, message):
    with pytest.raises(UserError, match=message):
        read(name, content)


def test_missing_file_raises(tmp_path):
    with pytest.raises(UserError, match=r"--prompts .*/none: No such file"):
        read_prompts(tmp_path / "none")
