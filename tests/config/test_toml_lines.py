"""Line numbers of keys in special cases of TOML syntax."""

import tomllib

import pytest

from jaxforge.config.reading.toml import key_lines, line_of

DOCUMENT = r'''# [comment]
top = 1            # top = 2
dotted.a.b = 1
"quoted key" . 'and # another' = 2

[section]
text = "a = 1 # \" [x]"
many = """
[not.a.table]
no = 1 # \"""
"""" # ends on a quote of its own " [
raw = \'\'\'
[nor.this]
''\'\'\'
array = [
  1, # ]
  "]", [2,
  3],
]
after = 1
inline = {a = 1, b = {c = "}"}}
date = 1979-05-27 07:32:00

  [ section . "sub table" ]
  x = 1
[[list]]
x = 1
[list.table]
y = 2
[[list]]
x = 1
[[list.inner]]
z = 1
[[list.inner]]
z = 2
[late.child]
[late]
x = 1'''.replace(r"\'", "'")

LINES = {
    ("top",): 2,
    ("dotted",): 3,
    ("dotted", "a"): 3,
    ("dotted", "a", "b"): 3,
    ("quoted key",): 4,
    ("quoted key", "and # another"): 4,
    ("section",): 6,
    ("section", "text"): 7,
    ("section", "many"): 8,
    ("section", "raw"): 12,
    ("section", "array"): 15,
    ("section", "after"): 20,
    ("section", "inline"): 21,
    ("section", "date"): 22,
    ("section", "sub table"): 24,
    ("section", "sub table", "x"): 25,
    ("list",): 26,
    ("list", 0): 26,
    ("list", 0, "x"): 27,
    ("list", 0, "table"): 28,
    ("list", 0, "table", "y"): 29,
    ("list", 1): 30,
    ("list", 1, "x"): 31,
    ("list", 1, "inner"): 32,
    ("list", 1, "inner", 0): 32,
    ("list", 1, "inner", 0, "z"): 33,
    ("list", 1, "inner", 1): 34,
    ("list", 1, "inner", 1, "z"): 35,
    ("late",): 37,
    ("late", "child"): 36,
    ("late", "x"): 38,
}


def test_reference_document_is_valid_toml():
    assert tomllib.loads(DOCUMENT)["section"]["after"] == 1


def test_keys_have_lines():
    assert key_lines(DOCUMENT) == LINES


def test_windows_line_ends_count_once():
    assert key_lines(DOCUMENT.replace("\n", "\r\n")) == LINES


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment"])
def test_empty_document_has_no_lines(text):
    assert key_lines(text) == {}


@pytest.mark.parametrize(
    ("path", "line"),
    [
        (("section", "inline", "b", "c"), 21),
        (("section", "array", 1), 15),
        (("list", 1, "inner", 1, "missing"), 34),
        (("elsewhere", "x"), None),
    ],
)
def test_inner_keys_have_line_of_enclosing_table(path, line):
    assert line_of(path, LINES) == line


def test_all_parsed_paths_have_lines():
    def paths(value, path=()):
        items = value.items() if isinstance(value, dict) else ()
        items = enumerate(value) if isinstance(value, list) else items
        for key, inner in items:
            yield (*path, key)
            yield from paths(inner, (*path, key))

    for path in paths(tomllib.loads(DOCUMENT)):
        assert line_of(path, key_lines(DOCUMENT)), path
