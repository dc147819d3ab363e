"""Saves of a run: permanent checkpoints, and non-persistent ones."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from jaxforge.checkpoint.local import open_local
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.storage.mirror import Mirror

log = logging.getLogger(__name__)

_LASTING, _LOCAL = "checkpoint", "local_checkpoint"  # in metrics


def open_checkpoints(config: JobConfig, model: Model) -> Checkpoints:
    """Open the checkpoints in `checkpoint.dir`, which may be empty."""
    resolved, run = config.model_dump(mode="json"), run_directory.root(config)
    return Checkpoints(run, config.checkpoint, model.axes, resolved, stack=model.stack)


class Saver:
    """Saves a run.

    Args:
        config: the `[checkpoint]` section.
        policy: after which steps a lasting checkpoint is due.
        lasting: where they are.
        local: where those are that need not last; None if there are none.
        mirror: copies the run's other files to the bucket that it is in; None where it is in none.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        policy: SavePolicy,
        lasting: Checkpoints,
        local: Checkpoints | None = None,
        mirror: Mirror | None = None,
    ) -> None:
        self._config, self._policy, self._mirror = config, policy, mirror
        self.lasting, self.local = lasting, local
        self._checkpoints = {_LASTING: lasting, **({_LOCAL: local} if local else {})}

    @classmethod
    def of_run(cls, config: JobConfig, model: Model, mirror: Mirror | None) -> "Saver":
        """Open the checkpoints of a run.

        Args:
            config: the resolved config.
            model: the model.
            mirror: copies the other files of the run to its bucket; None for a run on disk.

        Raises:
            UserError: `checkpoint.non_persistent_dir` cannot be used.
        """
        section, resolved = config.checkpoint, config.model_dump(mode="json")
        lasting = open_checkpoints(config, model)
        local = open_local(section, model.axes, resolved, model.stack)
        return cls(section, SavePolicy(config), lasting, local, mirror)

    def is_empty(self) -> bool:
        """Return whether there is no checkpoint yet."""
        return all(checkpoints.latest() is None for checkpoints in self._checkpoints.values())

    def latest(self) -> int | None:
        """The step of the newest lasting checkpoint."""
        return self.lasting.latest()

    def is_due(self, step: int, *, new_best: bool = False) -> bool:
        """Return whether a permanent checkpoint is due, by schedule or as a new best."""
        return self._policy(step) or (new_best and self._config.keep_best_n > 0)

    def is_local_due(self, step: int) -> bool:
        """Return whether a non-persistent checkpoint is due."""
        return _LOCAL in self._checkpoints and step % self._config.non_persistent_interval == 0

    def save(
        self,
        progress: Progress,
        state: TrainState,
        evaluation: dict[str, float] | None = None,
        *,
        lasting: bool = True,
    ) -> tuple[Path | None, dict[str, float]]:
        """Begins a checkpoint.

        Args:
            progress: where the run stands.
            state: its state there.
            evaluation: metrics of it, by which the best are kept.
            lasting: whether it is one of those that last.

        Returns:
            Its path, None if it is there already, and metrics of the call.
        """
        name = _LASTING if lasting else _LOCAL
        start = time.perf_counter()
        if self._mirror:
            self._mirror.publish()  # a checkpoint has its history next to it, whatever comes then
        path = self._checkpoints[name].save(progress, state, evaluation)
        seconds = time.perf_counter() - start
        if path is None:
            return None, {}
        log.info("saving step %d to %s; training waited %.2f s", progress.step, path, seconds)
        return path, {f"{name}/blocking_sec": seconds}

    def amend(self, progress: Progress) -> None:
        """Writes progress anew to the checkpoint of its step."""
        self.lasting.amend(progress)

    def check(self) -> None:
        """Raises what went wrong in the background."""
        for checkpoints in self._checkpoints.values():
            checkpoints.check()

    def newly_durable(self) -> Iterator[dict[str, float]]:
        """Metrics of each save that has become durable since the last call."""
        for name, checkpoints in self._checkpoints.items():
            for step, seconds in checkpoints.newly_durable().items():
                log.info("step %d is saved, in %.2f s", step, seconds)
                yield {f"{name}/save_sec": seconds}

    def wait(self) -> None:
        """Returns when every lasting checkpoint is durable."""
        self.lasting.wait()

    def close(self, *, together: bool = True) -> None:
        """Waits for all, and ends.

        Args:
            together: as of `Checkpoints.close`.
        """
        with contextlib.ExitStack() as stack:  # each is closed, whatever the others do
            for checkpoints in self._checkpoints.values():
                stack.callback(checkpoints.close, together=together)

    def close_mirror(self) -> None:
        """Copies what is left to the bucket: the last thing that a run does."""
        if self._mirror:
            self._mirror.close()
