"""Conversion of pydantic errors into messages with location, problem and remedy."""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxforge.cli.suggestions import hint
from jaxforge.config.job import short_toml
from jaxforge.config.reading.foreign_names import advice, key_of, note_of
from jaxforge.config.reading.schema import (
    Path,
    alternatives,
    dotted,
    expected,
    is_misspelt_table,
    nearest_keys,
    node_at,
    without_member,
)
from jaxforge.config.reading.toml import line_of
from jaxforge.config.section import OUT_OF_RANGE
from jaxforge.errors import shortened

VISION_SECTIONS = ("vision_encoder", "adapter", "vlm", "video", "model.vlm")
"""Tables of vision-language models, refused by name."""

_MOST = 30  # explained problems per file
_OF_YOURS = "; to use a registered name, import its module: --plugins.modules=MODULE"
_LONG = 200  # characters; every valid key is shorter


class Setting(NamedTuple):
    """A setting on the command line."""

    flag: str
    """Argument as typed."""
    path: Path
    """Path of the key."""
    value: Any
    """New value, not yet validated."""


class Sources(NamedTuple):
    """Sources of the values of a configuration."""

    file: str
    """TOML file, as named by the user."""
    lines: Mapping[Path, int]
    """Line number of each key in the file."""
    settings: Sequence[Setting]
    """Command-line settings, which override the file."""
    written: Mapping[Path, Path] = MappingProxyType({})
    """Path of each stored value that the user wrote as another key -> path of that key."""


class _Problem(NamedTuple):
    line: float
    text: str


def explain(error: ValidationError, sources: Sources) -> str:
    """Return a line per problem: first of the file, in its order, then of the command line."""
    every = error.errors()
    # An explanation walks the schema: of thousands, only the first in the file are shown.
    if len(every) > _MOST:
        every.sort(key=lambda details: line_of(details["loc"], sources.lines) or 0)
    problems = [problem for details in every[:_MOST] for problem in _problems(details, sources)]
    problems.sort(key=lambda problem: problem.line)
    texts = dict.fromkeys(problem.text for problem in problems[:_MOST])
    more = len(every) - _MOST
    return "\n".join([*texts, *([f"and {more:,} more problems"] if more > 0 else [])])


def explain_value(path: Path, value: object, text: str, sources: Sources) -> str:
    """Return a message about one value, with its location and text."""
    return _located(_about(path, value, text, sources), path, "", sources).text


def _problems(details: ErrorDetails, sources: Sources) -> list[_Problem]:
    path = without_member(details["loc"])
    if details["type"] == "missing":  # an item of a short list
        path = path[:-1]
    if details["type"] == "value_error":  # rules between the keys of one section
        rules = str(details["ctx"]["error"]).splitlines()
        return [_located(f"[{dotted(path)}] {rule}", path, rule, sources) for rule in rules]
    if details["type"] == "extra_forbidden" or not node_at(path):
        keys = _keys_of_unknown(path, details["input"])
        return [_located(_unknown(key), key, "", sources) for key in keys]
    if details["type"] in ("home", OUT_OF_RANGE):  # not described by the schema
        return [
            _located(_about(path, details["input"], details["msg"], sources), path, "", sources)
        ]
    return [_located(_bad_value(path, details["input"], sources), path, "", sources)]


def _located(text: str, path: Path, rule: str, sources: Sources) -> _Problem:
    """Prefix `text` with its setting, or with its file and line."""
    line = line_of(path, sources.lines)
    setting = _setting_of(path, rule if line else "", sources)
    if setting:
        return _Problem(math.inf, f"{shortened(setting.flag, _LONG)}: {text}")
    location = f"{sources.file}:{line}" if line else sources.file  # lines are known only for TOML
    return _Problem(line or 0, f"{location}: {text}")


def _setting_of(path: Path, rule: str, sources: Sources) -> Setting | None:
    """Return the last setting of `path`, a parent or a child; children must occur in `rule`."""
    # Of several settings of a key, the last one holds.
    for setting in reversed(sources.settings):
        around = path[: len(setting.path)] == setting.path
        inside = setting.path[: len(path)] == path
        if around or (inside and (not rule or setting.path[-1] in re.findall(r"\w+", rule))):
            return setting
    return None


def _unknown(path: Path) -> str:
    if table := _vision_section(path):
        return f"[{table}] cannot be used: jaxforge trains text models only"
    return f"unknown key {shortened(dotted(path), _LONG)}{suggestion(path)}"


def suggestion(path: Path) -> str:
    """Return the end of a message about an unknown key: the key that may be meant, or ""."""
    keys = " or ".join(nearest_keys(path))
    return advice(path) or (f"; did you mean {keys}?" if keys else "")


def _keys_of_unknown(path: Path, value: object) -> list[Path]:
    """Return the keys of an unknown table that no known table resembles, else the table itself."""
    if not (isinstance(value, Mapping) and value):
        return [path]
    is_misspelt = is_misspelt_table(path, value) and key_of(path) is None
    if is_misspelt or note_of(path) or _vision_section(path):
        return [path]
    keys = (key for name in value for key in _keys_of_unknown((*path, name), value[name]))
    return list(islice(keys, _MOST))


def _vision_section(path: Path) -> str | None:
    """Return the table of vision-language models that contains a key."""
    name = f"{dotted(path)}."
    return next((table for table in VISION_SECTIONS if name.startswith(f"{table}.")), None)


def _bad_value(path: Path, value: object, sources: Sources) -> str:
    node = node_at(path) or {}
    meant = hint(str(value).lower(), alternatives(node))
    text = f"expected {expected(node)}{meant or (node.get('registered') and _OF_YOURS) or ''}"
    return _about(path, value, text, sources)


def _about(path: Path, value: object, text: str, sources: Sources) -> str:
    setting = _setting_of(path, "", sources)
    is_shown = setting is not None and setting.path == path  # the argument has key and value
    return (
        text if is_shown else f"{dotted(_as_written(path, sources))} = {short_toml(value)}: {text}"
    )


def _as_written(path: Path, sources: Sources) -> Path:
    """Return the path by which the user wrote a value."""
    for end in range(len(path), 0, -1):
        if read := sources.written.get(path[:end]):
            return (*read, *(part for part in path[end:] if isinstance(part, str)))
    return path
