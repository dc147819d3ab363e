"""`sweep.html`: the points of a sweep as one page that loads nothing."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources
from string import Template

import numpy as np

from jaxforge.report.chart import Chart, Curve, Frame, figure
from jaxforge.report.page import chart_style
from jaxforge.report.scale import scale_of
from jaxforge.report.tables import table as html_table
from jaxforge.sweep.law import next_size
from jaxforge.sweep.results import Result, Results, law_in_words, rows

_DRAWN = 100  # points of the law


def page(found: Results, title: str) -> str:
    """The page: losses by size with their law, losses by each key that has numbers, all points."""
    head, *body = rows(found)
    charts = [*_by_size(found), *_by_keys(found)]
    return Template(_file("page.html")).substitute(
        title=escape(title),
        style=chart_style(),
        law="".join(f"<p>{escape(line)}</p>" for line in law_in_words(found)),
        charts="".join(charts),
        table=html_table("Points", list(head), body),
    )


def _file(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _by_size(found: Results) -> Iterator[str]:
    best = found.best_by_size
    if len(best) < 2:
        return
    n, y = (np.array([getattr(one, of) for one in best], float) for of in ("parameters", "loss"))
    curves = [Curve("best of each size", n, y, dots=True)]
    if found.law is not None:
        n = np.geomspace(n[0], next_size(n.tolist()), _DRAWN)
        law = np.array([found.law(size) for size in n])
        curves.append(Curve("law, up to the next size", n, law, colour=1))
    frame = Frame(scale_of(n, log=True), "parameters")
    yield figure(Chart("Loss by size", found.metric, curves, ("log",), wide=True), frame)


def _by_keys(found: Results) -> Iterator[str]:
    """A chart for each key of numbers, a curve for each combination of the others."""
    points = [one for one in found.points if np.isfinite(one.loss)]
    for key in dict.fromkeys(key for one in points for key in one.run.point.values):
        values = {_number(one, key) for one in points}
        if None in values or len(values) < 2:
            continue
        numbers = np.array(sorted(value for value in values if value is not None))
        frame = Frame(scale_of(numbers, log=bool(numbers[0] > 0)), key)
        curves = list(_curves(points, key))
        yield figure(Chart(f"Loss by {key}", found.metric, curves), frame)


def _curves(points: Sequence[Result], key: str) -> Iterator[Curve]:
    lines = defaultdict(list)
    for one in points:
        others = ", ".join(f"{k}={v}" for k, v in one.run.point.values.items() if k != key)
        lines[others].append((_number(one, key), one.loss))
    for colour, (label, line) in enumerate(sorted(lines.items())):
        x, y = (np.array(axis, float) for axis in zip(*sorted(line), strict=True))
        yield Curve(label or "loss", x, y, colour=colour, dots=True)


def _number(one: Result, key: str) -> float | None:
    try:
        return float(one.run.point.values[key])
    except (KeyError, ValueError):
        return None
