"""Line numbers of the keys of a TOML file, which `tomllib` does not report."""

import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

Path = tuple[str | int, ...]
"""Table names, keys and list indices from the root: ("data", "datasets", 0, "weight")."""

_TOKEN = re.compile(
    r'''
      (?P<string> """ (?: \\. | [^\\] )*? "{3,5}    # multi-line; may end with two quotes
                | \'\'\' .*? \'{3,5}
                | " (?!"") (?: \\. | [^"\\\n] )* "
                | ' (?!\'\') [^'\n]* ' )
    | (?P<torn> ["'] )                            # start of an unterminated string
    | (?P<comment> \# [^\n]* )
    | (?P<newline> \n )
    | (?P<mark> [\[\]{}=,.] )
    | (?P<bare> [^\s\[\]{}=,."'\#]+ )
    ''',
    re.VERBOSE | re.DOTALL,
)


class _Token(NamedTuple):
    kind: str
    text: str
    line: int


def key_lines(text: str) -> dict[Path, int]:
    """Map the path of each table and key to its line, counted from 1.

    Keys of inline tables have no entry; `line_of` returns the line of the table. The items of
    `[[a.b]]` are numbered: ("a", "b", 0).

    Args:
        text: A valid TOML document.
    """
    lines: dict[Path, int] = {}
    items: Counter[Path] = Counter()  # number of [[tables]] by name so far
    table: Path = ()
    for statement in _statements(text):
        line, names = statement[0].line, _names(statement)
        if statement[0].text == "[":
            is_item = statement[1].text == "["
            table = path = _numbered(names, items, is_item)
        else:
            path = table + names
        lines[path] = line
        for end in range(1, len(path)):  # [a.b] and a.b = 1 also define the table a
            lines.setdefault(path[:end], line)
    return lines


def line_of(path: Path, lines: Mapping[Path, int]) -> int | None:
    """Return the line of `path`, or of its innermost enclosing table; None if neither exists."""
    paths = (path[:end] for end in range(len(path), 0, -1))
    return next((lines[path] for path in paths if path in lines), None)


def _numbered(names: Path, items: Counter[Path], is_item: bool) -> Path:
    """Return the path of a header, where the name of a list of tables refers to its last item."""
    path: Path = ()
    for end, name in enumerate(names, start=1):
        path += (name,)
        if is_item and end == len(names):
            items[path] += 1
        if path in items:
            path += (items[path] - 1,)
    return path


def _statements(text: str) -> Iterator[list[_Token]]:
    """Yield the tokens of each header, and of each key with its value, which may span lines."""
    statement: list[_Token] = []
    depth = 0
    for token in tokens(text):
        if token.kind == "mark":
            depth += (token.text in "[{") - (token.text in "]}")
        if token.kind != "newline":
            statement.append(token)
        elif statement and not depth:
            yield statement
            statement = []
    if statement:
        yield statement


def tokens(text: str) -> Iterator[_Token]:
    """Yield the tokens of a document, which may be invalid, without comments."""
    line = 1
    for match in _TOKEN.finditer(text):
        kind = match.lastgroup or ""
        if kind != "comment":
            yield _Token(kind, match.group(), line)
        line += match.group().count("\n")


def _names(statement: Iterable[_Token]) -> Path:
    """Return the names in a header, or before the equals sign."""
    names: list[str] = []
    for token in statement:
        if token.text == "=":
            break
        if token.kind == "string":
            names.append(tomllib.loads(f"name = {token.text}")["name"])
        elif token.kind == "bare":
            names.append(token.text)
    return tuple(names)
