"""`sweep.html`: the points of a sweep as one page that loads nothing."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxforge.tools.pages.parts import Pool, chart, chart_document, curve, paragraphs
from jaxforge.tools.pages.parts import table as html_table
from jaxforge.tools.sweep.law import next_size
from jaxforge.tools.sweep.results import Result, Results, law_in_words, rows

_DRAWN = 100  # points of the law

Curves = Mapping[str, tuple[Any, Any]]
"""Places and values, each [n], by label."""


def page(found: Results, title: str) -> str:
    """The page: losses by size with their law, losses by each key that has numbers, all points."""
    head, *body = rows(found)
    pool = Pool()
    return chart_document(
        title,
        [*_by_size(found, pool), *_by_keys(found, pool)],
        pool,
        paragraphs(law_in_words(found)),
        html_table("Points", list(head), body),
    )


def _by_size(found: Results, pool: Pool) -> Iterator[dict[str, Any]]:
    best = found.best_by_size
    if len(best) < 2:
        return
    n, y = ([float(getattr(one, of)) for one in best] for of in ("parameters", "loss"))
    curves: dict[str, tuple[Any, Any]] = {"best of each size": (n, y)}
    if found.law is not None:
        sizes = np.geomspace(n[0], next_size(n), _DRAWN)
        curves["law, up to the next size"] = (sizes, [found.law(size) for size in sizes])
    drawn = _drawn(curves, pool)
    axis = {"label": "parameters", "log": True}
    yield chart("Loss by size", found.metric, drawn, axis, wide=True)


def _by_keys(found: Results, pool: Pool) -> Iterator[dict[str, Any]]:
    """A chart for each key of numbers, a curve for each combination of the others."""
    points = [one for one in found.points if np.isfinite(one.loss)]
    for key in dict.fromkeys(key for one in points for key in one.run.point.values):
        values = {_number(one, key) for one in points}
        if None in values or len(values) < 2:
            continue
        log = min(value for value in values if value is not None) > 0
        drawn = _drawn(_curves(points, key), pool)
        yield chart(f"Loss by {key}", found.metric, drawn, {"label": key, "log": log})


def _drawn(curves: Curves, pool: Pool) -> list[dict[str, Any]]:
    """Return the curves as `drawing.js` takes them; a curve of few points has dots."""
    return [
        curve(pool, label, x, y, dots=len(x) < _DRAWN, colour=i)
        for i, (label, (x, y)) in enumerate(curves.items())
    ]


def _curves(points: Sequence[Result], key: str) -> Curves:
    lines = defaultdict(list)
    for one in points:
        others = ", ".join(f"{k}={v}" for k, v in one.run.point.values.items() if k != key)
        lines[others or "loss"].append((_number(one, key), one.loss))
    in_order = {label: np.array(sorted(line), float).T for label, line in sorted(lines.items())}
    return {label: (x, y) for label, (x, y) in in_order.items()}


def _number(one: Result, key: str) -> float | None:
    try:
        return float(one.run.point.values[key])
    except (KeyError, ValueError):
        return None
