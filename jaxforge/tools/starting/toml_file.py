"""Config as a commented TOML file: tables of keys with values and their reasons."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxforge.config.job import toml

_WIDTH = 100
_COMMENT = 26  # column of comments, unless the value is longer


class Line(NamedTuple):
    """Line of a table.

    Attributes:
        key: name of the key.
        value: value, formatted by `toml`.
        why: comment; "" for none.
    """

    key: str
    value: Any
    why: str = ""


Tables = Mapping[str, Sequence[Line]]
"""Lines by section; sections without lines are left out."""


def to_text(about: str, tables: Tables) -> str:
    """Return the text of a config file.

    Args:
        about: first lines, written as comments.
        tables: sections of the file.
    """
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in about.splitlines())]
    for name, lines in tables.items():
        if lines:
            parts.append("\n".join([f"[{name}]", *map(_line, lines)]) + "\n")
    return "\n".join(parts)


def _line(line: Line) -> str:
    text = f"{line.key} = {_value(line.value)}"
    if not line.why:
        return text
    commented = f"{text:<{_COMMENT - 2}}  # {line.why}"
    return commented if len(commented) <= _WIDTH else f"# {line.why}\n{text}"


def _value(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value >= 10**6:
        return f"{value:_}"
    return toml(value)
