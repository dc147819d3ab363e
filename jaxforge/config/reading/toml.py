"""TOML parser with limits, so that parsing a small file takes little time and memory.

The time of `tomllib` is quadratic in the parts of a key, and it recurses with every bracket. The
limits are far above the size of real configs.
"""

import re
import tomllib
from typing import Any

from jaxforge.config.reading.lines import tokens
from jaxforge.errors import UserError

SIZE = 1 << 20  # characters per document
_TOKENS = 200_000  # names, values and punctuation
_LINES = 10_000  # lines that set a key or begin a table
_DEPTH = 32  # parts of a key, or nested brackets
_WORD = 100  # characters of a number, or of an unquoted key
_LINE_COLUMN = re.compile(r" \(at line (\d+), column (\d+)\)$")


def parse(text: str, where: str) -> dict[str, Any]:
    """Parse a document.

    Args:
        text: the document.
        where: its file, for messages.

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
