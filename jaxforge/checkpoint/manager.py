"""Checkpoints of a run: `<run>/checkpoints/step_<n>/{state,checksums,progress,config,metrics}`.

A step's directory appears under its name only when every array in it is durable (Orbax writes to a
temporary name and renames), so the newest name is always a whole checkpoint. In a bucket, where
nothing can be renamed, it is one once `commit_success.txt` is there.
"""

import contextlib
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jax.experimental import multihost_utils
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies

from jaxforge.checkpoint import job_saves, layout, orbax_buckets  # noqa: F401 (teaches Orbax)
from jaxforge.checkpoint.checksums import (
    Checksums,
    ChecksumsHandler,
    ChecksumsSave,
    begin,
    check,
    is_on_this_host,
)
from jaxforge.checkpoint.paths import (
    PREFIX,
    SUBDIRECTORY,
    check_ours,
    check_path,
    is_of_precision,
    is_whole,
)
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.checkpoint.save_policy import milestones
from jaxforge.checkpoint.sealed_progress import (
    check_seal,
    config_crc32_of,
    crc32,
    sealed,
    unsealed,
    with_seal,
)
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import JobStorageError, PeerLostError, StorageError, UserError
from jaxforge.parallel.multihost import peer_lost_error
from jaxforge.parallel.stages import Stack
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts
from jaxforge.storage import safe_files, urls

log = logging.getLogger(__name__)

_BEGINNING = threading.Lock()
"""Orbax numbers the saves of a process: one that begins within another takes its signals."""

_ALONE_SEC = 60.0  # for a save to end in a process that fails on its own

_COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)


