"""A config as a commented file: tables of keys, each with its value and why it has that."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxforge.config.job import toml

_WIDTH = 100
_COMMENT = 26  # column in which comments begin, where values leave room


class Line(NamedTuple):
    """A key of a table.

    Attributes:
        key: its name.
        value: as `toml` writes it.
        why: a comment, or "".
    """

    key: str
    value: Any
    why: str = ""


Tables = Mapping[str, Sequence[Line]]
"""Lines by section; tables without lines are left out."""


def written(about: str, tables: Tables) -> str:
    """The file's text.

    Args:
        about: a few lines to begin with, which become comments.
        tables: what it says.
    """
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in about.splitlines())]
    for name, lines in tables.items():
        if lines:
            parts.append("\n".join([f"[{name}]", *map(_line, lines)]) + "\n")
    return "\n".join(parts)


def values(tables: Tables) -> dict[str, dict[str, Any]]:
    """Return the tables as a TOML reader would."""
    return {name: {line.key: line.value for line in lines} for name, lines in tables.items()}


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
