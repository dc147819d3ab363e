"""Assembly of a run from its config: `build_trainer`."""

import functools
import logging

import jax
from jax.sharding import Mesh

from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.config.directions import BEST_METRIC, EARLY_STOP_METRIC
from jaxforge.config.job import JobConfig
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.tasks.opening import check_task_names
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.banner import rows
from jaxforge.training.callbacks.order import callbacks_of
from jaxforge.training.callbacks.run_callback import RunParts
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.frozen import open_frozen, teacher_model
from jaxforge.training.hooks import named_callbacks
from jaxforge.training.instruments import (
    Instruments,
    Session,
    open_attention_logits,
    open_profiler,
    open_tracker,
)
from jaxforge.training.loop import Trainer
from jaxforge.training.start import (
    RunFiles,
    open_foreign,
    resolve_base,
    resolve_branch,
    resolve_skip_idle_experts,
)
from jaxforge.training.step_compiler import StepCompiler
from jaxforge.training.training_data import TrainingData, batch_ramp, open_data, record_data
from jaxforge.training.updates import Updates

log = logging.getLogger(__name__)


def build_trainer(config: JobConfig, mesh: Mesh, session: Session) -> Trainer:
    """Build the trainer of a run, in the order in which user errors should surface.

    Nothing is written before the data are checked and the lock of the run directory is held. The
    records of the start (config, starts, summary) are written last, when nothing can fail anymore.

    Args:
        config: the resolved config.
        mesh: the mesh of the run.
        session: callbacks, console, watchdog and lock of the command.

    Raises:
        UserError: the config, the data or a checkpoint cannot be used.
    """
    profiler = open_profiler(config)
    config = resolve_skip_idle_experts(resolve_base(resolve_branch(config)))
    users = [*session.callbacks, *named_callbacks(config)]
    watchdog = session.watchdog
    with watchdog.section("data"):
        dataset, eval_data, identity = open_data(config)
        check_task_names(config.eval)
    collect = [name for callback in users for name in callback.collect]
    program = Program(config, mesh, collect=collect, teacher=teacher_model(config))
    compiler = StepCompiler.of(program)
    if session.make_step is not None:
        program.step, program.pads_batches = session.make_step(program), False
    model = program.model
    session.lock.acquire()
    files = RunFiles.open(config, model, watchdog, session.attempt)
    saver = files.saver
    has_begun = not files.is_new or config.checkpoint.start_path
    with watchdog.naming("restoring a checkpoint" if has_begun else "initializing"):
        state, progress = saver.start(program, open_foreign)
        frozen = open_frozen(program, open_foreign, progress)
    ramp = batch_ramp(config, mesh)
    record_data(config, progress, dataset, identity, rows=ramp.rows, has_begun=bool(has_begun))
    data = TrainingData.of(config, mesh, dataset, ramp)
    data.open(progress)  # refuses data that end before the run; nothing is read yet
    progress.run_id = config.metrics.wandb_run_id or progress.run_id
    parts = RunParts(config, mesh, model, eval_data, progress, session.lock, frozen)
    callbacks = Callbacks([*users, *callbacks_of(parts)])
    if (direction := parts.directions.get(BEST_METRIC)) is not None:
        saver.set_direction(is_higher_better=direction)
    # All processes agree on `resolved_config` here; later, process 0 alone uses it for the banner.
    lower = functools.partial(compiler.lower, program, program.resolved_config, frozen)
    if jax.process_index() == 0:
        session.show_banner(rows(program, state, progress, frozen))
    files.rename_old_metrics(config)
    tracker = open_tracker(session, config, progress, ramp)
    files.record_start(config, model, progress, mesh)

    def restore(step: int) -> tuple[TrainState, Progress]:
        source = Saved(saver.permanent, step)
        return start_from(source, program, open_foreign=open_foreign)

    return Trainer(
        config=_with_mode(config, parts.directions.get(EARLY_STOP_METRIC)),
        state=state,
        progress=progress,
        updates=Updates(lower, data),
        saver=saver,
        bad_steps=BadSteps.of(
            config,
            mesh,
            model,
            dataset,
            progress,
            (saver.permanent, saver.local, saver.replicas),
            restore,
        ),
        callbacks=callbacks,
        instruments=Instruments(
            tracker, watchdog, profiler, open_attention_logits(config, program), session.attempt
        ),
    )


def _with_mode(config: JobConfig, is_higher_better: bool | None) -> JobConfig:
    """Return the config with the direction of `early_stop.metric`, if only its task knows it."""
    if is_higher_better is None:
        return config
    mode = {"mode": "max" if is_higher_better else "min"}
    return config.model_copy(update={"early_stop": config.early_stop.model_copy(update=mode)})
