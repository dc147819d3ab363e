"""Parser of TOML files with limits, and the line numbers of their keys, which `tomllib` lacks.

The time of `tomllib` is quadratic in the parts of a key, and it recurses with every bracket. The
limits are far above the size of real configs.
"""

import codecs
import pathlib
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jaxforge.cli.suggestions import path_hint
from jaxforge.errors import UserError

SIZE = 1 << 20  # characters per document
_TOKENS = 200_000  # names, values and punctuation
_LINES = 10_000  # lines that set a key or begin a table
_DEPTH = 32  # parts of a key, or nested brackets
_WORD = 100  # characters of a number, or of an unquoted key
_LINE_COLUMN = re.compile(r" \(at line (\d+), column (\d+)\)$")


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse a document.

    Raises:
        UserError: the document is not valid TOML, or exceeds a limit.
    """
    if len(text) > SIZE:
        raise UserError(f"{where}: {len(text):,} characters; a config has at most {SIZE:,}")
    _check_bounds(text, where)
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        what = str(error)
        match = _LINE_COLUMN.search(what)
        location = ":".join([where, *(match.groups() if match else ())])
        raise UserError(f"{location}: not valid TOML: {_LINE_COLUMN.sub('', what)}") from None
    except ValueError as error:  # an invalid date
        raise UserError(f"{where}: not valid TOML: {error}") from None


def _check_bounds(text: str, where: str) -> None:
    """Raise UserError if a limit is exceeded."""
    parts, depth, lines, line = 1, 0, 0, 0
    for number, token in enumerate(tokens(text)):
        if token.kind == "torn":
            return  # `tomllib` stops here
        if token.kind == "mark":
            depth += (token.text in "[{") - (token.text in "]}")
            parts = parts + 1 if token.text == "." else 1
        lines, line = lines + (token.line > line and token.kind != "newline"), token.line
        if max(parts, depth) > _DEPTH:
            problem = f"names or brackets nested more than {_DEPTH} deep"
        elif token.kind == "bare" and len(token.text) > _WORD:
            problem = f"a number or key of {len(token.text):,} characters, more than {_WORD}"
        elif lines > _LINES or number >= _TOKENS:
            problem = f"more than {_LINES:,} lines or {_TOKENS:,} names and values"
        else:
            continue
        raise UserError(f"{where}:{token.line}: {problem}; shorten the file")


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
        # A header below a list of tables belongs to the latest table of the list.
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


def read_text(path: pathlib.Path, key: str = "") -> str:
    """Return the text of a config file, up to slightly more than the largest valid config.

    Args:
        path: the file.
        key: key that names the file, for messages; "" for the config itself.

    Raises:
        UserError: the file cannot be read, or is not UTF-8.
    """
    about = f"{key}: no file" if key else "no config file"
    try:
        with path.open("rb") as file:
            content = file.read(4 * SIZE + 1)  # at most 4 bytes per character
        # Windows editors write a BOM and CRLF.
        return content.decode("utf-8-sig").replace("\r\n", "\n")
    except FileNotFoundError:
        raise UserError(f"{about} at {path}{path_hint(path)}") from None
    except IsADirectoryError:
        raise UserError(f"{about} at {path}: it is a directory") from None
    except UnicodeDecodeError as error:
        format_ = "YAML" if path.suffix.lower() in (".yaml", ".yml") else "TOML"
        raise UserError(f"{path}: not valid {format_}: {_encoding_problem(error)}") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _encoding_problem(error: UnicodeDecodeError) -> str:
    if error.object.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16; save it as UTF-8 (iconv -f UTF-16 -t UTF-8)"
    return f"not UTF-8 at byte {error.start}"
