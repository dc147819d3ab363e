"""Early stopping: `[early_stop]` applied to the metrics of a run."""

import dataclasses
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxforge.cli.suggestions import choices
from jaxforge.config.eval import higher_is_better
from jaxforge.config.optimizer import EarlyStopConfig
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress

log = logging.getLogger(__name__)


@dataclasses.dataclass
class EarlyStop:
    """Decides after each step or evaluation whether the run ends.

    Attributes:
        config: the `[early_stop]` section.
        memory: values that a resumed run restores (`Progress.early_stop`), updated in place:
            "best" and "best_step" of "metric", the name of the metric.
        is_higher_better: direction of `early_stop.metric`, if only its task knows it.
    """

    config: EarlyStopConfig
    memory: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_higher_better: bool | None = None

    def requested(
        self, progress: Progress, logged: Mapping[str, float], evaluation: Mapping[str, float]
    ) -> Exit | None:
        """Return the exit reason if a condition holds after the latest step.

        All processes have the same metrics, so they come to the same decision.

        Args:
            progress: the counters of the run; a rollback replaces its `early_stop`.
            logged: metrics logged since the last call.
            evaluation: metrics of an evaluation after the step.

        Raises:
            UserError: `early_stop.metric` is never logged.
        """
        # A rollback replaces the dict, so it is looked up at each call.
        self.memory = progress.early_stop
        self.check_metric(logged)
        explanation = self.reason(progress.step, {**logged, **evaluation})
        if explanation is None:
            return None
        log.info("stopping early at step %d: %s", progress.step, explanation)
        return Exit.EARLY_STOPPED

    def check_metric(self, logged: Mapping[str, float]) -> None:
        """Check that `early_stop.metric` is among the metrics of a logged step, if it is of steps.

        Which of them a run logs is known only after its first step: a model or loss may add some.

        Raises:
            UserError: the metric is never logged, so the condition could never end the run.
        """
        metric = self.config.metric
        if not logged or not self.config.uses_metric or metric.startswith("eval/"):
            return
        if metric not in logged:
            raise UserError(
                f'early_stop.metric = "{metric}" is not logged by the steps of this run'
                f"{choices(metric, sorted(logged))}"
            )

    def reason(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Return why the run should end now, for the log; None to continue.

        Args:
            step: steps attempted.
            metrics: metrics logged or evaluated after the step. Limits on metrics that are not
                among them are not checked.
        """
        return next(self._reasons(step, metrics), None)

    def _reasons(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        stop = self.config
        if self._ran_out(step, metrics):
            yield (
                f"{stop.metric} has not improved on {self.memory['best']:.6g} "
                f"(step {self.memory['best_step']}) "
                f"by more than early_stop.min_delta = {stop.min_delta:g} for "
                f"early_stop.patience_steps = {stop.patience_steps} steps"
            )
        if self._reached_target(metrics):
            yield (
                f"{stop.metric} = {metrics[stop.metric]:.6g} has reached "
                f"early_stop.target = {stop.target:g}"
            )
        if stop.max_steps is not None and step >= stop.max_steps:
            yield f"early_stop.max_steps = {stop.max_steps} is reached"
        loss = metrics.get("train/loss", -math.inf)
        if stop.max_loss is not None and loss > stop.max_loss:
            yield f"train/loss = {loss:g} exceeds early_stop.max_loss = {stop.max_loss:g}"

    def _ran_out(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Update the best value, except by NaN, and return whether patience has run out."""
        stop = self.config
        if stop.patience_steps is None or stop.metric not in metrics:
            return False
        value, best = metrics[stop.metric], self.memory.get("best")
        # Another metric starts anew: values of two metrics are not comparable.
        if best is None or self.memory.get("metric", stop.metric) != stop.metric:
            self.memory.pop("best", None)
            if not math.isnan(value):
                self.memory.update(best=value, best_step=step, metric=stop.metric)
            return False
        # A NaN compares as no gain.
        gain = value - best if self._is_higher_better() else best - value
        if gain > stop.min_delta:
            self.memory.update(best=value, best_step=step)
        return step - self.memory["best_step"] >= stop.patience_steps

    def _reached_target(self, metrics: Mapping[str, float]) -> bool:
        """Return whether the metric was measured and is at least as good as the target."""
        metric, target = self.config.metric, self.config.target
        if target is None or metric not in metrics:
            return False
        return metrics[metric] >= target if self._is_higher_better() else metrics[metric] <= target

    def _is_higher_better(self) -> bool:
        if self.is_higher_better is not None:
            return self.is_higher_better
        is_higher_better = higher_is_better(self.config.metric, self.config.mode)
        assert is_higher_better is not None, "the rules of the config refuse unknown directions"
        return is_higher_better
