"""The base class of callbacks, and what they see of a run."""

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
    """A step as callbacks see it. Scalars are fetched from the device when they are read.

    Attributes:
        step: steps attempted.
        state: parameters and optimizer state after the step; gone once the next step starts.
        metrics: the step's metrics, on the device.
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
        """Terms of the loss by name, where it has several."""
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
        """Gradients before clipping; only for callbacks that collect "grads"."""
        return self.metrics["grads"]


@dataclasses.dataclass(frozen=True)
class IntervalContext:
    """A run between two steps, as `Callback.on_interval` sees it.

    Attributes:
        progress: the counters of the run.
        state: parameters and optimizer state after the step; gone once the next step starts.
        tracker: where metrics are logged.
        watchdog: ends the process where it hangs.
        callbacks: all callbacks of the run, for events of an evaluation.
        stop_requested: asked between batches of an evaluation; the reason to stop there, or None.
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
        """Keep the time inside out of that of steps, under the time limit of evaluations.

        Args:
            activity: named by the watchdog if the process hangs.
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
    """True if `on_interval` is called once every launched step has ended, and off the clock."""

    follows_evaluation: bool = False
    """True if `on_interval` belongs to the evaluation of a step.

    Such a callback acts also where a run resumes in an evaluation, before the step is compiled. It
    pauses the clock itself (`IntervalContext.examining_model`).
    """

    def is_due(self, step: int) -> bool:
        """Return whether `on_interval` is due after `step`, for intervals in steps."""
        return isinstance(self.every, int) and self.every > 0 and step % self.every == 0

    def on_train_begin(self, config: JobConfig) -> None:
        """Called first, before anything is compiled."""

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Called before the first step of this process, once the step is compiled."""

    def on_step_end(self, context: StepContext) -> None:
        """Called after each step, once its metrics (where due) are logged."""

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Called every `every`. Return a reason to end the run, or None.

        Later callbacks are not called after a reason. `Exit.UNHEALTHY` ends the run unsaved.
        """
        return None

    def on_eval_begin(self, step: int) -> None:
        """Called before each evaluation; not again where a run resumes in one."""

    def on_eval_end(self, metrics: dict[str, float], step: int) -> None:
        """Called after each evaluation, once its metrics are logged."""

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Called when a save has started; the checkpoint may not be durable yet."""

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Called after the last save, also when the run fails (`reason` is None then).

        Threads of yours that must come to their end do so in here: `python -m jaxforge.train` waits
        half a minute for others, and leaves.
        """

    def close(self) -> None:
        """Release what the callback holds: called last, also where `on_train_end` fails."""
