"""Saves of a run: permanent checkpoints, non-persistent ones, and replicas in memory."""

import contextlib
import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax

from jaxforge.checkpoint.local import open_local
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.checkpoint.restore import Source, starting_state
from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.parallel import agreement
from jaxforge.program import Program
from jaxforge.runs import run_directory, starts
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.storage import mirror as mirrors
from jaxforge.storage import urls
from jaxforge.storage.mirror import Mirror
from jaxforge.telemetry.tracker import Tracker

log = logging.getLogger(__name__)

_PERMANENT, _LOCAL, _REPLICA = "checkpoint", "local_checkpoint", "replica"  # in metrics


def open_checkpoints(config: JobConfig, model: Model) -> Checkpoints:
    """Open the checkpoints in `checkpoint.dir`, which may be empty."""
    resolved, run = config.model_dump(mode="json"), run_directory.root(config)
    return Checkpoints(run, config.checkpoint, model.axes, resolved, stack=model.stack)


@dataclasses.dataclass
class Position:
    """The state on the devices and the counters of the host.

    Attributes:
        state: parameters, optimizer state and counters; replaced by every step.
        progress: the counters of the host. Those of bad steps are behind the device until
            `follow_device`.
        max_steps: steps of the whole run.
    """

    state: TrainState
    progress: Progress
    max_steps: int

    @property
    def step(self) -> int:
        """Steps attempted."""
        return self.progress.step

    @property
    def is_last(self) -> bool:
        """True after the last step of the run."""
        return self.progress.step >= self.max_steps

    def follow_device(self, tracker: Tracker) -> None:
        """Synchronize the counters from the device state, after the metrics of all its steps."""
        tracker.flush()
        state = self.state
        counters = tracker.read({"guard": state.guard, "counts": state.counts})
        self.progress.sync_from_device(int(state.step), counters["guard"], counters["counts"])


@dataclasses.dataclass(frozen=True)
class DurableSave:
    """A save that became durable.

    Attributes:
        step: the saved step.
        path: the checkpoint.
        is_permanent: False for a non-persistent checkpoint.
        metrics: metrics of the save.
    """

    step: int
    path: Path
    is_permanent: bool
    metrics: dict[str, float]


