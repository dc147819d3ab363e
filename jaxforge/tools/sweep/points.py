"""Points of a sweep: the values of its keys, and the name of each run."""

import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.reading import toml
from jaxforge.errors import UserError

_UNSAFE = re.compile(r"[^\w.,=+-]+")
_LONGEST = 200  # bytes of a name; file systems allow 255

Values = Mapping[str, str]
"""Values by key (`model.dim`), as on the command line."""


class Point(NamedTuple):
    """One run of a sweep.

    Attributes:
        name: name of its directory: `lr=1e-3,dim=128`, or the name in a ladder.
        values: settings over the base config.
    """

    name: str
    values: Values

    @property
    def overrides(self) -> list[str]:
        """Command-line settings of the point."""
        return [f"--{key}={value}" for key, value in self.values.items()]


def points(grid: Sequence[str], ladder: Path | None) -> list[Point]:
    """Return every combination of a ladder's steps and a grid's values.

    Args:
        grid: axes of the grid, such as "optimizer.lr=1e-3,3e-3".
        ladder: a TOML file of tables `[[point]]`, whose keys are set together; the key `name` is
            the step's name.

    Raises:
        UserError: a key is given twice, two points are equal, or the file is no ladder.
    """
    axes = [_axis(text) for text in grid]
    rungs = [Point("", {})] if ladder is None else _ladder(ladder)
    _check_keys([*(key for key, _ in axes), *{key for rung in rungs for key in rung.values}])
    combinations = [
        (rung, dict(zip((key for key, _ in axes), values, strict=True)))
        for rung in rungs
        for values in itertools.product(*(values for _, values in axes))
    ]
    keys = list(dict.fromkeys(k for rung, values in combinations for k in (*rung.values, *values)))
    last = Counter(key.rpartition(".")[2] for key in keys)  # names omit the section if unambiguous
    short = {key: end if last[end := key.rpartition(".")[2]] == 1 else key for key in keys}
    result = [
        Point(_name(rung, values, short), {**rung.values, **values})
        for rung, values in combinations
    ]
    _check_names(result)
    return result


def _axis(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    if not equals or not key or not values:
        raise UserError(f"--grid {text}: expected section.key=value,value")
    return key.removeprefix("--"), list(_split(values))


def _split(text: str) -> Iterator[str]:
    """Split at commas, except commas inside brackets, braces or quotes."""
    depth, quote, start = 0, "", 0
    for i, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char in "[({":
            depth += 1
        elif char in "])}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:i]
            start = i + 1
    yield text[start:]


def _ladder(path: Path) -> list[Point]:
    try:
        tables = toml.parse(path.read_text(encoding="utf-8-sig"), f"--ladder {path}")
    except OSError as error:
        raise UserError(f"--ladder {path}: {error.strerror}{path_hint(path)}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--ladder {path}: {error}") from None
    rungs = tables.get("point")
    if tables.keys() != {"point"} or not isinstance(rungs, list) or not rungs:
        raise UserError(
            f"--ladder {path}: expected tables [[point]], each with keys such as model.dim = 256"
        )
    return [_rung(rung, f"--ladder {path}, point {i}") for i, rung in enumerate(rungs, 1)]


def _rung(table: Any, where: str) -> Point:  # noqa: ANN401 (whatever TOML holds)
    if not isinstance(table, dict) or not isinstance(table.get("name", ""), str):
        raise UserError(f"{where}: expected a table whose name is text")
    name = table.pop("name", "")
    values = {key: x if isinstance(x, str) else repr(x) for key, x in _flat(table)}
    if alone := [key for key in values if "." not in key]:
        raise UserError(f"{where}: {alone[0]} has no section. Write for example model.{alone[0]}")
    return Point(name, values)


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _check_keys(keys: Sequence[str]) -> None:
    twice = [key for key, n in Counter(keys).items() if n > 1]
    if twice:
        raise UserError(f"{twice[0]} is given twice: give all of its values together")
    if "checkpoint.dir" in keys:
        raise UserError("checkpoint.dir holds all points: it cannot be a key of the sweep")


def _check_names(points_: Sequence[Point]) -> None:
    for name, n in Counter(point.name for point in points_).items():
        if n > 1:
            raise UserError(f"{n} points are called {name}: their values, or names, must differ")
        if len(name.encode()) > _LONGEST:
            raise UserError(f"{name[:60]}... is too long for a directory: give points a name")


def _name(rung: Point, values: Values, short: Mapping[str, str]) -> str:
    shown = values if rung.name else {**rung.values, **values}
    parts = [rung.name] if rung.name else []
    parts += [f"{short[key]}={value}" for key, value in shown.items()]
    return _UNSAFE.sub("_", ",".join(parts)) or "base"