class Checkpoints:
    """Saves, finds and restores checkpoints of a run directory.

    Args:
        run: the run directory.
        config: the `[checkpoint]` section.
        axes: logical axes of the parameters; they decide the storage chunks.
        resolved_config: stored next to each checkpoint.
        stack: the order of layers in the states that are saved; by default a checkpoint's own.
        read_only: for a run that is not ours to change.
        arrays: what reads and writes the state; Orbax's own by default.
        begin_checksums: begins to hash the arrays of a state (`checksums.begin`).
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
        self._saved: int | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._took: dict[int, float] = {}
        self._closing = contextlib.ExitStack()
        check_ours(self.directory)
        is_shared = not read_only and jax.process_count() > 1
        if not read_only:
            check_path(self.directory)
        if is_shared:
            if jax.process_index() == 0:
                with self._naming_failure():
                    self.directory.mkdir(parents=True, exist_ok=True)
            multihost_utils.sync_global_devices(f"directory {self.directory}")
            listening = job_saves.noticing_failures(self.directory, self._note_failure)
            self._closing.enter_context(listening)
        self._manager = _Manager(
            self.directory,
            handler_registry=_handlers(arrays),
            options=ocp.CheckpointManagerOptions(
                step_prefix=PREFIX,
                cleanup_tmp_directories=not read_only,
                create=not read_only and not is_shared,
                read_only=read_only,
                save_interval_steps=0 if read_only else 1,
                preservation_policy=_preservation(config),
                # Unused with a policy, but without it Orbax writes no metrics.
                best_fn=(lambda metrics: metrics[config.best_metric])
                if config.keep_best_n
                else None,
                enable_async_checkpointing=config.async_mode != "disabled",
                atomicity_options=_COMMIT_FILE if urls.in_bucket(run) else None,
                multiprocessing_options=(
                    job_saves.multiprocessing_options(self.directory)
                    if is_shared
                    else ocp.options.MultiprocessingOptions()
                ),
            ),
        )

    def save(
        self, progress: Progress, state: TrainState, evaluation: Mapping[str, float] | None = None
    ) -> Path | None:
        """Starts the save of a step; with `async_mode` it is written in the background.

        Args:
            progress: names the step.
            state: its state; may be donated as soon as this returns.
            evaluation: metrics of this very state, by which `keep_best_n` ranks.

        Returns:
            Where the checkpoint will appear; None if this step is saved already.

        Raises:
            RuntimeError: Orbax declined the save. It never passes silently.
            StorageError: this save, or the one before it, could not be written. What goes wrong in
                the background, either of them, is raised by `check`, `wait`, `close` and `save`.
        """
        step = progress.step
        if step == self._saved:
            return None
        self.wait()  # two states set aside would not fit
        tree = layout.to_tree(by_layer(state, self._stack) if self._stack else state)
        is_async = self._config.async_mode != "disabled"
        if is_set_aside := is_async and is_on_this_host(tree):
            tree = jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), tree)
        metrics = {k: float(v) for k, v in (evaluation or {}).items() if math.isfinite(v)}
        sealed_metrics = with_seal(metrics) if metrics else None
        write = functools.partial(self._write, step, self._args(tree, progress), sealed_metrics)
        began, written = time.monotonic(), threading.Event()
        left: list[Callable[[], object]] = []
        if is_set_aside:  # Orbax would slow the copies, and the step after them
            left = [functools.partial(jax.block_until_ready, tree), write]
        elif jax.process_count() > 1:  # a thread may wait for processes that will not come
            left = [write, written.set]
        else:
            with self._naming_failure():
                write()
        self._saved = step
        self._thread = threading.Thread(target=self._finish, args=(step, began, *left), daemon=True)
        self._thread.start()
        if jax.process_count() > 1:
            self._await_all(written.is_set)
        return self.path(step)

    def check(self) -> None:
        """Returns at once.

        Raises:
            StorageError: a save could not be written in the background.
        """
        with self._naming_failure():
            if self._failure:
                raise self._failure

    def newly_durable(self) -> dict[int, float]:
        """Steps whose saves have ended since this was last asked, and seconds from start to end."""
        if self._thread and self._thread.is_alive():
            return {}
        took, self._took = self._took, {}
        # A save may have failed, or be gone already.
        return {step: seconds for step, seconds in took.items() if is_whole(self.path(step))}

    def latest(self) -> int | None:
        """The newest durable step."""
        return self._manager.latest_step()

    def steps(self) -> list[int]:
        """The durable steps, in order."""
        return sorted(self._manager.all_steps())

    def discard_after(self, step: int) -> None:
        """Removes every later checkpoint, so that its place is free for another."""
        self.wait()
        for later in self.steps():
            if later > step:
                self._manager.delete(later)
        self._saved = step

    def amend(self, progress: Progress) -> None:
        """Replaces the progress of a durable step, whose arrays stay as they are.

        For what ends after the save, as an evaluation that was stopped and resumed.
        """
        self.wait()
        path = self.path(progress.step) / "progress" / "metadata"
        if jax.process_index() == 0:
            with self._naming_failure():
                config_crc32 = config_crc32_of(json.loads(path.read_bytes()))
                safe_files.replace_text(path, json.dumps(sealed(progress, config_crc32)))

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, Progress]:
        """State and progress of a step.

        Args:
            like: shapes, dtypes and shardings wanted (`abstract_state`), layers in order; the mesh
                may be another than the one that saved.
            step: a step that `latest` names, or any other that is there.
        """
        with self._naming_damage(step):
            tree, saved = self._fitting_trees(like, step)
            restored = self._read(
                step,
                progress=ocp.args.JsonRestore(),
                state=_restore_args(tree, partial=layout.has_extra_leaves(tree, saved)),
            )
            self._check_bits(restored.state, saved, step)
            progress = unsealed(restored.progress, step)
        self._saved = step
        return with_counts(layout.from_tree(restored.state, like), progress), progress

    def check_restorable(self, like: TrainState, step: int) -> Progress:
        """Compare a step with what is wanted of it, as `restore` does, but read no arrays.

        Args:
            like: shapes and dtypes wanted, layers in order.
            step: a durable step.

        Returns:
            The host's counters at the step.

        Raises:
            UserError: the step is damaged, or of another model or optimizer.
        """
        if self.has_optimizer(step):  # else a run starts with the weights alone
            with self._naming_damage(step):
                self._fitting_trees(like, step)
        return self.progress(step)

    def progress(self, step: int) -> Progress:
        """The host's counters at a step."""
        with self._naming_damage(step):
            return unsealed(self._read(step, progress=ocp.args.JsonRestore()).progress, step)

    def has_optimizer(self, step: int) -> bool:
        """Return whether a step holds more than weights."""
        with self._naming_damage(step):
            return bool(self._saved_tree(step)["optimizer"])

    def restore_model(self, like: PyTree, step: int) -> PyTree:
        """Restore only the model's part of the state of a step (`layout.model_tree`)."""
        with self._naming_damage(step):
            saved = self._saved_tree(step)
            like = {name: part for name, part in like.items() if name in saved}
            like = layout.common(like, saved)
            self._check_fits(like, {name: saved[name] for name in like}, step)
            state = self._read(step, state=_restore_args(like, partial=True)).state
            self._check_bits(state, saved, step)
        return state

    def path(self, step: int) -> Path:
        """The directory of a step."""
        return self.directory / f"{PREFIX}_{step}"

    def wait(self) -> None:
        """Returns when every save that was started is durable.

        Raises:
            StorageError: one could not be written.
        """
        thread = self._thread
        if thread and jax.process_count() > 1:
            self._await_all(lambda: not thread.is_alive())
            self._thread = None  # so that nothing is asked again
        elif thread:
            thread.join()
        self.check()

    def close(self, *, together: bool = True) -> None:
        """Waits, then lets go of Orbax's threads.

        Args:
            together: all processes of the job come here. Otherwise a save that waits for processes
                that may not come is left behind after `_ALONE_SEC`.
        """
        with self._naming_failure(), self._closing:
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
        """Seconds that a save in the background has to end while the process ends."""
        if isinstance(self._failure, PeerLostError):
            return 0.0  # Orbax waits for the lost process
        return 1.0 if self._failure else _ALONE_SEC

    def _await_all(self, is_ready: Callable[[], bool]) -> None:
        """Return once all processes are ready; raise on all of them where one has failed."""
        try:
            job_saves.await_all(is_ready, lambda: _gist(self._failure) if self._failure else "")
        except JobStorageError as error:
            self._failure = JobStorageError(self._unwritten(str(error)))
            raise self._failure from None
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            if lost := peer_lost_error(error):
                self._failure = lost  # so that `close` does not wait for a process that is gone
                raise lost from error
            raise

    def _args(self, tree: PyTree, progress: Progress) -> ocp.args.Composite:
        """Return the items to save of a step."""
        file_bytes = None if urls.in_bucket(self.directory) else layout.file_bytes(tree)
        config = self._resolved or {}
        return ocp.args.Composite(
            checksums=ChecksumsSave(self._begin_checksums(tree)),
            state=ocp.args.PyTreeSave(
                tree,
                save_args=layout.save_args(tree, self._axes),
                ocdbt_target_data_file_size=file_bytes,
            ),
            progress=ocp.args.JsonSave(sealed(progress, crc32(config))),
            config=ocp.args.JsonSave(config),
        )

    def _write(self, step: int, args: ocp.args.Composite, metrics: dict[str, float] | None) -> None:
        """Returns when all that is saved has been read, and is being written."""
        with _BEGINNING:
            saved = self._manager.save(step, args=args, metrics=metrics, force=True)
        if not saved:
            raise RuntimeError(f"the checkpoint of step {step} was not saved to {self.directory}")

    def _finish(self, step: int, began: float, *left: Callable[[], object]) -> None:
        """The part of a save that the loop does not wait for."""
        try:
            for do in left:
                do()
            self._manager.wait_until_finished()
            self._took[step] = time.monotonic() - began
        except Exception as error:  # whatever it is, it is raised by `check`
            self._note_failure(error)

    def _read(self, step: int, **items: ocp.args.CheckpointArgs) -> ocp.args.Composite:
        """Return items of a step."""
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def _saved_tree(self, step: int) -> PyTree:
        """Shapes and dtypes of the state that was saved; read from the disk."""
        return self._manager.item_metadata(step).state.tree

    def _fitting_trees(self, like: TrainState, step: int) -> tuple[layout.Tree, PyTree]:
        """Return what is wanted of a step, and shapes and dtypes of what was saved.

        Raises:
            UserError: the step is of another model or optimizer.
        """
        saved = self._saved_tree(step)
        tree = layout.common(layout.to_tree(like), saved)
        self._check_fits(tree, saved, step)
        self._check_optimizer(tree["optimizer"], saved, step)
        return tree, saved

    def _check_fits(self, wanted: PyTree, saved_tree: PyTree, step: int) -> None:
        """Names the first array that differs, before Orbax fails on it in its own words."""
        saved, shapes = (_shapes(layout.variables(tree)) for tree in (saved_tree, wanted))
        spare = {name for name in saved.keys() - shapes.keys() if is_of_precision(name)}
        for name in sorted((shapes.keys() | saved.keys()) - spare):
            want, have = shapes.get(name, "absent"), saved.get(name, "absent")
            if want != have:
                raise UserError(
                    f"{self.path(step)} does not fit [model]: {name} is {have} in the checkpoint "
                    f"and {want} in the config; change [model] or checkpoint.dir"
                )

    def _check_optimizer(self, wanted: PyTree, saved_tree: PyTree, step: int) -> None:
        saved, asked = (layout.of_any_precision(t) for t in (saved_tree["optimizer"], wanted))
        if _shapes(saved) != _shapes(asked):
            ours, theirs = sorted(asked), sorted(saved)
            raise UserError(
                f"{self.path(step)} has the state of another optimizer than "
                f"{layout.differing_key(ours, theirs)} asks for: it holds {', '.join(theirs)}, "
                f"where {', '.join(ours)} are expected; bring it back, or start a new run from it "
                'with checkpoint.load_path and checkpoint.exclude_from_loading = ["optimizer"]'
            )

    def _check_bits(self, restored: PyTree, saved_tree: PyTree, step: int) -> None:
        """Compares checksums, where the checkpoint has any: those of old versions do not."""
        if not (self.path(step) / "checksums").exists():
            return
        checksums = self._read(step, checksums=ocp.args.JsonRestore()).checksums
        saved = flatten_dict(saved_tree, sep=".")
        check(restored, checksums, {name: leaf.dtype for name, leaf in saved.items()})

    @contextlib.contextmanager
    def _naming_failure(self) -> Iterator[None]:
        """Rewrite Orbax's errors about failed writes, of any thread, as plain messages."""
        try:
            yield
        except JobStorageError:
            raise
        except (OSError, ValueError) as error:
            raise peer_lost_error(error) or StorageError(self._unwritten(_gist(error))) from error

    def _unwritten(self, why: str) -> str:
        return (
            f"a checkpoint could not be written to {self.directory} ({why}); those that are there "
            "are whole: put that right, then run the same command to resume"
        )

    @contextlib.contextmanager
    def _naming_damage(self, step: int) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except Exception as error:  # Orbax raises any: plain `Exception` for an unreadable array
            if lost := peer_lost_error(error):
                raise lost from error
            earlier = max(
                (step_before for step_before in self.steps() if step_before < step), default=None
            )
            before = f"remove it to go on from step {earlier}, or " if earlier is not None else ""
            raise UserError(
                f"{self.path(step)} is damaged ({_gist(error.__cause__ or error)}); {before}bring "
                "it back from a copy"
            ) from error


