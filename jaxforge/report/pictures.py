"""Which charts a page gets: every metric that was logged, but for those that follow from others."""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from jaxforge.report.chart import Chart, Curve, Mark, gathered
from jaxforge.report.reading import Run

_AREA_POINTS = 400
_NARROW = 12  # most layers in the legend of a chart of half the page's width
_LAYER = re.compile(r"(.+)/layers\.(\d+)")


@dataclasses.dataclass(frozen=True)
class _Family:
    """Metrics of one unit: on one chart for a single run, on one chart each for several.

    Attributes:
        title: of the chart.
        unit: of its vertical axis.
        metrics: names by label; those that were not logged do not count.
        views, zero, wide: as of `Chart`.
        smooth: as of `Curve`, but for evaluations.
        factor: from what is logged to the unit.
        colour: of the first metric.
        skips: show which steps were skipped.
    """

    title: str
    unit: str
    metrics: Mapping[str, str]
    views: Sequence[str] = ("linear",)
    zero: bool = False
    wide: bool = False
    smooth: bool = False
    factor: float = 1.0
    colour: int = 0
    skips: bool = False


_STEPS = (
    _Family("Learning rate", "of the next update", {"rate": "train/lr"}, zero=True),
    _Family(
        "Gradient norm", "before clipping", {"norm": "train/grad_norm"}, ("log",),
        smooth=True, skips=True,
    ),
    _Family(
        "Throughput", "tokens per second", {"all devices": "train/tokens_per_sec"},
        zero=True, smooth=True,
    ),
    _Family(
        "Model FLOPs utilization", "% of peak",
        {"all pairs of tokens": "train/mfu", "causal pairs": "train/mfu_causal"},
        zero=True, smooth=True, factor=100,
    ),
    _Family(
        "Model FLOPs", "TFLOP/s per device", {"causal pairs": "train/tflops_per_device"},
        zero=True, smooth=True,
    ),
    _Family(
        "Time of a step", "seconds", {"whole step": "train/step_time_sec"}, ("log",), smooth=True
    ),
    _Family(
        "Waiting for data", "seconds per step", {"wait": "train/data_wait_sec"},
        zero=True, smooth=True,
    ),
    _Family(
        "Memory of the fullest device", "GiB",
        {"peak": "gpu/peak_gb", "allocated": "gpu/allocated_gb", "reserved": "gpu/reserved_gb",
         "total": "gpu/total_gb"},
        zero=True,
    ),
    _Family("Skipped steps", "so far", {"skipped": "train/skipped_steps"}, zero=True),
    _Family(
        "Balance of experts", "least loaded over most loaded",
        {"over all layers": "moe/expert_balance"}, zero=True, smooth=True,
    ),
    _Family(
        "Load-balancing loss", "sum over layers, before its weight; even: 1 each",
        {"all layers": "moe/aux_loss"}, smooth=True,
    ),
    _Family(
        "Router z-loss", "sum over layers, before its weight",
        {"all layers": "moe/router_z_loss"}, smooth=True,
    ),
    _Family(
        "Dropped assignments", "% of all", {"no room": "moe/dropped"}, zero=True, smooth=True,
        factor=100,
    ),
)  # fmt: skip
_BY_LAYER = {
    "moe/balance": _Family(
        "Balance by layer", "least loaded expert over most loaded", {}, zero=True, smooth=True
    ),
    "moe/router_entropy": _Family("Router entropy by layer", "nats", {}, smooth=True),
    "moe/router_bias": _Family("Largest router bias by layer", "", {}, smooth=True),
}  # fmt: skip


def charts(runs: Sequence[Run], axis: str) -> tuple[list[Chart], list[Chart]]:
    """The charts of what is known, the most telling first, and those of any other metric.

    Args:
        runs: one, or several to compare.
        axis: as of `Run.position`.
    """
    names = list(dict.fromkeys(name for run in runs for name in run.series))
    names = [name for name in names if not _is_left_out(name, runs)]
    layers = _by_layer(names)
    known = [*_known(names, runs, axis)]
    known += [_mixture(run, sets, axis, runs) for run in runs if (sets := _datasets(run))]
    known += [chart for start in layers for chart in _layers(start, layers[start], runs, axis)]
    shown = {name for family in _families(names) for name in family.metrics.values()}
    shown |= {name for metrics in layers.values() for name in metrics.values()}
    others = [
        _chart(_Family(name, "", {}, smooth=True), name, {name: name}, runs, axis)
        for name in names
        if name not in shown
    ]
    return known, others


def _known(names: Sequence[str], runs: Sequence[Run], axis: str) -> Iterator[Chart]:
    """Of families: for several runs, a metric's first place is its only one."""
    shown: set[str] = set()
    for family in _families(names):
        metrics = {label: name for label, name in family.metrics.items() if name in names}
        if len(runs) == 1 and metrics:
            yield _chart(family, family.title, metrics, runs, axis)
        for label, name in metrics.items() if len(runs) > 1 else ():
            title = f"{family.title}: {label}" if len(metrics) > 1 else family.title
            if name not in shown:
                yield _chart(family, title, {label: name}, runs, axis)
        shown |= set(metrics.values())


