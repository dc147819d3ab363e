"""Curves as inline SVG.

Paths live in a box of fixed size that is stretched to the width of the page; labels stand outside
of it at percentages, so that text keeps its size on any screen. What `page.js` needs to tell the
values under the pointer is JSON beside each chart.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jaxforge.report.scale import Scale, exact, scale_of
from jaxforge.report.thinning import BUCKETS, MEDIANS, moving_median, split, thin

_WIDTH, _HEIGHT = 2000, 1000  # of the stretched box: finer than pixels
_COLOURS = 8  # in page.css; more curves are dashed
_POINTS = 5000  # most points of a chart's curves together: the page stays small
_MARKS = 200  # most marks along a chart: they are some pixels wide


@dataclasses.dataclass(frozen=True)
class Curve:
    """One metric of one run.

    Attributes:
        label: its name in the legend.
        x: [n], increasing.
        y: [n], NaN where not finite.
        colour: which of the page's colours.
        dots: few values, each shown.
        smooth: noisy: draw a moving median over it.
        shade: 0 to 1, instead of a colour: of many curves that have an order.
        base: [n] for an area, what it stands on; n is small then.
    """

    label: str
    x: np.ndarray
    y: np.ndarray
    colour: int = 0
    dots: bool = False
    smooth: bool = False
    shade: float | None = None
    base: np.ndarray | None = None

    @property
    def top(self) -> np.ndarray:
        """[n] Where the curve lies."""
        return self.y if self.base is None else self.base + self.y


@dataclasses.dataclass(frozen=True)
class Mark:
    """A moment of a run: a restart, a skipped step.

    Attributes:
        x: where.
        text: what the pointer is told.
        colour: that of its run; None where there is only one.
    """

    x: float
    text: str
    colour: int | None = None


@dataclasses.dataclass(frozen=True)
class Frame:
    """What all charts of a page share.

    Attributes:
        x: the horizontal range.
        x_label: its name, with unit.
        resumes: where runs were started again.
    """

    x: Scale
    x_label: str
    resumes: Sequence[Mark] = ()


@dataclasses.dataclass(frozen=True)
class Chart:
    """One picture.

    Attributes:
        title: what it shows.
        unit: of the vertical axis.
        curves: drawn in this order; areas stand on each other.
        views: vertical scales, of "linear", "log", "close-up"; a switch chooses among several.
        zero: the linear scale starts at 0.
        wide: as wide as the page.
        skips: steps that were skipped.
    """

    title: str
    unit: str
    curves: Sequence[Curve]
    views: Sequence[str] = ("linear",)
    zero: bool = False
    wide: bool = False
    skips: Sequence[Mark] = ()


class _Drawn(NamedTuple):
    """A curve with the points of it that are drawn, and its median (x, y, points in a window)."""

    curve: Curve
    kept: np.ndarray
    median: tuple[np.ndarray, np.ndarray, int] | None


def figure(chart: Chart, frame: Frame) -> str:
    """The chart as an HTML figure."""
    buckets = min(BUCKETS, _POINTS // max(len(chart.curves), 1) // 2)
    drawn = [_draw(curve, buckets) for curve in chart.curves]
    data = [{"x": rounded(c.x[kept]), "y": rounded(c.y[kept])} for c, kept, _ in drawn]
    return (
        f'<figure class="chart{" wide" if chart.wide else ""}"><figcaption><div class="head">'
        f"<h2>{escape(chart.title)} <small>{escape(chart.unit)}</small></h2>"
        f'{_switch(chart)}</div><ul class="legend">{"".join(map(_entry, chart.curves))}</ul>'
        f"{_note(chart)}</figcaption>"
        f"{''.join(_plot(chart, drawn, frame, view) for view in chart.views)}"
        f'<script type="application/json">{json.dumps(data, separators=(",", ":"))}</script>'
        "</figure>\n"
    )


def gathered(x: np.ndarray, what: str) -> list[Mark]:
    """Marks at x, those that would lie on each other as one.

    Args:
        x: [n], increasing.
        what: happened there.
    """
    return [Mark(float(x[part[0]]), f"{what} at {_span(x[part])}") for part in split(x, _MARKS)]


def _span(x: np.ndarray) -> str:
    if len(x) == 1:
        return exact(float(x[0]))
    return f"{exact(float(x[0]))} to {exact(float(x[-1]))} ({len(x):,} times)"


def _draw(curve: Curve, buckets: int) -> _Drawn:
    if curve.base is not None:
        return _Drawn(curve, np.arange(len(curve.x)), None)
    median = moving_median(curve.x, curve.y, min(MEDIANS, buckets)) if curve.smooth else None
    shown = median if median and median[2] > 1 else None
    return _Drawn(curve, thin(curve.x, curve.y, buckets), shown)


def x_axis(frame: Frame, most: int) -> Iterator[str]:
    """The line below a chart with rarely more than `most` ticks, and its name."""
    for i, (value, label) in enumerate(frame.x.ticks(most)):
        at, other = percent(frame.x.place(value)), " odd" if i % 2 else ""
        yield f'<use class="tick{other}" href="#tick" x="{at}" y="100%"/>'
        yield f'<text class="x{other}" x="{at}" y="100%" dy="20">{label}</text>'
    yield '<line class="axis" x2="100%" y1="100%" y2="100%"/>'
    yield f'<text class="name" x="100%" y="100%" dy="36">{escape(frame.x_label)}</text>'


def _switch(chart: Chart) -> str:
    """Starts on the logarithmic scale where a linear one would show little but spikes."""
    if len(chart.views) == 1:
        return ""
    values = np.concatenate([curve.y[np.isfinite(curve.y)] for curve in chart.curves])
    squeezed = values.size and values.max() > 10 * np.median(values)
    first = "log" if squeezed else chart.views[0]
    choices = "".join(
        f'<label><input type="radio" name="{escape(chart.title)}" value="{view}"'
        f"{' checked' if view == first else ''}> {view}</label>"
        for view in chart.views
    )
    return f'<div class="switch">{choices}</div>'


def _entry(curve: Curve) -> str:
    kind = "dots" if curve.dots else "area" if curve.base is not None else "line"
    last = exact(float(curve.y[-1]))
    return (
        f"<li><i {_look(kind, curve)}></i>{escape(curve.label)} "
        f'<b data-last="{last}">{last}</b></li>'
    )


def _note(chart: Chart) -> str:
    bad = sum(int(np.sum(~np.isfinite(curve.y))) for curve in chart.curves)
    return f'<p class="note">{bad:,} not finite</p>' if bad else ""


def _plot(chart: Chart, drawn: Sequence[_Drawn], frame: Frame, view: str) -> str:
    y = _close_up(chart, frame.x) if view == "close-up" else _whole(chart, log=view == "log")
    label = f"{chart.title}, {chart.unit}, by {frame.x_label}; {view}"
    paths = "".join(path for d in drawn for path in _paths(d, frame.x, y))
    return (
        f'<div class="plot {view}" tabindex="0">'
        f'<svg role="img" aria-label="{escape(label)}" width="100%" height="100%">'
        f"{''.join(_grid(frame, y))}"
        f'<svg class="curves" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" '
        f'width="100%" height="100%">{paths}</svg>'
        f"{''.join(resumes(frame))}{''.join(_marks(chart, frame))}"
        '<line class="cursor" y2="100%"/></svg></div>'
    )


def _whole(chart: Chart, *, log: bool) -> Scale:
    values = np.concatenate([part for c in chart.curves for part in (c.top, _base(c))])
    return scale_of(values, log=log, zero=chart.zero)


def _close_up(chart: Chart, x: Scale) -> Scale:
    """Where all but a hundredth of the values after a tenth of the run lie."""
    late = [curve.y[(x.place(curve.x) > 0.1) & np.isfinite(curve.y)] for curve in chart.curves]
    ends = [np.percentile(values, (0.5, 99.5)) for values in late if values.size]
    return scale_of(np.concatenate([*ends, []]))


def _grid(frame: Frame, y: Scale) -> Iterator[str]:
    for value, label in y.ticks(7):
        at = percent(1 - y.place(value))
        yield f'<line class="grid" x2="100%" y1="{at}" y2="{at}"/>'
        yield f'<text class="y" x="-8" y="{at}" dy=".32em">{label}</text>'
    yield from x_axis(frame, 8)


def _paths(drawn: _Drawn, x: Scale, y: Scale) -> Iterator[str]:
    curve, kept, median = drawn
    if curve.base is not None:
        yield f'<path {_look("area", curve)} d="{_area(curve, x, y)}"/>'
        return
    raw = _look("raw" if median else "line", curve)
    yield f'<path {raw} d="{_path(curve.x[kept], curve.y[kept], x, y)}"/>'
    if median:
        yield f'<path {_look("line", curve)} d="{_path(median[0], median[1], x, y)}"/>'
    if curve.dots:
        finite = kept[np.isfinite(curve.y[kept])]
        at = _pixels(curve.x[finite], curve.y[finite], x, y)
        yield f'<path {_look("dots", curve)} d="{"".join(f"M{a} {b}h0" for a, b in at)}"/>'


def _path(xs: np.ndarray, ys: np.ndarray, x: Scale, y: Scale) -> str:
    """A line that is broken where a value is not finite; a point on its own is a dot."""
    pieces = []
    finite = np.isfinite(ys)
    for good, group in itertools.groupby(range(len(ys)), key=lambda i: finite[i]):
        if good:
            part = list(group)
            (left, top), *rest = _pixels(xs[part], ys[part], x, y)
            pieces.append(f"M{left} {top}" + ("L" if rest else "h0") + _pairs(rest))
    return "".join(pieces)


def _area(curve: Curve, x: Scale, y: Scale) -> str:
    upper = _pixels(curve.x, curve.top, x, y)
    lower = _pixels(curve.x, _base(curve), x, y)[::-1]
    return f"M{_pairs(upper + lower)}z"


def _base(curve: Curve) -> np.ndarray:
    return np.empty(0) if curve.base is None else curve.base


def _pixels(xs: np.ndarray, ys: np.ndarray, x: Scale, y: Scale) -> list[tuple[int, int]]:
    across = np.rint(x.place(xs) * _WIDTH).astype(int)
    down = np.rint((1 - y.place(ys)) * _HEIGHT).astype(int)
    return list(zip(across.tolist(), down.tolist(), strict=True))


def _pairs(points: Sequence[tuple[int, int]]) -> str:
    return " ".join(f"{a} {b}" for a, b in points)


def resumes(frame: Frame) -> Iterator[str]:
    """Where runs were started again."""
    for mark in frame.resumes:
        at, style = percent(frame.x.place(mark.x)), _style(mark.colour)
        yield f'<line class="resume {style}" x1="{at}" x2="{at}" y2="100%">{_title(mark)}</line>'


def _marks(chart: Chart, frame: Frame) -> Iterator[str]:
    for curve in chart.curves:
        bad = curve.x[~np.isfinite(curve.y)]
        for mark in gathered(bad, f"{curve.label}: not finite"):
            at = percent(frame.x.place(mark.x))
            yield f'<use class="bad" href="#down" x="{at}">{_title(mark)}</use>'
    for mark in chart.skips:
        at = percent(frame.x.place(mark.x))
        yield f'<use class="skip" href="#up" x="{at}" y="100%">{_title(mark)}</use>'


def percent(fraction: np.ndarray) -> str:
    """A fraction of a length, in SVG and CSS."""
    return f"{100 * float(fraction):.5g}%"


def _look(kind: str, curve: Curve) -> str:
    """Attributes of what is drawn of a curve."""
    if curve.shade is None:
        return f'class="{kind} {_style(curve.colour)}"'
    colour = f"color-mix(in oklch, var(--c0), var(--c5) {100 * curve.shade:.0f}%)"
    return f'class="{kind}" style="--c:{colour}"'


def _style(colour: int | None) -> str:
    if colour is None:
        return "plain"
    return f"c{colour % _COLOURS}" + (" dashed" if colour >= _COLOURS else "")


def _title(mark: Mark) -> str:
    return f"<title>{escape(mark.text)}</title>"


def rounded(values: np.ndarray) -> list[float | None]:
    """Seven digits; what is not finite is null."""
    return [
        None if not math.isfinite(v) else int(v) if v == int(v) else float(f"{v:.7g}")
        for v in values.tolist()
    ]
