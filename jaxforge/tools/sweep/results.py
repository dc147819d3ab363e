"""Results of a sweep: its points by loss, and the law of its sizes."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.model.transformer import active_parameter_count
from jaxforge.runs.reading import MetricsFile, NotYetError, Series
from jaxforge.telemetry.numbers import exact, human
from jaxforge.tools.sweep.law import LEAST_SIZES, Law, fit, next_size
from jaxforge.tools.sweep.runs import PlannedRun

VALIDATION, TRAINING = "eval/loss", "train/loss"
_SHARE = 10  # of the logged steps at the end: one of them are an average of


@dataclasses.dataclass(frozen=True)
class Result:
    """Result of one point.

    Attributes:
        run: the point.
        loss: at the end; NaN where it is not finished, or not finite.
        parameters: that a token meets.
        tokens: trained on.
    """

    run: PlannedRun
    loss: float
    parameters: int
    tokens: int


@dataclasses.dataclass(frozen=True)
class Results:
    """Results of all points.

    Attributes:
        metric: "eval/loss", or "train/loss" where no point was evaluated.
        points: the lowest loss first, those without one last.
        law: of the best point of each size; None of too few sizes.
    """

    metric: str
    points: Sequence[Result]
    law: Law | None

    @property
    def best_by_size(self) -> list[Result]:
        """The best point of each size, the smallest size first."""
        best: dict[int, Result] = {}
        for point in self.points:
            if math.isfinite(point.loss):
                best.setdefault(point.parameters, point)
        return [best[size] for size in sorted(best)]


def results(runs: Sequence[PlannedRun]) -> Results:
    """Reads what the runs have logged."""
    logged = [_logged(run) for run in runs]
    metric = VALIDATION if any(VALIDATION in series for series in logged) else TRAINING
    points = [_result(run, series, metric) for run, series in zip(runs, logged, strict=True)]
    points.sort(key=lambda point: (not math.isfinite(point.loss), point.loss))
    outcome = Results(metric, points, None)
    best = outcome.best_by_size
    law = fit([point.parameters for point in best], [point.loss for point in best])
    return dataclasses.replace(outcome, law=law)


def _logged(run: PlannedRun) -> dict[str, Series]:
    """Return the metrics of a finished run; none of one that is not, or that logged nothing."""
    try:
        return MetricsFile(run.directory, exact=True).read()[0] if run.is_finished else {}
    except NotYetError:
        return {}


def _result(run: PlannedRun, series: Mapping[str, Series], metric: str) -> Result:
    values = series[metric].value.tolist() if metric in series else []
    # One step's loss is noise; an evaluation's is of the same text each time.
    last = values[-max(1, len(values) // _SHARE) :] if metric == TRAINING else values[-1:]
    loss = statistics.fmean(last) if last else math.nan
    tokens = int(series["train/tokens"].last_finite) if "train/tokens" in series else 0
    return Result(run, loss, parameters(run.config.model), tokens)


def parameters(model: ModelConfig) -> int:
    """Return the parameters that a token meets, without asking any device."""
    return active_parameter_count(MODELS[model.model_type](model))


def table(result: Results) -> str:
    """The points, the best first, and the law, in plain text."""
    cells = rows(result)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*(line.rstrip() for line in lines), *describe_law(result)])


def rows(result: Results) -> list[tuple[str, ...]]:
    """The head of a table, and a row for each point."""
    head = ("", "point", "parameters", "tokens", result.metric)
    return [head, *(_row(i, point) for i, point in enumerate(result.points, 1))]


def _row(number: int, result: Result) -> tuple[str, ...]:
    loss = "not finite" if result.run.is_finished else f"not finished ({result.run.state})"
    loss = exact(result.loss) if math.isfinite(result.loss) else loss
    return str(number), result.run.point.name, human(result.parameters), human(result.tokens), loss


def describe_law(result: Results) -> list[str]:
    """The law with its prediction; why there is none; nothing where sizes are all the same."""
    best = result.best_by_size
    if len(best) < 2:
        return []
    if result.law is None:
        return [f"no law: it takes {LEAST_SIZES} sizes, and {len(best)} are finished"]
    law, size = result.law, next_size([point.parameters for point in best])
    return [
        f"L(N) = {law.e:.4g} + {law.a:.4g} N^-{law.alpha:.3g}, off by {law.error:.2%} on average",
        f"predicted for {human(size)} parameters, on as much data: {exact(law(size))}",
    ]