def _is_left_out(name: str, runs: Sequence[Run]) -> bool:
    """Whether a metric follows from others, is told elsewhere on the page, or cannot but be 0."""
    if name == "train/skipped_steps":
        return not any(run.skipped for run in runs)
    if name == "moe/dropped":
        return not any(run.config.model.moe_capacity_factor for run in runs)
    derived = name.startswith("smoothed/") or name in ("train/tokens", "gpu/mem_utilization")
    return (
        derived or name.endswith("perplexity") or any(name in _datasets(r).values() for r in runs)
    )


def _families(names: Sequence[str]) -> Iterator[_Family]:
    """In the order of the page."""
    losses = {"train": "train/loss", "evaluation": "eval/loss"}
    nats, views = "nats per token", ("linear", "log", "close-up")
    yield _Family("Loss", nats, losses, views, wide=True, smooth=True, skips=True)
    yield _Family("Evaluation loss", nats, by_label(names, "eval/", "/loss"), colour=1)
    bits = by_label(names, "eval/", "/bits_per_byte")
    yield _Family("Evaluation", "bits per byte", bits, colour=1)
    yield from _STEPS
    yield _Family("Loss by dataset", nats, by_label(names, "loss/", ""), smooth=True)


def by_label(names: Collection[str], start: str, end: str) -> dict[str, str]:
    """The metrics named `start` + label + `end`, by label.

    Args:
        names: of metrics.
        start: such as "eval/".
        end: such as "/loss"; "eval/loss" itself then is labelled "evaluation", or "all sets".
    """
    whole = start + end[1:]
    parts = {
        name[len(start) : len(name) - len(end)]: name
        for name in names
        if name.startswith(start) and name.endswith(end) and name != whole
    }
    return ({"all sets" if parts else "evaluation": whole} if whole in names else {}) | parts


def _by_layer(names: Sequence[str]) -> dict[str, dict[str, str]]:
    """The metrics of which each layer has one, by label and in the order of the layers."""
    found = [(match[1], int(match[2])) for name in names if (match := _LAYER.fullmatch(name))]
    groups: dict[str, dict[str, str]] = {start: {} for start, _ in found}
    for start, layer in sorted(found):
        groups[start][f"layer {layer}"] = f"{start}/layers.{layer}"
    return groups


def _layers(
    start: str, metrics: Mapping[str, str], runs: Sequence[Run], axis: str
) -> Iterator[Chart]:
    """A chart for each run, as the layers of several would hardly be told apart."""
    family = _BY_LAYER.get(start, _Family(f"{start} by layer", "", {}, smooth=True))
    for run in runs:
        logged = {label: name for label, name in metrics.items() if name in run.series}
        if logged:
            title = family.title if len(runs) == 1 else f"{family.title}: {run.name}"
            chart = _chart(family, title, logged, [run], axis)
            last = max(len(logged) - 1, 1)
            curves = [
                dataclasses.replace(curve, shade=i / last) for i, curve in enumerate(chart.curves)
            ]
            yield dataclasses.replace(chart, curves=curves, wide=len(logged) > _NARROW)


def _chart(
    family: _Family, title: str, metrics: Mapping[str, str], runs: Sequence[Run], axis: str
) -> Chart:
    alone = len(runs) == 1
    curves = [
        _curve(run, name, axis, family, label if alone else run.name, colour)
        for i, run in enumerate(runs)
        for colour, (label, name) in enumerate(metrics.items(), family.colour if alone else i)
        if name in run.series
    ]
    skips = [mark for run in runs for mark in _skips(run, axis)] if family.skips else []
    return Chart(title, family.unit, curves, family.views, family.zero, family.wide, skips)


def _curve(run: Run, name: str, axis: str, family: _Family, label: str, colour: int) -> Curve:
    series, is_evaluation = run.series[name], name.startswith("eval/")
    return Curve(
        label=label,
        x=run.position(series.step, axis),
        y=family.factor * series.value,
        colour=colour,
        dots=is_evaluation,
        smooth=family.smooth and not is_evaluation,
    )


def _skips(run: Run, axis: str) -> list[Mark]:
    """Logged steps at which more had been skipped than at the one before."""
    step, _, skipped = run.series["train/skipped_steps"]
    return gathered(
        run.position(step[np.diff(skipped, prepend=0) > 0], axis), f"{run.name}: skipped"
    )


def _datasets(run: Run) -> dict[str, str]:
    return by_label(run.series, "data/", "/tokens")


def _mixture(run: Run, names: Mapping[str, str], axis: str, runs: Sequence[Run]) -> Chart:
    """Tokens of each dataset, on each other."""
    steps = np.unique(np.concatenate([run.series[name].step for name in names.values()]))
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, _AREA_POINTS).round().astype(int))]
    x, base, curves = run.position(steps, axis), np.zeros(len(steps)), []
    for colour, (label, name) in enumerate(names.items()):
        series = run.series[name]
        tokens = np.interp(steps, series.step, series.value, left=0.0)
        curves.append(Curve(label, x, tokens, colour, base=base))
        base = base + tokens
    title = "Mixture" if len(runs) == 1 else f"Mixture of {run.name}"
    return Chart(title, "tokens by dataset", curves, zero=True)
