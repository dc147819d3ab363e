"""The base classes of callbacks, the contexts that they receive, and what they are built from."""

import abc
import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.dataset import Dataset
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model
from jaxforge.parallel.groups import read_groups_here
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import CompiledSteps
from jaxforge.storage import mirror
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.callbacks.control import Control
from jaxforge.training.frozen import FrozenFields
from jaxforge.training.health.watchdog import Watchdog


@dataclasses.dataclass(frozen=True)
class StepContext:
    """A step as callbacks see it. Reading a scalar fetches it from the device.

    If groups train apart, scalars are those of the groups that have devices in this process.

    Attributes:
        step: steps attempted.
        state: parameters and optimizer state after the step; deleted when the next step starts.
        metrics: metrics of the step, on the device.
        control: takes requests for a save, an evaluation or the end of the run.
    """

    step: int
    state: TrainState
    metrics: dict[str, Any]
    control: Control = dataclasses.field(default_factory=Control)

    @property
    def tokens_seen(self) -> int:
        """Tokens of applied updates."""
        return int(self._value("counts").tokens)

    @property
    def loss(self) -> float:
        """Loss of the update; NaN if no label counts."""
        return float(self._value("loss"))

    @property
    def losses(self) -> dict[str, float]:
        """Terms of the loss by name; empty for a loss without terms."""
        terms = self._value("losses") if "losses" in self.metrics else {}
        return {name: float(term) for name, term in terms.items()}

    @property
    def grad_norm(self) -> float:
        """Global gradient norm before clipping."""
        return float(self._value("grad_norm"))

    @property
    def lr(self) -> float:
        """Learning rate of the next update."""
        return float(self._value("lr"))

    def _value(self, name: str) -> Any:  # noqa: ANN401
        value = self.metrics[name]
        return value if self.state.groups is None else read_groups_here({name: value})[name]

    @property
    def gradients(self) -> PyTree:
        """Gradients before clipping; only available to callbacks that collect "grads"."""
        return self.metrics["grads"]


@dataclasses.dataclass(frozen=True)
class EvalContext:
    """A run at the end of an evaluation.

    Attributes:
        step: steps attempted.
        state: the evaluated state; deleted when the next step starts.
        control: takes requests for a save or the end of the run.
    """

    step: int
    state: TrainState
    control: Control


