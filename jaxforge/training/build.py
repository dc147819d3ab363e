"""Makes of a config what a run needs: `build_trainer`."""

import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import jax
from jax.sharding import Mesh
from rich.console import Console

from jaxforge.checkpoint import paths
from jaxforge.checkpoint.local import open_local
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import Saved, Source, start_from, starting_state
from jaxforge.checkpoint.save_policy import SavePolicy
from jaxforge.config import trust
from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.config.useless import answers, useless
from jaxforge.data import loader, sources
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.epoch import sequences_per_epoch
from jaxforge.data.fingerprint import (
    Fingerprint,
    check_random_tokens,
    check_unchanged,
    fingerprints,
)
from jaxforge.data.mixture import Segment
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model, parameter_count
from jaxforge.parallel import agreement, compilation
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.xla_flags import Option
from jaxforge.program import Program
from jaxforge.runs import run_directory, starts
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.step.executable import Executable
from jaxforge.step.train_step import Batch, CompiledSteps
from jaxforge.storage import mirror
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry.console import add_log_file, banner
from jaxforge.telemetry.live_line import LiveLine
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.metric_writers import check_libraries, open_writers
from jaxforge.telemetry.profiler import Profiler
from jaxforge.telemetry.tracker import Tracker
from jaxforge.training.activations import ActivationCapture
from jaxforge.training.banner import rows
from jaxforge.training.evaluation import Evaluator
from jaxforge.training.exporting import Exporter
from jaxforge.training.health.actions import open_actions
from jaxforge.training.health.attribution import Attribution, make_row_losses
from jaxforge.training.health.watchdog import Watchdog
from jaxforge.training.hooks import Hook, HookRunner, named_hook
from jaxforge.training.loop import Trainer
from jaxforge.training.phases import Phases
from jaxforge.training.progress_txt import ProgressTxt
from jaxforge.training.resumable_evaluation import ResumableEvaluation
from jaxforge.training.rollback import Rollback
from jaxforge.training.sampling import Sampler
from jaxforge.training.saving import Saver
from jaxforge.training.summary import schedule_summary, write_summary
from jaxforge.training.training_data import TrainingData, batches_from

log = logging.getLogger(__name__)


def build_trainer(
    config: JobConfig,
    mesh: Mesh,
    hooks: Sequence[Hook],
    console: Console,
    watchdog: Watchdog,
    lock: RunLock,
    live: LiveLine | None = None,
) -> Trainer:
    """Everything a run needs, in the order in which a user's mistakes should surface.

    Nothing is written before the data has been checked and the run directory is ours; what the
    directory says of its run is written once nothing can refuse the start any more.
    """
    check_libraries(config.metrics)
    config = skipping_experts_as_started(config)
    named = [named_hook(path) for path in config.plugins.hooks]
    profiler = Profiler(config.profiling, mirror.files(config.checkpoint.dir))
    flags = compilation.accepted_flags(config)
    saved = Executable(config.train.executable, mesh) if config.train.executable else None
    with watchdog.section("data"):
        dataset, eval_data, identity = _open_data(config)
    program = Program(config, mesh, collect=HookRunner([*hooks, *named]).collect)
    model = program.model
    lock.acquire()
    copier = run_directory.open_mirror(config)
    checkpoints = _open_run_directory(config, model)
    watchdog.write_stacks_to(_stacks(config))
    resolved = config.model_dump(mode="json")
    local = open_local(config.checkpoint, model.axes, resolved, model.stack)
    begins = checkpoints.latest() is None and not (local and local.latest() is not None)
    if begins:
        _check_not_lost(config)
    has_begun = not begins or config.checkpoint.load_path
    with watchdog.naming("restoring a checkpoint" if has_begun else "initializing"):
        state, progress = starting_state(program, checkpoints, open_foreign, local)
    if has_begun:
        check_random_tokens(config.data, progress.data)
    for change in check_unchanged(config.data.on_change, progress.data, identity, progress.step):
        log.warning("the data changed since step %d: %s", progress.step, change)
    progress.data = identity
    progress.run_id = config.metrics.wandb_run_id or progress.run_id
    dp = data_parallel_size(mesh)
    ramp, phases = config.train.ramp(dp), Phases.of(config.data)
    samples = ramp.rows * config.train.grad_accum_steps
    progress.sequences_per_epoch = sequences_per_epoch(config, ramp.rows, dataset)
    evaluation = _evaluation(config, mesh, model, eval_data) if config.eval.enabled else None
    sampler = _sampler(config, mesh, model) if config.eval.sample_interval else None
    activations = _activations(config, mesh, model, eval_data)
    runner = HookRunner([*hooks, *named, *_own_hooks(config, progress)])
    sizes = {stage.accum for stage in ramp.stages}
    ready = functools.partial(_ready, flags, saved, program.resolved_config)
    if jax.process_index() == 0:
        banner(console, rows(program, state, progress))
    if begins:
        run_directory.put_metrics_aside(mirror.files(config.checkpoint.dir))
    tracker = _tracker(console, config, progress, samples, live)
    run = mirror.files(config.checkpoint.dir)
    run_directory.prepare(run, config)
    run_directory.note_start(run, config, progress.step)
    if jax.process_index() == 0:
        if begins and config.checkpoint.load_path:
            _keep_documents(config.checkpoint.load_path, run)
        _note_trust(config)
        starts.note(run, progress.step, parameters=parameter_count(model.abstract),
                    devices=f"{jax.device_count()} x {jax.devices()[0].device_kind}")  # fmt: skip
    summary = schedule_summary(config, dp, progress.sequences_per_epoch)
    write_summary(run, summary)

    def open_batches(place: Progress) -> Iterator[Batch]:
        return batches_from(place, config, mesh, dataset, phases, ramp)

    def restore(step: int) -> tuple[TrainState, Progress]:
        return start_from(Saved(checkpoints, step), program)

    return Trainer(
        config=config,
        state=state,
        progress=progress,
        lower_step=functools.partial(_lower, program, sizes, ready),
        data=TrainingData(open_batches, phases),
        evaluation=evaluation,
        saver=Saver(config.checkpoint, SavePolicy(config), checkpoints, local, copier),
        rollback=_rollback(config.train, checkpoints, local, restore),
        attribution=_attribution(config, mesh, model, dataset, progress),
        watchdog=watchdog,
        open_actions=lambda steps: open_actions(
            config, mesh, tracker.host_times, steps.largest, lock
        ),
        tracker=tracker,
        profiler=profiler,
        hooks=runner,
        sampler=sampler,
        activations=activations,
    )


