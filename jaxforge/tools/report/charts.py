"""Charts of the page: every metric except those that are derived from others.

They are JSON for `charts.js`. Metrics that never change are listed in a table instead.
"""

import base64
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxforge.config.eval import TASKS_PREFIX
from jaxforge.runs.reading import Run, Series

AXES: Mapping[str, str] = {
    "steps": "step",
    "tokens": "tokens",
    "hours": "hours since the first step",
}
"""Labels of the horizontal axes."""

BUCKETS = 1000  # about the number of pixel columns of a chart on most screens
_ENOUGH = 64  # points of a bucket that enter its median

_PARTS = 30_000  # buckets over all curves, which bounds the size of the page
_FEWEST = 16  # minimum number of buckets of a curve
_MARKS = 200  # marks on a curve; each is a few pixels wide
_AXIS_POINTS = 1000  # of the maps from steps to tokens and hours
_DERIVED = re.compile(
    r"smoothed/.*|goodput/.*_sec|train/(tokens|samples|valid_tokens)|gpu/mem_utilization"
    r"|eval/(?!tasks/)(.*/)?(ema_)?perplexity|eval/tasks/.*_stderr"
)
_LAYER = re.compile(r"/layers\.([0-9]{1,6})$")
_MARKED = ("train/loss", "train/grad_norm")
_HEADLINE = {
    "train/loss": "training",
    "eval/loss": "evaluation",
    "eval/ema_loss": "evaluation of the average",
}
"""Metrics of the first chart, and their labels."""
HEADLINE = "Loss"
"""Title of the first chart."""


def encode_column(values: np.ndarray, kind: str) -> str:
    """Return numbers as `charts.js` reads them: their kind, then little-endian bytes in base64.

    Args:
        values: [n].
        kind: "f4", "f8" or "i4".
    """
    data = np.ascontiguousarray(values, f"<{kind}").tobytes()
    return f"{kind}:{base64.b64encode(data).decode()}"


class Pool:
    """Deduplicated columns of a page, shared by its curves."""

    def __init__(self) -> None:
        self._indices: dict[str, int] = {}

    def add(self, values: np.ndarray, kind: str) -> int:
        """Return the index of a column in `columns`; arguments as for `encode_column`."""
        return self._indices.setdefault(encode_column(values, kind), len(self._indices))

    @property
    def columns(self) -> list[str]:
        """All columns, encoded."""
        return list(self._indices)


_EXACT = re.compile(
    r".*(lr|loss_scale|epoch|tokens|samples|steps|rollbacks|bytes|requests|retries|number)"
)
"""Metrics that are settings or counts: they have no noise, and are not smoothed."""


class Name(NamedTuple):
    """Place of a metric on the page.

    Attributes:
        title: title of its chart: the metric's name without the label.
        label: label of its curve among several with the same title: "layer 3", or the name of a
            dataset or task; empty if there is only one curve.
    """

    title: str
    label: str = ""

    @property
    def group(self) -> str:
        """Heading of the chart: the first part of the title."""
        return self.title.partition("/")[0]


def metric_name(metric: str) -> Name:
    """Return the place of a metric: `moe/balance/layers.3` is "moe/balance", "layer 3"."""
    if layer := _LAYER.search(metric):
        return Name(metric[: layer.start()], f"layer {layer[1]}")
    # The set of an evaluation may contain slashes, the kind of result may not.
    if several := re.fullmatch(r"(eval/tasks|eval(?!/tasks/)|data)/(.+)/([^/]+)", metric):
        return Name(f"{several[1]}/{several[3]}", several[2])
    if metric.startswith("loss/"):
        return Name("loss", metric.removeprefix("loss/"))
    return Name(metric, "all" if metric.startswith("eval/") else "")


class Constant(NamedTuple):
    """Metric with the same value throughout each run.

    Attributes:
        name: display name.
        values: value of each run; None if the run has not logged the metric.
    """

    name: str
    values: list[float | None]


class _Curve(NamedTuple):
    run: int
    metric: str
    label: str


class _Drawing(NamedTuple):
    """A chart before its points are chosen.

    Attributes:
        title: title above the chart.
        name: place of its first metric.
        curves: its curves.
        ordered: curves are shades of the same colour.
    """

    title: str
    name: Name
    curves: list[_Curve]
    ordered: bool = False


