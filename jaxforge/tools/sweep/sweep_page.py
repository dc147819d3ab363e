"""HTML page of a sweep (`sweep.html`), self-contained."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxforge.tools.pages.parts import Pool, chart, curve, document, paragraphs, table
from jaxforge.tools.sweep.law import next_size
from jaxforge.tools.sweep.results import Result, Results, describe_law, rows

_DRAWN = 100  # points of the law

Curves = Mapping[str, tuple[Any, Any]]
"""x and y, each [n], by label."""


def page(results: Results, title: str) -> str:
    """Return the page: losses by size with the law, losses by each numeric key, all points."""
    head, *body = rows(results)
    pool = Pool()
    charts = [*_by_size(results, pool), *_by_keys(results, pool)]
    points = table("Points", list(head), body)
    return document(title, paragraphs(describe_law(results)), points, pool.data(charts))


def _by_size(results: Results, pool: Pool) -> Iterator[dict[str, Any]]:
    best = results.best_by_size
    if len(best) < 2:
        return
    n, y = [float(point.parameters) for point in best], [point.loss for point in best]
    curves: dict[str, tuple[Any, Any]] = {"best of each size": (n, y)}
    if results.law is not None:
        sizes = np.geomspace(n[0], next_size(n), _DRAWN)
        curves["law, up to the next size"] = (sizes, [results.law(size) for size in sizes])
    drawn = _drawn(curves, pool)
    axis = {"label": "parameters", "log": True}
    yield chart("Loss by size", results.metric, drawn, axis, wide=True)


def _by_keys(results: Results, pool: Pool) -> Iterator[dict[str, Any]]:
    """Yield a chart per numeric key, with a curve per combination of the other keys' values."""
    points = [point for point in results.points if np.isfinite(point.loss)]
    for key in dict.fromkeys(key for point in points for key in point.run.point.values):
        values = {_number(point, key) for point in points}
        if None in values or len(values) < 2:
            continue
        log = min(value for value in values if value is not None) > 0
        drawn = _drawn(_curves(points, key), pool)
        yield chart(f"Loss by {key}", results.metric, drawn, {"label": key, "log": log})


def _drawn(curves: Curves, pool: Pool) -> list[dict[str, Any]]:
    """Return the curves in the format of `charts.js`; curves of few points have dots."""
    return [
        curve(pool, label, x, y, dots=len(x) < _DRAWN, colour=i)
        for i, (label, (x, y)) in enumerate(curves.items())
    ]


def _curves(points: Sequence[Result], key: str) -> Curves:
    lines = defaultdict(list)
    for point in points:
        others = ", ".join(f"{k}={v}" for k, v in point.run.point.values.items() if k != key)
        lines[others or "loss"].append((_number(point, key), point.loss))
    in_order = {label: np.array(sorted(line), float).T for label, line in sorted(lines.items())}
    return {label: (x, y) for label, (x, y) in in_order.items()}


def _number(result: Result, key: str) -> float | None:
    try:
        return float(result.run.point.values[key])
    except (KeyError, ValueError):
        return None