def _open_data(
    config: JobConfig,
) -> tuple[Dataset | Mixture | Streaming, dict[str, Dataset], dict[str, Fingerprint]]:
    """Open training and evaluation sets, with their fingerprints, which all processes compare.

    Raises:
        UserError: the data are missing, damaged, do not fit the model, or differ between processes.
    """
    failure = None
    try:
        dataset = sources.open_training_data(config)
        eval_data = sources.open_eval_data(config) if config.eval.reads_data else {}
        identity = fingerprints(config.data, dataset, eval_data)
    except UserError as error:
        failure, identity = error, {"data": {"error": str(error)}}
    agreement.check(identity)
    if failure:
        raise failure
    return dataset, eval_data, identity


def _note_trust(config: JobConfig) -> None:
    """Let commands that open this run import its plugins without being told to trust them."""
    try:
        trust.note(run_directory.root(config), config.plugins.names)
    except OSError as error:
        log.warning(
            "commands that open this run will need --trust-plugins: %s: %s",
            error.filename, error.strerror,
        )  # fmt: skip


def _open_run_directory(config: JobConfig, model: Model) -> Checkpoints:
    files = mirror.files(config.checkpoint.dir)
    add_log_file(files)
    run_directory.tell_changes(files, config)
    for answer in answers(config):
        log.info("%s", answer)
    if jax.process_index() == 0:
        for warning in useless(config, jax.default_backend()):
            log.warning("%s", warning)
    resolved, run = config.model_dump(mode="json"), run_directory.root(config)
    return Checkpoints(run, config.checkpoint, model.axes, resolved, stack=model.stack)


def _check_not_lost(config: JobConfig) -> None:
    """Refuse, on all processes, to begin anew where the checkpoints of a run were lost.

    Raises:
        UserError: the run directory says that there were some.
    """
    failure = None
    try:
        if jax.process_index() == 0:  # of a run in a bucket, it alone has the files here
            run_directory.check_not_lost(mirror.files(config.checkpoint.dir))
    except UserError as error:
        failure = error
    agreement.raise_on_all(failure)


def _stacks(config: JobConfig) -> Path:
    return mirror.files(config.checkpoint.dir) / "logs" / f"stacks_{jax.process_index()}.txt"


def skipping_experts_as_started(config: JobConfig) -> JobConfig:
    """Return the config with `optimizer.skip_idle_experts` as the run began, unless it is set.

    That is as its checkpoints have it, or else what it starts from: a run of KempnerForge may have
    skipped experts without tokens, and so its continuation does.

    Raises:
        UserError: what the run starts from is damaged, or of another model.
    """
    section = config.checkpoint
    if not config.model.is_moe or config.optimizer.skip_idle_experts is not None:
        return config
    own = (section.dir, section.non_persistent_dir)
    start = next((place for place in own if place and paths.has_run(place)), None)
    if start is None and "optimizer" not in section.exclude_from_loading:
        start = section.load_path
    if start is None:
        return config
    if paths.has_run(start):
        skips = (paths.stored_config(start).get("optimizer") or {}).get("skip_idle_experts")
    else:
        from torch_compat.checkpoint import restore  # only for runs that start from PyTorch

        skips = restore.counts_experts(start, config)
    if not skips:
        return config
    log.info(
        "optimizer.skip_idle_experts is set to true, as in %s: an update skips experts without "
        "tokens", start,
    )  # fmt: skip
    return config.skipping_idle_experts()