class _Manager(ocp.CheckpointManager):
    """JAX's preemption service is for `training.preemption` to ask, whose calls it counts.

    Orbax asks with the step that is saved, also from its background thread when training has gone
    on; then one process may stop at a step that another has passed (docs/upstream.md).
    """

    def metrics(self, step: int) -> PyTree | None:
        """Return the metrics that a step was saved with, by which it may be one of the best.

        Orbax reads those of all steps when the manager is made.

        Raises:
            UserError: the file is damaged.
        """
        try:
            metrics = super().metrics(step)
            check_seal(metrics or {}, "metrics/metrics")
        except ValueError as error:
            path = Path(self.directory) / f"{PREFIX}_{step}"
            raise UserError(
                f"{path} is damaged ({_gist(error)}): whether it is one of the best cannot be "
                "told. Bring metrics/metrics back from a copy, or remove that file: then the "
                "checkpoint counts as never evaluated"
            ) from error
        return metrics

    def reached_preemption(self, step: int) -> bool:
        """Never asks: saves are ours to decide."""
        return False


def _restore_args(tree: PyTree, *, partial: bool) -> ocp.args.PyTreeRestore:
    restore_args = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(tree, restore_args=restore_args, partial_restore=partial)


def _handlers(
    arrays: ocp.PyTreeCheckpointHandler | None,
) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Register the handler of each item up front, so that metadata can be read first."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    # Weights hardly compress (8 % in float32), and zstd would take cores from the loop.
    arrays = arrays or ocp.PyTreeCheckpointHandler(use_compression=False)
    json = ocp.JsonCheckpointHandler()
    for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        registry.add("state", args, arrays)
    for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
        for item in ("progress", "config"):
            registry.add(item, args, json)
    checksums = ChecksumsHandler()
    for args in (ChecksumsSave, ocp.args.JsonRestore):
        registry.add("checksums", args, checksums)
    return registry


def _preservation(config: CheckpointConfig) -> policies.PreservationPolicy:
    """`keep_last_n` newest (0: all), `keep_best_n` by evaluation, and those of the window."""
    if config.keep_last_n <= 0:
        return policies.LatestN(n=None)
    permanent = [
        policies.LatestN(config.keep_last_n),
        policies.CustomSteps(list(milestones(config.dyn_ckpt_window))),
    ]
    if config.keep_best_n:
        permanent.append(
            policies.BestN(
                # Absent where it was not finite, or the run went by another one then: never best.
                get_metric_fn=lambda metrics: metrics.get(config.best_metric, math.inf),
                reverse=True,  # Orbax keeps the end of the list: the lowest
                n=config.keep_best_n,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(permanent)


def _gist(error: BaseException) -> str:
    """The system's words; else the end of what may be pages: libraries put the cause last."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else "")
    text = str(error).split(" [tensorstore_spec=")[0].split(" [os_error_code=")[0]
    return text if len(text) < 160 else "... " + text[-160:]


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    return {name: tuple(leaf.shape) for name, leaf in flatten_dict(tree, sep=".").items()}
