"""Results of a sweep: losses by point, the law of their sizes, and the HTML page."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import OptimizeResult, least_squares

from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.model.transformer import active_parameter_count
from jaxforge.runs.metrics_file import MetricsFile, NotYetError, Series
from jaxforge.telemetry.numbers import exact, human
from jaxforge.tools.pages.parts import Pool, chart, curve, document, paragraphs
from jaxforge.tools.pages.parts import table as html_table
from jaxforge.tools.sweep.runs import PlannedRun

LEAST_SIZES = 4
"""Fewest sizes for a fit: one more than the parameters, so that its error means something."""

_DELTA = 1e-3  # of Huber's loss, relative to L, as in arXiv:2203.15556
_STARTS = (0.05, 0.2, 0.5, 1.0, 2.0)  # of α: the sum has local minima
_MOST_ALPHA = 3.75


class Law(NamedTuple):
    """Fitted scaling law.

    Attributes:
        e: E, the loss of an infinite model.
        a: A, the factor of the power of size.
        alpha: α, the exponent.
        error: mean of |L - L(N)| / L over the sizes.
    """

    e: float
    a: float
    alpha: float
    error: float

    def __call__(self, n: float) -> float:
        """Return the loss of a model with n parameters."""
        return self.e + self.a * n**-self.alpha


def fit(sizes: Sequence[float], losses: Sequence[float]) -> Law | None:
    """Fit the law that minimizes the sum of Huber's loss of relative errors.

    Outliers, such as diverged runs, have little weight. E and A are nonnegative.

    Args:
        sizes: [n] numbers of parameters, > 0.
        losses: [n], > 0.

    Returns:
        The law; None with fewer than `LEAST_SIZES` different sizes.
    """
    n, y = np.asarray(sizes, float), np.asarray(losses, float)
    if len(set(n.tolist())) < LEAST_SIZES:
        return None
    scale = np.exp(np.mean(np.log(n)))  # sizes relative to their mean keep powers near 1
    powers = np.log(n / scale)

    def errors(law: np.ndarray) -> np.ndarray:
        e, a, alpha = law
        return (e + a * np.exp(-alpha * powers)) / y - 1

    def fit_from(alpha: float) -> OptimizeResult:
        start, bounds = (y.min() / 2, y.min() / 2, alpha), (0, (np.inf, np.inf, _MOST_ALPHA))
        return least_squares(
            errors, start, bounds=bounds, loss="huber", f_scale=_DELTA, xtol=1e-14, ftol=1e-14
        )

    e, a, alpha = min(map(fit_from, _STARTS), key=lambda result: result.cost).x.tolist()
    law = Law(e, float(a * scale**alpha), alpha, 0.0)
    relative = [abs(law(size) / loss - 1) for size, loss in zip(n, y, strict=True)]
    return law._replace(error=float(np.mean(relative)))


def next_size(sizes: Sequence[float]) -> float:
    """Extrapolate the sizes by one: the ratio of the two largest sizes continues."""
    *_, before, last = sorted(set(sizes))
    return last * last / before


VALIDATION, TRAINING = "eval/loss", "train/loss"
_SHARE = 10  # the last 1 / _SHARE of the logged steps is averaged


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one point.

    Attributes:
        run: run of the point.
        loss: final loss; NaN if the run is unfinished, or its loss is not finite.
        parameters: active parameters per token.
        tokens: tokens trained on.
    """

    run: PlannedRun
    loss: float
    parameters: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of all points.

    Attributes:
        metric: "eval/loss", or "train/loss" if no point was evaluated.
        points: results by increasing loss; points without a loss are last.
        law: law of the best point of each size; None with too few sizes.
    """

    metric: str
    points: Sequence[Result]
    law: Law | None

    @property
    def best_by_size(self) -> list[Result]:
        """Best point of each size, the smallest size first."""
        best: dict[int, Result] = {}
        for point in self.points:
            if math.isfinite(point.loss):
                best.setdefault(point.parameters, point)
        return [best[size] for size in sorted(best)]


def results(runs: Sequence[PlannedRun]) -> Results:
    """Read the logs of the runs."""
    logged = [_logged(run) for run in runs]
    metric = VALIDATION if any(VALIDATION in series for series in logged) else TRAINING
    points = [_result(run, series, metric) for run, series in zip(runs, logged, strict=True)]
    points.sort(key=lambda point: (not math.isfinite(point.loss), point.loss))
    outcome = Results(metric, points, None)
    best = outcome.best_by_size
    law = fit([point.parameters for point in best], [point.loss for point in best])
    return dataclasses.replace(outcome, law=law)


def _logged(run: PlannedRun) -> dict[str, Series]:
    """Return the metrics of a finished run; empty if it is unfinished or has logged nothing."""
    try:
        return MetricsFile(run.directory).read()[0] if run.is_finished else {}
    except NotYetError:
        return {}


def _result(run: PlannedRun, series: Mapping[str, Series], metric: str) -> Result:
    values = series[metric].value.tolist() if metric in series else []
    # The loss of a single step is noisy; an evaluation always reads the same text.
    last = values[-max(1, len(values) // _SHARE) :] if metric == TRAINING else values[-1:]
    loss = statistics.fmean(last) if last else math.nan
    tokens = int(series["train/tokens"].last_finite) if "train/tokens" in series else 0
    return Result(run, loss, parameters(run.config.model), tokens)


def parameters(model: ModelConfig) -> int:
    """Return the active parameters per token, without using a device."""
    return active_parameter_count(MODELS[model.model_type](model))


def table(result: Results) -> str:
    """Return the points, the best first, and the law as plain text."""
    cells = rows(result)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*(line.rstrip() for line in lines), *describe_law(result)])


def rows(result: Results) -> list[tuple[str, ...]]:
    """Return the head of a table, and a row for each point."""
    rows_: list[tuple[str, ...]] = [("", "point", "parameters", "tokens", result.metric)]
    for i, point in enumerate(result.points, 1):
        run = point.run
        loss = "not finite" if run.is_finished else f"not finished ({run.state})"
        loss = exact(point.loss) if math.isfinite(point.loss) else loss
        rows_.append((str(i), run.point.name, human(point.parameters), human(point.tokens), loss))
    return rows_


def describe_law(result: Results) -> list[str]:
    """Describe the law and its prediction, or why there is none; empty if all sizes are equal."""
    best = result.best_by_size
    if len(best) < 2:
        return []
    if result.law is None:
        return [f"no law: it needs {LEAST_SIZES} sizes, and {len(best)} are finished"]
    law, size = result.law, next_size([point.parameters for point in best])
    return [
        f"L(N) = {law.e:.4g} + {law.a:.4g} N^-{law.alpha:.3g}, off by {law.error:.2%} on average",
        f"predicted for {human(size)} parameters on the same data: {exact(law(size))}",
    ]


_DRAWN = 100  # points of the law

Curves = Mapping[str, tuple[Any, Any]]
"""x and y, each [n], by label."""


def page(results: Results, title: str) -> str:
    """Return the page: losses by size with the law, losses by each numeric key, all points."""
    head, *body = rows(results)
    pool = Pool()
    charts = [*_by_size(results, pool), *_by_keys(results, pool)]
    points = html_table("Points", list(head), body)
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
        fixed = ", ".join(f"{k}={v}" for k, v in point.run.point.values.items() if k != key)
        lines[fixed or "loss"].append((_number(point, key), point.loss))
    in_order = {label: np.array(sorted(line), float).T for label, line in sorted(lines.items())}
    return {label: (x, y) for label, (x, y) in in_order.items()}


def _number(result: Result, key: str) -> float | None:
    try:
        return float(result.run.point.values[key])
    except (KeyError, ValueError):
        return None
