"""Checkpoints of a run: `<run>/checkpoints/step_<n>/{state,checksums,progress,config,metrics}`.

A save, in the order in which it happens:

    save       wait for the previous save        memory may not hold copies of two states
               bring the state into stored form  layers in order, without what is not stored
               copy arrays in host memory        the next step overwrites them
               start the hashes                  accelerators: before the arrays may be donated
    _write     Orbax copies to host memory       returns when the state may be overwritten
    _finish    Orbax writes in the background    each process its part of `state`, then `checksums`
               Orbax commits                     once all processes have written: rename to step_<n>
               Orbax removes old steps           only now: a failed save never costs an old one

Invariants:

- The directory of a step gets its name only when all its items are durable (Orbax writes to a
  temporary name and renames), so the newest name is always a complete checkpoint. In a bucket,
  where renaming is impossible, a checkpoint is complete once it contains `commit_success.txt`.
- A failed save is raised by the next `check`, `wait`, `close` or `save`. `wait` and `save` raise it
  in all processes of a job at the same point of the loop.
- Nothing in a complete checkpoint changes, except for `progress` (`amend`), which is replaced
  atomically and carries its own checksum.
"""

import contextlib
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jaxtyping import PyTree

from jaxforge.checkpoint import failures, layout
from jaxforge.checkpoint.checksums import Checksums, ChecksumsSave, begin, check, is_on_this_host
from jaxforge.checkpoint.failures import naming_damage, naming_failed_save, summary, unwritten
from jaxforge.checkpoint.orbax_manager import OrbaxManager, handlers, manager_options, restore_args
from jaxforge.checkpoint.paths import (
    EMA,
    PREFIX,
    SUBDIRECTORY,
    check_no_torch_checkpoints,
    check_path,
    is_durable,
    no_average,
)
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.checkpoint.weights import Weights
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.eval import higher_is_better
from jaxforge.errors import JobStorageError, PeerLostError, UserError
from jaxforge.optim.trees import join, split
from jaxforge.parallel.multihost import peer_lost_error
from jaxforge.parallel.stages import Stack
from jaxforge.state.progress import (
    Progress,
    seal_progress,
    stored_config_crc32,
    unseal_progress,
)
from jaxforge.state.train_state import TrainState, with_counts
from jaxforge.storage import atomic_directory, urls
from jaxforge.storage.seals import add_seal, crc32

log = logging.getLogger(__name__)

_BEGIN_LOCK = threading.Lock()
"""Orbax numbers the saves of a process: a save that begins during the beginning of another one
would receive its signals."""

_ALONE_SEC = 60.0  # time for a save to end in a process that exits on its own

_PARAMS = "params"


