"""Turns what pydantic finds wrong into lines that say where, what, and what to do."""

import math
import re
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from jaxforge.config.job import shown
from jaxforge.config.reading.lines import line_of
from jaxforge.config.reading.overrides import Setting
from jaxforge.config.reading.schema import Path, all_keys, alternatives, dotted, expected, node_at

VISION_SECTIONS = ("vision_encoder", "adapter", "vlm", "video", "model.vlm")
"""Tables of vision-language models, refused by name."""

_LONG = 200  # characters of a key that no key has


class Sources(NamedTuple):
    """Where the values of a configuration came from."""

    file: str
    """The TOML file, as the user named it."""
    lines: Mapping[Path, int]
    """Line of each key in it."""
    settings: Sequence[Setting]
    """The command line, which wins."""


class _Problem(NamedTuple):
    line: float
    text: str


def explain(error: ValidationError, sources: Sources) -> str:
    """One line per problem: those of the file in its order, then those of the command line.

    Args:
        error: Of a `JobConfig`.
        sources: Of the values that it was made from.
    """
    problems = [problem for details in error.errors() for problem in _problems(details, sources)]
    return "\n".join(problem.text for problem in sorted(problems, key=lambda one: one.line))


def explain_value(path: Path, value: object, text: str, sources: Sources) -> str:
    """`text` about one value, after the value and its place.

    Args:
        path: Of the value.
        value: As the user wrote it.
        text: What is wrong with it.
        sources: Of the value.
    """
    return _place(_about(path, value, text, sources), path, "", sources).text


def _problems(details: ErrorDetails, sources: Sources) -> list[_Problem]:
    path = details["loc"]
    if details["type"] == "missing":  # an item of a list that is too short
        path = path[:-1]
    if details["type"] == "value_error":  # rules between the keys of one section
        rules = str(details["ctx"]["error"]).splitlines()
        return [_place(f"[{dotted(path)}] {rule}", path, rule, sources) for rule in rules]
    if details["type"] == "extra_forbidden" or not node_at(path):
        return [_place(_unknown(path), path, "", sources)]
    return [_place(_bad_value(path, details["input"], sources), path, "", sources)]


def _place(text: str, path: Path, rule: str, sources: Sources) -> _Problem:
    """Puts in front of `text` the setting, or else the file and line, that it is about."""
    line = line_of(path, sources.lines)
    setting = _setting_of(path, rule if line else "", sources)
    if setting:
        return _Problem(math.inf, f"{setting.flag}: {text}")
    place = f"{sources.file}:{line}" if line else sources.file  # not TOML, of which lines are known
    return _Problem(line or 0, f"{place}: {text}")


def _setting_of(path: Path, rule: str, sources: Sources) -> Setting | None:
    """The last setting of `path`, of what is around it, or in it; only what `rule` names if any."""
    for setting in reversed(sources.settings):
        around = path[: len(setting.path)] == setting.path
        inside = setting.path[: len(path)] == path
        if around or (inside and (not rule or setting.path[-1] in re.findall(r"\w+", rule))):
            return setting
    return None


def _unknown(path: Path) -> str:
    for table in VISION_SECTIONS:
        if f"{dotted(path)}.".startswith(f"{table}."):
            return f"[{table}] cannot be used: jaxforge trains text models only"
    name, keys = dotted(path), " or ".join(_nearest_keys(path))
    name = name if len(name) < _LONG else f"{name[:_LONG]}..."
    return f"unknown key {name}" + (f"; did you mean {keys}?" if keys else "")


def _nearest_keys(path: Path) -> list[str]:
    """The same key in other tables, or else the most similar one, of the same table if any."""
    name = str(path[-1])
    table = "".join(f"{part}." for part in path[:-1] if isinstance(part, str))
    by_name: dict[str, list[str]] = {}
    for key in all_keys():
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    siblings = [one for one, keys in by_name.items() if table + one in keys]
    if name in by_name:
        return by_name[name]
    if near := get_close_matches(name, siblings, n=1):
        return [table + near[0]]
    return [key for near in get_close_matches(name, by_name, n=1) for key in by_name[near]]


def _bad_value(path: Path, value: object, sources: Sources) -> str:
    node = node_at(path) or {}
    text = f"expected {expected(node)}"
    near = get_close_matches(str(value).lower(), alternatives(node), n=1)
    if near:
        text += f'; did you mean "{near[0]}"?'
    return _about(path, value, text, sources)


def _about(path: Path, value: object, text: str, sources: Sources) -> str:
    setting = _setting_of(path, "", sources)
    said = setting is not None and setting.path == path  # the argument shows key and value
    return text if said else f"{dotted(path)} = {shown(value)}: {text}"
