"""The base class of callbacks, and the contexts that they receive."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import CompiledSteps
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.health.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class StepContext:
    """A step as callbacks see it. Reading a scalar fetches it from the device.

    Attributes:
        step: steps attempted.
        state: parameters and optimizer state after the step; deleted when the next step starts.
        metrics: metrics of the step, on the device.
    """

    step: int
    state: TrainState
    metrics: dict[str, Any]

    @property
    def tokens_seen(self) -> int:
        """Tokens of applied updates."""
        return int(self.metrics["counts"].tokens)

    @property
    def loss(self) -> float:
        """Loss of the update; NaN if no label counts."""
        return float(self.metrics["loss"])

    @property
    def losses(self) -> dict[str, float]:
        """Terms of the loss by name; empty for a loss without terms."""
        return {name: float(term) for name, term in self.metrics.get("losses", {}).items()}

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return float(self.metrics["grad_norm"])

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(self.metrics["lr"])

    @property
    def gradients(self) -> PyTree:
        """Gradients before clipping; only available to callbacks that collect "grads"."""
        return self.metrics["grads"]


@dataclasses.dataclass(frozen=True)
class IntervalContext:
    """A run between two steps, as `Callback.on_interval` sees it.

    Attributes:
        progress: the counters of the run.
        state: parameters and optimizer state after the step; deleted when the next step starts.
        tracker: logs metrics.
        watchdog: ends the process if it hangs.
        callbacks: all callbacks of the run, for events of an evaluation.
        stop_requested: returns the reason to stop between two batches of an evaluation, or None.
        amend_checkpoint: writes `progress` again to the checkpoint of this step.
        evaluation: metrics of the evaluation after this step; empty without one.
    """

    progress: Progress
    state: TrainState
    tracker: Tracker
    watchdog: Watchdog
    callbacks: Iterable["Callback"]
    stop_requested: Callable[[], Exit | None]
    amend_checkpoint: Callable[[Progress], None]
    evaluation: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """Steps attempted."""
        return self.progress.step

    @contextlib.contextmanager
    def examining_model(self, activity: str | None = None) -> Iterator[None]:
        """Exclude the block from step times; the time limit of evaluations holds inside.

        Args:
            activity: shown on the live line and in the report of a hang.
        """
        naming = self.watchdog.naming(activity) if activity else contextlib.nullcontext()
        with self.tracker.paused(), self.watchdog.section("evaluation"), naming:
            yield


class Callback:
    """Base class of everything that acts between steps: override the events you need.

    Every process calls the events, at the same steps. `order.ORDER` lists the order of a step.
    """

    every: int | str | None = None
    """Interval of `on_interval`: steps, or a duration such as "90s", "10m" or "2h".

    None: never. Durations follow the clock of process 0. Among several processes, they are checked
    every `runner.CHECK_INTERVAL` steps.
    """

    collect: tuple[str, ...] = ()
    """Additional metrics of each step, among `step.collect.COLLECTED`."""

    waits: bool = True
    """True if `on_interval` needs all launched steps to be finished; its time is not step time."""

    follows_evaluation: bool = False
    """True if `on_interval` belongs to the evaluation of a step.

    Such a callback also acts when a run resumes within an evaluation, before the step is compiled.
    It pauses the clock itself (`IntervalContext.examining_model`).
    """

    checks_start: bool = False
    """True if `on_interval` also runs before the first evaluation and step of each start.

    The step is not compiled then.
    """

    def is_due(self, step: int) -> bool:
        """Return whether `on_interval` is due after `step`, for intervals in steps."""
        return isinstance(self.every, int) and self.every > 0 and step % self.every == 0

    def on_train_begin(self, config: JobConfig) -> None:
        """Handle the start of training, before anything is compiled."""

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Handle the end of compilation, before the first step of this process."""

    def on_step_end(self, context: StepContext) -> None:
        """Handle the end of each step, after its metrics are logged if they are due."""

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Act at the interval `every`.

        Returns:
            A reason to end the run, or None. After a reason, later callbacks are not called.
            `Exit.UNHEALTHY` ends the run without saving.
        """
        return None

    def on_eval_begin(self, step: int) -> None:
        """Handle the start of an evaluation; not called again if a run resumes within it."""

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """Handle the end of an evaluation, after its metrics are logged."""

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Handle the start of a save; the checkpoint may not be durable yet."""

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Handle the end of training, after the last save.

        This is also called when the run fails; `reason` is None then. Join your own threads here:
        `python -m jaxforge.train` waits only half a minute for other threads.
        """

    def close(self) -> None:
        """Release resources. Called last, also if `on_train_end` fails."""