def charts(runs: Sequence[Run], pool: Pool) -> list[dict[str, Any]]:
    """Return all charts in the order of the page; the first shows the loss.

    Args:
        runs: the runs, whose curves are overlaid.
        pool: pool for the columns.
    """
    drawings = list(_drawings(runs))
    # All curves share a budget of points, which bounds the size of the page.
    count = sum(len(drawing.curves) for drawing in drawings)
    buckets = min(BUCKETS, max(_FEWEST, _PARTS // max(1, count)))
    return [_chart(drawing, runs, pool, buckets) for drawing in drawings]


def axis_values(run: Run) -> dict[str, str]:
    """Return tokens and hours since the first step, as functions of steps."""
    step, time, tokens = run.series["train/tokens"]
    chosen = np.unique(np.linspace(0, len(step) - 1, _AXIS_POINTS).round().astype(int))
    columns = (("steps", step), ("tokens", tokens), ("hours", (time - time[0]) / 3600))
    return {name: encode_column(column[chosen], "f8") for name, column in columns}


def steps_with_skips(run: Run) -> list[int]:
    """Return the logged steps at which the number of skipped steps has grown."""
    step, _, skipped = run.series["train/skipped_steps"]
    return _evenly_chosen(step[np.diff(skipped, prepend=0) > 0])


def constants(runs: Sequence[Run]) -> list[Constant]:
    """Return the metrics that are constant and need no chart; equal layers are merged."""
    by_value: dict[tuple[str, tuple[float | None, ...]], list[str]] = defaultdict(list)
    for metric in _metrics(runs):
        if _is_constant(metric, runs):
            name = metric_name(metric)
            logged = (run.series.get(metric) for run in runs)
            values = (None if series is None else series.last for series in logged)
            by_value[name.title, tuple(values)].append(name.label)
    return [
        Constant(title + _label_suffix(labels), list(values))
        for (title, values), labels in by_value.items()
    ]


def _label_suffix(labels: Sequence[str]) -> str:
    if len(labels) > 3:
        return f": {labels[0]} to {labels[-1]}"
    return f": {', '.join(labels)}" if any(labels) else ""


def _metrics(runs: Sequence[Run]) -> list[str]:
    """Return the logged metrics in the order of the page, without derived metrics."""
    names = dict.fromkeys(metric for run in runs for metric in run.series)
    return [metric for metric in names if not _DERIVED.fullmatch(metric)]


def _is_constant(metric: str, runs: Sequence[Run]) -> bool:
    logged = (run.series[metric].value for run in runs if metric in run.series)
    return metric not in _HEADLINE and all(
        # NaN is equal to NaN here: a metric that is always NaN needs no chart.
        ((values == values[0]) | (np.isnan(values) & np.isnan(values[0]))).all()
        for values in logged
    )


def _drawings(runs: Sequence[Run]) -> Iterable[_Drawing]:
    metrics = [metric for metric in _metrics(runs) if not _is_constant(metric, runs)]
    has_several_sets = any(
        metric.startswith("eval/") and metric.count("/") > 1
        for metric in metrics
        if not metric.startswith(TASKS_PREFIX)
    )
    if not runs:
        return
    yield _Drawing(HEADLINE, Name(HEADLINE), _headline(runs))
    groups: dict[str, dict[str, list[tuple[str, Name]]]] = defaultdict(lambda: defaultdict(list))
    for metric in metrics:
        name = metric_name(metric)
        # With several sets, the loss over all sets is drawn a second time, next to that of each.
        if metric not in _HEADLINE or (metric != "train/loss" and has_several_sets):
            groups[name.group][name.title].append((metric, name))
    for titles in groups.values():
        for title, members in titles.items():
            yield from _of_one_title(title, members, runs)


def _headline(runs: Sequence[Run]) -> list[_Curve]:
    return [
        _Curve(i, metric, label)
        for metric, label in _HEADLINE.items()
        for i, run in enumerate(runs)
        if metric in run.series
    ]


def _of_one_title(
    title: str, members: Sequence[tuple[str, Name]], runs: Sequence[Run]
) -> Iterable[_Drawing]:
    """Yield the charts of one title: one per member, or per run for layers."""
    several, first = len(runs) > 1, members[0][1]
    layers = [_LAYER.search(metric) for metric, _ in members]
    if all(layers):
        numbers = {m: int(match[1]) for (m, _), match in zip(members, layers, strict=True) if match}
        # "layers.10" comes after "layers.9".
        members = sorted(members, key=lambda member: numbers[member[0]])
        for i, run in enumerate(runs):
            curves = [_Curve(i, m, name.label) for m, name in members if m in run.series]
            if curves:
                yield _Drawing(f"{title}: {run.name}" if several else title, first, curves, True)
        return
    for metric, name in members if several else ():
        curves = [_Curve(i, metric, "") for i, run in enumerate(runs) if metric in run.series]
        yield _Drawing(f"{title}: {name.label}" if len(members) > 1 else title, first, curves)
    if not several:
        yield _Drawing(title, first, [_Curve(0, m, name.label) for m, name in members])


def _chart(drawing: _Drawing, runs: Sequence[Run], pool: Pool, buckets: int) -> dict[str, Any]:
    name, drawn = drawing.name, []
    for i, curve in enumerate(drawing.curves):
        series = runs[curve.run].series[curve.metric]
        colour = {"shade": i / max(len(drawing.curves) - 1, 1)} if drawing.ordered else {}
        if not drawing.ordered:
            colour = {"colour": curve.run if len(runs) > 1 else i}
        points = _points(series, pool, buckets)
        dots = curve.metric.startswith("eval/")
        marks = {"skips": True} if curve.metric in _MARKED else {}
        full_name = f"{runs[curve.run].name} {curve.label}".strip() if len(runs) > 1 else ""
        shown = {"run": curve.run, "label": curve.label, "name": full_name, "dots": dots}
        drawn.append({**shown, **colour, **marks, **points})
    return {"title": drawing.title, "group": name.group, "smooth": not _EXACT.fullmatch(name.title),
            "wide": name.title == HEADLINE, "curves": drawn}  # fmt: skip


def _points(series: Series, pool: Pool, buckets: int) -> Mapping[str, Any]:
    """Return the points of a curve: `x`, `y`, and for a long curve its medians as `smooth`."""
    step, _, value = series
    chosen = thin(value, buckets)
    data = {"x": pool.add(step[chosen], "i4"), "y": encode_column(value[chosen], "f4"),
             "last": float(value[-1]) if np.isfinite(value[-1]) else None}  # fmt: skip
    if len(chosen) < len(step):
        x, y = bucket_medians(step, value, buckets)
        # Below 2^23, float32 is exact to half a step.
        data["smooth"] = [pool.add(x, "f4" if step[-1] < 1 << 23 else "f8"), encode_column(y, "f4")]
    bad = step[~np.isfinite(value)]
    return data | ({"bad": _evenly_chosen(bad), "bad_count": len(bad)} if len(bad) else {})


def _evenly_chosen(steps: np.ndarray) -> list[int]:
    """Return at most `_MARKS` evenly chosen steps, with the first and the last."""
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _MARKS)).round().astype(int))
    return steps[chosen].tolist() if len(steps) else []


