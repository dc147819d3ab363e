"""Results of a sweep: points sorted by loss, and the scaling law of the sizes."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.model.transformer import active_parameter_count
from jaxforge.runs.metrics_file import MetricsFile, NotYetError, Series
from jaxforge.telemetry.numbers import exact, human
from jaxforge.tools.sweep.law import LEAST_SIZES, Law, fit, next_size
from jaxforge.tools.sweep.runs import PlannedRun

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