class Notifier(Protocol):
    """The events of an evaluation, sent to all callbacks of a run."""

    def call(self, event: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        """Call an event of all callbacks in order."""


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
        start_save: starts the save that is due after this step, if it need not wait for the
            evaluation or for the verdict of a callback on the state.
        control: takes requests for a save, an evaluation or the end of the run.
        evaluation: metrics of the evaluation after this step; empty without one.
    """

    progress: Progress
    state: TrainState
    tracker: Tracker
    watchdog: Watchdog
    callbacks: Notifier
    stop_requested: Callable[[], Exit | None]
    start_save: Callable[[], None]
    control: Control = dataclasses.field(default_factory=Control)
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

    Every process calls the events, at the same steps. `order.ORDER` lists the order of a step. If
    an event raises SystemExit, the run ends after a save, with the code of the exception.
    """

    every: int | None = None
    """Steps between two calls of `on_interval`; None: never."""

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

    judges_state: bool = True
    """True if `on_interval` may return `Exit.UNHEALTHY`: a save then waits for its result."""

    def is_due(self, step: int) -> bool:
        """Return whether `on_interval` is due after `step`."""
        return self.every is not None and self.every > 0 and step % self.every == 0

    def on_train_begin(self, config: JobConfig) -> None:
        """Handle the start of training, before anything is compiled."""

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Handle the end of compilation, before the first step of this process."""

    def on_checkpoint_load(self, step: int, path: Path) -> None:
        """Handle the restore of a checkpoint: at the start of a run, or by a rollback.

        Called after `on_train_begin` and `load_state_dict`.

        Args:
            step: step at which the run continues.
            path: the checkpoint, or `checkpoint.load_path`.
        """

    def on_epoch_begin(self, epoch: int) -> None:
        """Handle the start of an epoch of the data, before `on_step_begin` of its first step.

        The first epoch is 1. Also called for the first step after a resume within the epoch.
        Streams, mixtures and random tokens have no epochs.
        """

    def on_epoch_end(self, epoch: int, context: StepContext) -> None:
        """Handle the end of an epoch, after `on_step_end` of the step with its last sequence.

        Args:
            epoch: the epoch that ends; the first one is 1.
            context: the step.
        """

    def on_step_begin(self, step: int) -> None:
        """Handle the start of a step, before its batch is awaited; the first step is 1."""

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

    def on_eval_step(self, name: str, batch: int, step: int) -> None:
        """Handle the launch of a batch of an evaluation.

        Args:
            name: name of the evaluation set; "" for a single set.
            batch: number of the batch within the set, from 0.
            step: steps attempted.
        """

    def on_eval_end(self, metrics: dict[str, float], step: int, context: EvalContext) -> None:
        """Handle the end of an evaluation, after its metrics are logged.

        A method without the last argument is called without it.
        """

    def on_checkpoint_save(self, step: int, path: Path) -> None:
        """Handle the start of a save; the checkpoint may not be durable yet."""

    def on_checkpoint_durable(self, step: int, path: Path) -> None:
        """Handle the end of a save: the checkpoint is complete at its path.

        Called between two steps, and at the end of a run that does not fail. Among several
        processes, the steps may differ, so do not use collectives here.
        """

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in each checkpoint: numbers, text, arrays, lists and dicts.

        Among several processes, the state of process 0 is stored.
        """
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned, at a resume or a rollback.

        Called after `on_train_begin`. Arrays are NumPy arrays.
        """

    def on_train_end(self, step: int, tokens_seen: int, reason: Exit | None) -> None:
        """Handle the end of training, after the last save.

        This is also called when the run fails; `reason` is None then. Join your own threads here:
        `jaxforge train` waits only half a minute for other threads.
        """

    def close(self) -> None:
        """Release resources. Called last, also if `on_train_end` fails."""


def named_callback(path: str) -> Callback:
    """Return a new instance of a class that `plugins.callbacks` names.

    Raises:
        UserError: the class is not a subclass of `Callback`.
    """
    module, _, name = path.rpartition(".")
    callback = getattr(importlib.import_module(module), name)
    if not (isinstance(callback, type) and issubclass(callback, Callback)):
        raise UserError(f"plugins.callbacks: {path} is not a subclass of jaxforge.Callback")
    return callback()


def named_callbacks(config: JobConfig) -> list[Callback]:
    """Return the callbacks that `plugins.callbacks` names.

    Raises:
        UserError: a name is not a class of callbacks.
    """
    return [named_callback(path) for path in config.plugins.callbacks]


@dataclasses.dataclass(frozen=True)
class RunParts:
    """The parts of a run that callbacks are built from.

    Attributes:
        program: the program of the run.
        eval_data: evaluation sets by name.
        progress: the counters of the run.
        lock: lock of the run directory.
        frozen: adds fields of the reference or teacher to batches, if the objective has one.
        directions: config key of a metric -> whether higher values are better. `Evaluation` adds
            the metrics of the config that it computes.
    """

    program: Program
    eval_data: Mapping[str, Dataset]
    progress: Progress
    lock: RunLock
    frozen: FrozenFields | None = None
    directions: dict[str, bool] = dataclasses.field(default_factory=dict)

    @property
    def config(self) -> JobConfig:
        """The resolved config."""
        return self.program.config

    @property
    def mesh(self) -> Mesh:
        """The mesh of the run."""
        return self.program.mesh

    @property
    def model(self) -> Model:
        """The model."""
        return self.program.model

    @functools.cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer of the run, read once; None if its data have none."""
        return run_directory.tokenizer_for(mirror.files(self.config.checkpoint.dir), self.config)


class RunCallback(Callback, abc.ABC):
    """Base class of the callbacks in `order.ORDER`."""

    judges_state = False

    @classmethod
    @abc.abstractmethod
    def of_run(cls, run: RunParts) -> Self | None:
        """Return the callback of a run, or None if its config does not ask for it.

        Raises:
            UserError: the callback lacks something it needs, such as a tokenizer.
        """