class Checkpoints:
    """Checkpoints of a run directory: saving, listing and restoring.

    Args:
        run: run directory.
        config: the `[checkpoint]` section.
        axes: logical axes of the parameters, which determine the storage chunks.
        resolved_config: config stored in each checkpoint.
        stack: order of layers in saved states; by default that of checkpoints.
        read_only: do not create, change or delete files.
        arrays: handler that reads and writes the state; by default that of Orbax.
        begin_checksums: function that starts to hash the arrays of a state (`checksums.begin`).

    Attributes:
        saved_step: step of the last save or restore; None before the first one.
        is_higher_better: direction of `checkpoint.best_metric`. Until it is set, it is that of the
            metric's name, and lower if the name does not determine it.
    """

    def __init__(
        self,
        run: Path,
        config: CheckpointConfig,
        axes: PyTree = None,
        resolved_config: dict[str, Any] | None = None,
        *,
        stack: Stack | None = None,
        read_only: bool = False,
        arrays: ocp.PyTreeCheckpointHandler | None = None,
        begin_checksums: Callable[[PyTree], Callable[[], Checksums]] = begin,
    ) -> None:
        self.directory = run.absolute() / SUBDIRECTORY
        self._config, self._axes, self._resolved = config, axes, resolved_config
        self._stack, self._begin_checksums = stack, begin_checksums
        self.saved_step: int | None = None
        self.is_higher_better = bool(higher_is_better(config.best_metric, config.best_mode))
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._took: dict[int, float] = {}
        self._closing = contextlib.ExitStack()
        check_no_torch_checkpoints(self.directory)
        if not read_only:
            check_path(self.directory)
        if not read_only and jax.process_count() > 1:
            self._join_processes()
        self._manager = OrbaxManager(
            self.directory,
            handler_registry=handlers(arrays),
            options=manager_options(self.directory, config, self._rank, read_only=read_only),
        )

    def _join_processes(self) -> None:
        """Create the directory for all processes, and listen to Orbax's errors of this one."""
        if jax.process_index() == 0:
            with naming_failed_save(self.directory):
                self.directory.mkdir(parents=True, exist_ok=True)
        multihost_utils.sync_global_devices(f"directory {self.directory}")
        listening = failures.watch_failures(self.directory, self._note_failure)
        self._closing.enter_context(listening)

    def _rank(self, metrics: Mapping[str, float]) -> float:
        """Return the rank of a checkpoint by its metrics: the lowest is the best.

        A checkpoint without the metric (not finite, or of another `best_metric`) is never the best.
        """
        value = metrics.get(self._config.best_metric, math.inf)
        return -value if self.is_higher_better and math.isfinite(value) else value

    def save(
        self, progress: Progress, state: TrainState, evaluation: Mapping[str, float] | None = None
    ) -> Path | None:
        """Start to save a step; with `async_mode`, it is written in the background.

        Args:
            progress: progress of the run, including the step.
            state: state of the step. It may be donated as soon as this returns.
            evaluation: metrics of this state, by which `keep_best_n` ranks.

        Returns:
            Path at which the checkpoint will appear; None if the step is already saved.

        Raises:
            RuntimeError: Orbax declined the save.
            StorageError: this save or the previous one could not be written. Errors of either type
                in the background are raised by the next `check`, `wait`, `close` or `save`.
        """
        step = progress.step
        if step == self.saved_step:
            return None
        # The order is that of the table above. What may block on other processes is in a thread.
        self.wait()  # memory may not suffice for copies of two states
        tree, is_copied = self._stored_tree(state)
        metrics = {k: float(v) for k, v in (evaluation or {}).items() if math.isfinite(v)}
        sealed_metrics = add_seal(metrics) if metrics else None
        # The hashes begin here, before the caller may donate the arrays.
        write = functools.partial(self._write, step, self._args(tree, progress), sealed_metrics)
        began, written = time.monotonic(), threading.Event()
        background: list[Callable[[], object]] = []
        if is_copied:  # Orbax would slow down the copies, and the step after them
            background = [functools.partial(jax.block_until_ready, tree), write]
        elif jax.process_count() > 1:  # only a thread may block on processes that have failed
            background = [write, written.set]
        else:
            with naming_failed_save(self.directory):
                write()
        # Set before the save is durable: the loop asks only whether this step was begun.
        self.saved_step = step
        self._thread = threading.Thread(
            target=self._finish, args=(step, began, *background), daemon=True
        )
        self._thread.start()
        if jax.process_count() > 1:
            # The state must not be overwritten before every process has copied its part.
            self._await_all(written.is_set)
        return self.path(step)

    def _stored_tree(self, state: TrainState) -> tuple[layout.Tree, bool]:
        """Return the tree to write, and whether it is a copy of the state's arrays.

        The next step may overwrite the arrays of CPU devices, so these are copied. Arrays of
        accelerators are copied to host memory within Orbax's `save`.
        """
        state = layout.stored_state(state)
        tree = layout.to_tree(by_layer(state, self._stack) if self._stack else state)
        if self._config.async_mode == "disabled" or not is_on_this_host(tree):
            return tree, False
        return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), tree), True

    def check(self) -> None:
        """Raise the error of a save in the background, if any; never block.

        Raises:
            StorageError: a save could not be written.
        """
        with naming_failed_save(self.directory):
            if self._failure:
                raise self._failure

    def newly_durable(self) -> dict[int, float]:
        """Return step -> seconds of the saves that have ended since the last call."""
        if self._thread and self._thread.is_alive():
            return {}
        took, self._took = self._took, {}
        # A save may have failed, or its checkpoint may have been deleted.
        return {step: seconds for step, seconds in took.items() if is_durable(self.path(step))}

    def latest(self) -> int | None:
        """Return the newest durable step, or None."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """Return the durable steps in order."""
        return sorted(self._manager.all_steps())

    def discard_after(self, step: int) -> None:
        """Delete all later checkpoints, so that their steps can be saved again."""
        self.wait()
        for later in self.steps():
            if later > step:
                self._manager.delete(later)
        self.saved_step = step

    def amend(self, progress: Progress) -> None:
        """Replace the progress of a durable step; its arrays stay unchanged.

        This records events after the save, such as the end of an evaluation that was resumed.
        """
        self.wait()
        path = self.path(progress.step) / "progress" / "metadata"
        if jax.process_index() == 0 and path.exists():  # the checkpoint may have been deleted
            with naming_failed_save(self.directory):
                config_crc32 = stored_config_crc32(json.loads(path.read_bytes()))
                atomic_directory.write_json(path, seal_progress(progress, config_crc32))

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, Progress]:
        """Restore state and progress of a step.

        Args:
            like: requested shapes, dtypes and shardings (`abstract_state`), with layers in order.
                The mesh may differ from that of the save.
            step: a durable step.
        """
        with self._naming_damage(step):
            tree, saved = self._fitting_trees(like, step)
            layout.log_average_changes(like, saved, self.path(step))
            # The state of the outer optimizer is left out if the run has none.
            partial = layout.has_extra_leaves(tree, saved) or not tree["optimizer"]
            tree = {name: part for name, part in tree.items() if part != {}}
            restored = self._read(
                step,
                progress=ocp.args.JsonRestore(),
                state=restore_args(tree, partial=partial),
            )
            self._check_bits(restored.state, saved, step)
            progress = unseal_progress(restored.progress, step)
        self.saved_step = step
        return with_counts(layout.from_tree(restored.state, like), progress), progress

    def check_restorable(self, like: TrainState, step: int) -> Progress:
        """Check whether `restore` would accept a step, without reading arrays.

        Args:
            like: requested shapes and dtypes, with layers in order.
            step: a durable step.

        Returns:
            The host's counters at the step.

        Raises:
            UserError: the step is damaged, or of another model or optimizer.
        """
        if self.has_optimizer(step):  # otherwise a run starts with the weights only
            with self._naming_damage(step):
                self._fitting_trees(like, step)
        return self.progress(step)

    def progress(self, step: int) -> Progress:
        """Return the host's counters at a step."""
        with self._naming_damage(step):
            return unseal_progress(self._read(step, progress=ocp.args.JsonRestore()).progress, step)

    def has_optimizer(self, step: int) -> bool:
        """Return whether a step holds more than weights."""
        with self._naming_damage(step):
            return bool(self._saved_tree(step)["optimizer"])

    def groups(self, step: int) -> int:
        """Return the number of groups whose states a step holds; 0 if devices trained together."""
        with self._naming_damage(step):
            return layout.saved_groups(self._saved_tree(step))

    def restore_model(self, like: PyTree, step: int, weights: Weights = "raw") -> PyTree:
        """Restore only the model's part of the state of a step (`layout.model_tree`).

        Args:
            like: requested shapes, dtypes and shardings.
            step: a durable step.
            weights: "ema" restores the average of the parameters in their place.

        Raises:
            UserError: the step is damaged, of another model, or has no average.
        """
        with self._naming_damage(step):
            saved = self._saved_tree(step)
            like = {name: part for name, part in like.items() if name in saved}
            like = layout.drop_unsaved(like, saved)
            part = {name: saved[name] for name in like}
            layout.check_model(like, part, self.path(step))
            if weights == "ema":
                if EMA not in saved:
                    raise UserError(no_average(self.path(step)))
                # Parameters that are not trained have no average: they are those of the model.
                averaged, frozen = split(like.pop(_PARAMS), flatten_dict(saved[EMA]).keys())
                like |= {EMA: averaged} | ({_PARAMS: frozen} if frozen else {})
            state = self._read(step, state=restore_args(like, partial=True)).state
            self._check_bits(state, saved, step)
        params = join(state.pop(_PARAMS, {}), state.pop(EMA, {}))
        return {**state, _PARAMS: params}

    def path(self, step: int) -> Path:
        """Return the directory of a step."""
        return self.directory / f"{PREFIX}_{step}"

    def wait(self) -> None:
        """Wait until all saves are durable.

        Raises:
            StorageError: a save could not be written.
        """
        thread = self._thread
        if thread and jax.process_count() > 1:
            self._await_all(lambda: not thread.is_alive())
            self._thread = None  # so that the processes are not synchronized again
        elif thread:
            thread.join()
        self.check()

    def close(self, *, together: bool = True) -> None:
        """Wait for saves, then release Orbax's threads.

        Args:
            together: whether all processes of the job call this. Otherwise a save that waits for
                other processes is abandoned after `_ALONE_SEC`.
        """
        with naming_failed_save(self.directory), self._closing:
            try:
                if not self._failure and (together or jax.process_count() == 1):
                    self.wait()
                self.check()
            finally:
                if self._thread:
                    self._thread.join(self._patience_sec)
                if not (self._thread and self._thread.is_alive()):
                    self._manager.close()

    def _note_failure(self, error: Exception) -> None:
        self._failure = self._failure or error

    @property
    def _patience_sec(self) -> float:
        """Seconds to wait for a save in the background while the process exits."""
        if isinstance(self._failure, PeerLostError):
            return 0.0  # Orbax waits for the lost process
        return 1.0 if self._failure else _ALONE_SEC

    def _await_all(self, is_ready: Callable[[], bool]) -> None:
        """Return once all processes are ready; raise in all of them if one has failed."""
        try:
            failures.await_all(is_ready, lambda: summary(self._failure) if self._failure else "")
        except JobStorageError as error:
            self._failure = JobStorageError(unwritten(self.directory, str(error)))
            raise self._failure from None
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if lost := peer_lost_error(error):
                self._failure = lost  # so that `close` does not wait for a process that is gone
                raise lost from error
            raise

    def _args(self, tree: PyTree, progress: Progress) -> ocp.args.Composite:
        """Return the items of a step to save."""
        file_bytes = None if urls.in_bucket(self.directory) else layout.file_bytes(tree)
        config = self._resolved or {}
        return ocp.args.Composite(
            checksums=ChecksumsSave(self._begin_checksums(tree)),
            state=ocp.args.PyTreeSave(
                tree,
                save_args=layout.save_args(tree, self._axes),
                ocdbt_target_data_file_size=file_bytes,
            ),
            progress=ocp.args.JsonSave(seal_progress(progress, crc32(config))),
            config=ocp.args.JsonSave(config),
        )

    def _write(self, step: int, args: ocp.args.Composite, metrics: dict[str, float] | None) -> None:
        """Start Orbax's save; return once the state may be overwritten."""
        with _BEGIN_LOCK:
            saved = self._manager.save(step, args=args, metrics=metrics, force=True)
        if not saved:
            raise RuntimeError(f"the checkpoint of step {step} was not saved to {self.directory}")

    def _finish(self, step: int, began: float, *calls: Callable[[], object]) -> None:
        """Run the calls of a save in the background and wait until it is durable."""
        try:
            for call in calls:
                call()
            self._manager.wait_until_finished()
            self._took[step] = time.monotonic() - began
        except Exception as error:  # raised by `check`
            self._note_failure(error)

    def _read(self, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        """Return items of a step."""
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _saved_tree(self, step: int) -> PyTree:
        """Read the shapes and dtypes of a saved state."""
        return self._manager.item_metadata(step).state.tree

    def _fitting_trees(self, like: TrainState, step: int) -> tuple[layout.Tree, PyTree]:
        """Return the tree to restore of a step, and the shapes and dtypes of the saved tree.

        Raises:
            UserError: the step is of another model or optimizer.
        """
        saved = self._saved_tree(step)
        tree = layout.drop_unsaved(layout.to_tree(like), saved)
        layout.check_model(tree, saved, self.path(step))
        layout.check_optimizer(tree, saved, self.path(step))
        return tree, saved

    def _check_bits(self, restored: PyTree, saved_tree: PyTree, step: int) -> None:
        """Compare checksums, if the checkpoint has them; old versions did not write any."""
        if not (self.path(step) / "checksums").exists():
            return
        checksums = self._read(step, checksums=ocp.args.JsonRestore()).checksums
        saved = flatten_dict(saved_tree, sep=".")
        check(restored, checksums, {name: leaf.dtype for name, leaf in saved.items()})

    def _naming_damage(self, step: int) -> contextlib.AbstractContextManager[None]:
        def earlier() -> int | None:
            return max((other for other in self.steps() if other < step), default=None)

        return naming_damage(self.path(step), earlier)