class Saver:
    """Saves the checkpoints of a run.

    Args:
        policy: decides after which steps a permanent checkpoint is due.
        permanent: the checkpoints in the run directory.
        local: checkpoints in `checkpoint.non_persistent_dir`; None without them.
        replicas: copies of the state in memory; None without them.

    Attributes:
        loaded: the checkpoint from which this start continues; None for a new run.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        policy: SavePolicy,
        permanent: Checkpoints,
        local: Checkpoints | None = None,
        mirror: Mirror | None = None,
        replicas: Replicas | None = None,
    ) -> None:
        self._config, self._policy, self._mirror = config, policy, mirror
        self.permanent, self.local, self.replicas = permanent, local, replicas
        self.loaded: Path | None = None
        self._stored: Progress | None = None
        self._amendment: Progress | None = None
        self._checkpoints = {_PERMANENT: permanent, **({_LOCAL: local} if local else {})}

    @classmethod
    def of_run(cls, config: JobConfig, model: Model, mirror: Mirror | None) -> "Saver":
        """Open the checkpoints of a run.

        Raises:
            UserError: `checkpoint.non_persistent_dir` or `checkpoint.replica_dir` cannot be used.
        """
        section, resolved = config.checkpoint, config.model_dump(mode="json")
        permanent = open_checkpoints(config, model)
        local = open_local(section, model.axes, resolved, model.stack)
        replicas = None
        if section.replica_interval:
            run, origin = run_directory.root(config), _origin(config)
            replicas = Replicas(section, run, origin, resolved, model.stack)
        saver = cls(section, SavePolicy(config), permanent, local, mirror, replicas)
        # Local checkpoints and replicas may be newer than the permanent one.
        saver.loaded = saver.newest()
        if saver.loaded is None and section.start_path:
            saver.loaded = urls.path(section.start_path, "checkpoint.load_path")
        return saver

    def start(
        self, program: Program, open_foreign: Callable[[str, JobConfig], Source]
    ) -> tuple[TrainState, Progress]:
        """Return the state and progress from which this start continues."""
        sources = self.replicas.sources if self.replicas else ()
        state, progress = starting_state(program, self.permanent, open_foreign, self.local, sources)
        if not sources or not self.replicas:
            return state, progress
        restored = self.replicas.note_start(progress.step)
        self.loaded = restored.path if restored else self.newest() or self.loaded
        for checkpoints in self._checkpoints.values():
            # The state is already stored there: a save of the same step has nothing to do.
            if checkpoints.latest() == progress.step:
                checkpoints.saved_step = progress.step
        return state, progress

    def is_empty(self) -> bool:
        """Return whether there is no checkpoint yet."""
        return self.newest() is None

    def latest(self) -> int | None:
        """Return the step of the newest permanent checkpoint; None without one."""
        return self.permanent.latest()

    def latest_path(self) -> Path | None:
        """Return the newest permanent checkpoint; None without one."""
        step = self.latest()
        return None if step is None else self.permanent.path(step)

    def set_direction(self, is_higher_better: bool | None) -> None:
        """Set whether higher values of `checkpoint.best_metric` are better; None: by its name."""
        if is_higher_better is not None:
            self.permanent.is_higher_better = is_higher_better

    def note_best(self, progress: Progress, evaluation: Mapping[str, float]) -> bool:
        """Record the metric that ranks checkpoints; return whether it is the best so far."""
        metric = self._config.best_metric
        if metric not in evaluation:
            return False
        return progress.note_metric(
            metric, evaluation[metric], is_higher_better=self.permanent.is_higher_better
        )

    def is_due(self, step: int, ended_epochs: range = range(0), *, new_best: bool = False) -> bool:
        """Return whether a permanent checkpoint is due, by schedule or as a new best."""
        every = self._config.epoch_interval
        ends_interval = every > 0 and any(epoch % every == 0 for epoch in ended_epochs)
        return self._policy(step) or ends_interval or (new_best and self._config.keep_best_n > 0)

    def is_local_due(self, step: int) -> bool:
        """Return whether a non-persistent checkpoint is due."""
        return _LOCAL in self._checkpoints and step % self._config.non_persistent_interval == 0

    def is_replica_due(self, step: int) -> bool:
        """Return whether a replica in memory is due."""
        return self.replicas is not None and step % self._config.replica_interval == 0

    def replicate(self, progress: Progress, state: TrainState) -> dict[str, float]:
        """Start to copy the state to the memory of this host and of its peer.

        Returns:
            The metrics of the call.
        """
        assert self.replicas is not None
        start = time.perf_counter()
        self.replicas.save(progress, state)
        return {f"{_REPLICA}/blocking_sec": time.perf_counter() - start}

    def save(
        self,
        progress: Progress,
        state: TrainState,
        evaluation: dict[str, float] | None = None,
        *,
        permanent: bool = True,
    ) -> tuple[Path | None, dict[str, float]]:
        """Start to save a checkpoint.

        Returns:
            The path, or None if the checkpoint exists already; and the metrics of the call.
        """
        name = _PERMANENT if permanent else _LOCAL
        # The amendment belongs to the previous checkpoint, and must not overtake this save.
        if permanent and progress.step != self.permanent.saved_step:
            self.write_amendment()
        start = time.perf_counter()
        if self._mirror:
            self._mirror.publish()  # metrics in the bucket are never older than the checkpoint
        path = self._checkpoints[name].save(progress, state, evaluation)
        seconds = time.perf_counter() - start
        if path is None:
            return None, {}
        # A copy, because the loop continues to count in the original.
        if permanent:
            self._stored = copy.deepcopy(progress)
        log.info(
            "saving step %d to %s; training was blocked for %.2f s", progress.step, path, seconds
        )
        return path, {f"{name}/blocking_sec": seconds}

    def note_evaluation(self, progress: Progress) -> None:
        """Remember to rewrite the progress in the checkpoint of its step, if it has changed.

        The checkpoint may have been saved before the evaluation of its step ended.
        """
        if progress.step == self.permanent.saved_step and progress != self._stored:
            self._amendment = copy.deepcopy(progress)

    def write_amendment(self) -> None:
        """Rewrite the progress of the last checkpoint if an evaluation has changed it."""
        if self._amendment is not None:
            self._stored, self._amendment = self._amendment, None
            self.permanent.amend(self._stored)

    def check(self) -> None:
        """Raise the failure of a save in the background, if there is one."""
        for checkpoints in self._checkpoints.values():
            checkpoints.check()
        if self.replicas:
            self.replicas.check()

    def newest(self) -> Path | None:
        """Return the newest checkpoint, permanent or not, or replica; None without one."""
        sources = self.replicas.sources if self.replicas else []
        # Of equal steps the first is taken: memory is read faster than a disk.
        newest = [(replica.step, replica.path) for replica in sources]
        newest += [
            (step, checkpoints.path(step))
            for checkpoints in self._checkpoints.values()
            if (step := checkpoints.latest()) is not None
        ]
        return max(newest, key=lambda saved: saved[0], default=(0, None))[1]

    def newly_durable(self) -> Iterator[DurableSave]:
        """Yield each save that became durable since the last call."""
        for name, checkpoints in self._checkpoints.items():
            for step, seconds in checkpoints.newly_durable().items():
                log.info("saved step %d in %.2f s", step, seconds)
                metrics = {f"{name}/save_sec": seconds}
                path = checkpoints.path(step)
                yield DurableSave(step, path, checkpoints is self.permanent, metrics)

    def new_replicas(self) -> Iterator[dict[str, float]]:
        """Yield the metrics of each replica that became complete since the last call."""
        if self.replicas:
            for seconds, size in self.replicas.newly_complete().values():
                yield {f"{_REPLICA}/save_sec": seconds, f"{_REPLICA}/bytes": float(size)}

    def wait(self) -> None:
        """Wait until every permanent checkpoint is durable and up to date."""
        self.permanent.wait()
        self.write_amendment()

    def close(self, *, together: bool = True) -> None:
        """Wait for all saves and close the checkpoints."""
        with contextlib.ExitStack() as stack:  # each is closed, even if another fails
            if self.replicas:  # the last to be closed, when the newest checkpoint is durable
                stack.callback(self._close_replicas, self.replicas, together=together)
            for checkpoints in self._checkpoints.values():
                stack.callback(checkpoints.close, together=together)

    def _close_replicas(self, replicas: Replicas, *, together: bool) -> None:
        replicas.close(together=together, durable_step=self.latest())

    def close_mirror(self) -> None:
        """Copy the remaining files to the bucket; the last action of a run."""
        if self._mirror:
            self._mirror.close()


def _origin(config: JobConfig) -> str | None:
    """Return the origin of the replicas that the run directory records; None if it has none.

    A directory that was removed and begins a new run records another origin, so that the new run
    never starts from replicas of the old one. Only process 0 has the files of a run in a bucket.

    Raises:
        UserError: the records are damaged. Every process raises.
    """
    origin, failure = None, None
    try:
        if jax.process_index() == 0:
            records = starts.read(mirrors.files(config.checkpoint.dir))
            origin = next((r["replicas"] for r in reversed(records) if "replicas" in r), None)
    except UserError as error:
        failure = error
    agreement.raise_on_all(failure)
    return origin
