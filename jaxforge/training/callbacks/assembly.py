"""Assembly of the callbacks of a run: those that its config asks for, and the user's own."""

from collections.abc import Iterator, Sequence

import jax
from jax.sharding import Mesh

from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset
from jaxforge.model.transformer import Model
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.storage import mirror
from jaxforge.storage.run_lock import RunLock
from jaxforge.training.callbacks.activations import ActivationCapture
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.collectives import CollectiveHealth
from jaxforge.training.callbacks.directory_lock import DirectoryLock
from jaxforge.training.callbacks.evaluation import Evaluation
from jaxforge.training.callbacks.exports import Exporter
from jaxforge.training.callbacks.garbage import CollectGarbage
from jaxforge.training.callbacks.memory_report import MemoryReport
from jaxforge.training.callbacks.progress_txt import ProgressTxt
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.callbacks.samples import Sampler
from jaxforge.training.callbacks.stragglers import Stragglers
from jaxforge.training.callbacks.synchronize import Synchronize
from jaxforge.training.callbacks.weight_hash import WeightHashes
from jaxforge.training.hooks import named_hook


def named_callbacks(config: JobConfig) -> list[Callback]:
    """Make the callbacks that `plugins.hooks` names.

    Raises:
        UserError: a name is no class of callbacks.
    """
    return [named_hook(path) for path in config.plugins.hooks]


def assemble(
    config: JobConfig,
    mesh: Mesh,
    model: Model,
    eval_data: dict[str, Dataset],
    progress: Progress,
    lock: RunLock,
    users: Sequence[Callback],
) -> Callbacks:
    """Make all callbacks of a run.

    Args:
        config: a resolved config.
        mesh: of the run.
        model: the model.
        eval_data: evaluation sets by name.
        progress: the counters of the run.
        lock: of the run directory.
        users: callbacks of the user.

    Raises:
        UserError: a callback that the config asks for lacks what it needs, such as a tokenizer.
    """
    examining = _model_callbacks(config, mesh, model, eval_data, progress)
    files = _file_callbacks(config, progress)
    return Callbacks([*examining, *users, *files, *health_callbacks(config, mesh, lock)])


def _model_callbacks(
    config: JobConfig,
    mesh: Mesh,
    model: Model,
    eval_data: dict[str, Dataset],
    progress: Progress,
) -> Iterator[Callback]:
    section, files = config.eval, mirror.files(config.checkpoint.dir)
    if section.enabled:
        tokenizer = run_directory.tokenizer_for(files, config)
        yield Evaluation.of(config, mesh, model, eval_data, tokenizer, progress)
    if section.sample_interval:
        yield Sampler(config, mesh, model, run_directory.tokenizer_for(files, config))
    if section.activations_interval:
        yield ActivationCapture(config, mesh, model, eval_data[section.captured_set()])


def _file_callbacks(config: JobConfig, progress: Progress) -> Iterator[Callback]:
    if config.checkpoint.export_interval or config.checkpoint.export_last:
        yield Exporter(config.checkpoint)
    if config.metrics.log_progress and jax.process_index() == 0:
        yield ProgressTxt(config, progress)


def health_callbacks(
    config: JobConfig, mesh: Mesh, lock: RunLock | None = None
) -> Iterator[Callback]:
    """Yield the callbacks that watch the machine and the run directory.

    Args:
        config: a resolved config.
        mesh: of the run.
        lock: of the run directory.
    """
    train, metrics = config.train, config.metrics
    yield MemoryReport()
    if lock:
        yield DirectoryLock(lock)
    if train.manual_gc_interval:
        yield CollectGarbage(train.manual_gc_interval)
    if train.train_sync_interval:
        yield Synchronize(train.train_sync_interval)
    if train.nccl_health_check_interval:
        yield CollectiveHealth(train, mesh)
    if train.check_weight_hash_across_dp_replicas_interval:
        yield WeightHashes(train.check_weight_hash_across_dp_replicas_interval, mesh)
    if metrics.log_straggler:
        yield Stragglers(metrics)