def open_foreign(path: str, config: JobConfig) -> Source:
    """A checkpoint of PyTorch's that a run is to start from."""
    from torch_compat.checkpoint import restore  # only for runs that start from PyTorch

    return restore.open_foreign(path, config)


def _keep_documents(load_path: str, run: Path) -> None:
    """Keep what exports of a run need of the Hugging Face model that it starts from."""
    from torch_compat.checkpoint import restore  # only for runs that start from a checkpoint

    restore.keep_documents(load_path, run)


def _own_hooks(config: JobConfig, progress: Progress) -> Iterator[Hook]:
    if config.checkpoint.export_interval or config.checkpoint.export_last:
        yield Exporter(config.checkpoint)
    if config.metrics.log_progress and jax.process_index() == 0:
        yield ProgressTxt(config, progress)


def _lower(
    program: Program,
    sizes: Collection[int],
    ready: Callable[[dict[int, jax.stages.Lowered]], CompiledSteps],
    batch: Batch,
) -> Callable[[], CompiledSteps]:
    """The step as an executable for each size of batch, made before the first step.

    So it can never be compiled twice, nor in the middle of a run.

    Args:
        program: the run's.
        sizes: microbatches of an update, in each stage of the run.
        ready: compiles or loads them.
        batch: of any size.
    """
    return functools.partial(ready, program.lower_sizes(sizes, batch))


def _ready(
    flags: dict[str, Option],
    saved: Executable | None,
    config: JobConfig,
    lowered: dict[int, jax.stages.Lowered],
) -> CompiledSteps:
    if saved is not None:
        steps = saved.load(lowered, config)
        log.info("train step loaded from %s: nothing is compiled", config.train.executable)
        return CompiledSteps(steps)
    return CompiledSteps({n: compilation.compile_step(one, flags) for n, one in lowered.items()})


def _attribution(
    config: JobConfig,
    mesh: Mesh,
    model: Model,
    dataset: Dataset | Mixture | Streaming,
    progress: Progress,
) -> Attribution | None:
    if not config.train.rerun_bad_steps:
        return None

    def name_of(position: int) -> str:
        drawn = [Segment(*one) for one in progress.mixtures]
        return loader.describe_sample(config, mesh, dataset, drawn, position)

    return Attribution(make_row_losses(model, config.train, mesh), name_of)


def _rollback(
    config: TrainConfig,
    checkpoints: Checkpoints,
    local: Checkpoints | None,
    restore: Callable[[int], tuple[TrainState, Progress]],
) -> Rollback | None:
    wanted = "rollback" in (config.on_nonfinite, config.on_spike)
    return Rollback(checkpoints, local, restore, config.max_rollbacks) if wanted else None


def _evaluation(
    config: JobConfig, mesh: Mesh, model: Model, datasets: dict[str, Dataset]
) -> ResumableEvaluation:
    tokenizer = run_directory.tokenizer_for(mirror.files(config.checkpoint.dir), config)
    evaluator = Evaluator(config, mesh, model, datasets, tokenizer)
    evaluator.check_reports(config.checkpoint.best_metric)
    if config.early_stop.active and config.early_stop.metric.startswith("eval/"):
        evaluator.check_reports(config.early_stop.metric, "early_stop.metric")
    return ResumableEvaluation(evaluator, config.eval.steps)


def _sampler(config: JobConfig, mesh: Mesh, model: Model) -> Sampler:
    tokenizer = run_directory.tokenizer_for(mirror.files(config.checkpoint.dir), config)
    return Sampler(config, mesh, model, tokenizer)


def _activations(
    config: JobConfig, mesh: Mesh, model: Model, datasets: dict[str, Dataset]
) -> ActivationCapture | None:
    if not config.eval.activations_interval:
        return None
    return ActivationCapture(config, mesh, model, datasets[config.eval.captured_set()])


def _tracker(
    console: Console, config: JobConfig, progress: Progress, samples: int, live: LiveLine | None
) -> Tracker:
    cost, examples = StepCost.of(config, samples), progress.sequences_per_epoch
    writers = open_writers(console, config, progress.run_id, progress.step, cost, examples, live)
    names = [dataset.label for dataset in config.data.datasets]
    extras = config.metrics.collect
    left_out = config.train.iterations_to_skip
    return Tracker(writers, cost, progress, config.train.max_steps, names, extras, left_out)
