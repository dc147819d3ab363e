"""Results of a sweep: its points by loss, and the law of its sizes."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from jaxforge.config.model import MODELS, ModelConfig
from jaxforge.model.transformer import active_parameter_count
from jaxforge.runs.reading import MetricsFile, NotYetError, Series
from jaxforge.telemetry.numbers import exact, human
from jaxforge.tools.sweep.law import NEEDED, Law, fit, next_size
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
        for one in self.points:
            if math.isfinite(one.loss):
                best.setdefault(one.parameters, one)
        return [best[size] for size in sorted(best)]


def results(runs: Sequence[PlannedRun]) -> Results:
    """Reads what the runs have logged."""
    logged = [_logged(run) for run in runs]
    metric = VALIDATION if any(VALIDATION in series for series in logged) else TRAINING
    points = [_result(run, series, metric) for run, series in zip(runs, logged, strict=True)]
    points.sort(key=lambda one: (not math.isfinite(one.loss), one.loss))
    found = Results(metric, points, None)
    best = found.best_by_size
    law = fit([one.parameters for one in best], [one.loss for one in best])
    return dataclasses.replace(found, law=law)


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


def table(found: Results) -> str:
    """The points, the best first, and the law, in plain text."""
    cells = rows(found)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in cells]
    return "\n".join([*(line.rstrip() for line in lines), *law_in_words(found)])


def rows(found: Results) -> list[tuple[str, ...]]:
    """The head of a table, and a row for each point."""
    head = ("", "point", "parameters", "tokens", found.metric)
    return [head, *(_row(i, one) for i, one in enumerate(found.points, 1))]


def _row(number: int, one: Result) -> tuple[str, ...]:
    loss = "not finite" if one.run.is_finished else f"not finished ({one.run.state})"
    loss = exact(one.loss) if math.isfinite(one.loss) else loss
    return str(number), one.run.point.name, human(one.parameters), human(one.tokens), loss


def law_in_words(found: Results) -> list[str]:
    """The law with its prediction; why there is none; nothing where sizes are all the same."""
    best = found.best_by_size
    if len(best) < 2:
        return []
    if found.law is None:
        return [f"no law: it takes {NEEDED} sizes, and {len(best)} are finished"]
    law, size = found.law, next_size([one.parameters for one in best])
    return [
        f"L(N) = {law.e:.4g} + {law.a:.4g} N^-{law.alpha:.3g}, off by {law.error:.2%} on average",
        f"predicted for {human(size)} parameters, on as much data: {exact(law(size))}",
    ]
