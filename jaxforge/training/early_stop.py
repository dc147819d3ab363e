"""Early stopping: `[early_stop]` applied to the metrics of a run."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from jaxforge.config.early_stop import EarlyStopConfig
from jaxforge.config.eval import METRICS


def is_loss(metric: str) -> bool:
    """Whether lower is better: of all that evaluation gives, and of any loss or its terms."""
    return metric.startswith(("eval/", "terms/")) or any(name in metric for name in METRICS)


@dataclasses.dataclass
class EarlyStop:
    """Decides after each step or evaluation whether the run ends.

    Attributes:
        config: the section.
        best: best value of `early_stop.metric` so far.
        best_step: step of it.
        lr_was_above: whether the learning rate has been at `early_stop.min_lr` or above: it is
            below at the beginning of a warm-up, too.
    """

    config: EarlyStopConfig
    best: float | None = None
    best_step: int = 0
    lr_was_above: bool = False

    def reason(self, step: int, metrics: Mapping[str, float]) -> str | None:
        """Why the run should end now, for the log; None to go on.

        Args:
            step: updates made.
            metrics: what was logged or evaluated after them; limits on others wait for theirs.
        """
        if not self.config.active:
            return None
        return next(self._reasons(step, metrics), None)

    def _reasons(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        stop = self.config
        if self._ran_out(step, metrics):
            yield (
                f"{stop.metric} is not better than {self.best:.6g}, that of step {self.best_step}, "
                f"by more than early_stop.min_delta = {stop.min_delta:g} since then: "
                f"early_stop.patience_steps = {stop.patience_steps}"
            )
        if stop.max_steps is not None and step >= stop.max_steps:
            yield f"early_stop.max_steps = {stop.max_steps} is reached"
        yield from self._above("max_loss", "train/loss", metrics)
        if self._lr_fell(metrics):
            yield f"train/lr = {metrics['train/lr']:g} is below early_stop.min_lr = {stop.min_lr:g}"
        yield from self._above("max_grad_norm", "train/grad_norm", metrics)

    def _ran_out(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Whether patience has; a value that is not a number is no improvement."""
        stop = self.config
        if stop.patience_steps is None or stop.metric not in metrics:
            return False
        value = metrics[stop.metric]
        if self.best is None:
            if not math.isnan(value):
                self.best, self.best_step = value, step
            return False
        is_lower_better = is_loss(stop.metric)
        gain = self.best - value if is_lower_better else value - self.best
        if gain > stop.min_delta:
            self.best, self.best_step = value, step
        return step - self.best_step >= stop.patience_steps

    def _lr_fell(self, metrics: Mapping[str, float]) -> bool:
        if self.config.min_lr is None or "train/lr" not in metrics:
            return False
        is_above = metrics["train/lr"] >= self.config.min_lr
        self.lr_was_above |= is_above
        return self.lr_was_above and not is_above

    def _above(self, key: str, metric: str, metrics: Mapping[str, float]) -> Iterator[str]:
        limit = getattr(self.config, key)
        if limit is not None and metrics.get(metric, limit) > limit:
            yield f"{metric} = {metrics[metric]:g} exceeds early_stop.{key} = {limit:g}"

    def to_json(self) -> dict[str, Any]:
        """What a resumed run goes on with."""
        return {name: getattr(self, name) for name in ("best", "best_step", "lr_was_above")}

    def load_json(self, values: Mapping[str, Any]) -> None:
        """Takes over what `to_json` gave; unknown fields are dropped, missing ones stay."""
        for name in self.to_json().keys() & values.keys():
            setattr(self, name, values[name])