def thin(y: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Return indices of the points to draw: the lowest and the highest of each bucket.

    No spike is lost. A bucket without finite values keeps one point, which is a gap in the curve.
    Short curves keep all points.

    Args:
        y: [n].
        buckets: number of buckets of consecutive points.
    """
    if len(y) <= 2 * buckets:
        return np.arange(len(y))
    # [buckets, size]; NaN must be neither the lowest nor the highest point.
    rows = _buckets(y, buckets)
    starts = rows.shape[1] * np.arange(len(rows))
    lowest = np.where(np.isnan(rows), np.inf, rows).argmin(axis=1)
    highest = np.where(np.isnan(rows), -np.inf, rows).argmax(axis=1)
    return np.unique(np.concatenate([[0], starts + lowest, starts + highest, [len(y) - 1]]))


def bucket_medians(
    x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of the median of each bucket's finite points, for a smooth curve.

    Unlike a mean, a median ignores spikes. Large buckets are subsampled. Buckets without finite
    values are left out.

    Args:
        x: [n], increasing.
        y: [n].
        buckets: number of buckets, as in `thin`.
    """
    rows, xs = _buckets(y, buckets), _buckets(x, buckets)
    stride = max(1, rows.shape[1] // _ENOUGH)
    rows, xs = rows[:, ::stride], xs[:, ::stride]
    some = ~np.isnan(rows).all(axis=1)
    rows, xs = rows[some], np.where(np.isnan(rows), np.nan, xs)[some]
    ordered, count = np.sort(rows, axis=1), (~np.isnan(rows)).sum(axis=1)  # NaN is last
    # Mean of the two middle values; equal for an odd count.
    at = np.arange(len(rows))
    medians = (ordered[at, (count - 1) // 2] + ordered[at, count // 2]) / 2
    return np.nanmean(xs, axis=1), medians


def _buckets(values: np.ndarray, buckets: int) -> np.ndarray:
    """Return values as buckets [rows, size], at most `buckets` rows; NaN unless finite."""
    # Round up: the last bucket is filled with NaN.
    size = -(-len(values) // buckets)
    padded = np.full(-(-len(values) // size) * size, np.nan)
    padded[: len(values)] = np.where(np.isfinite(values), values, np.nan)
    return padded.reshape(-1, size)
