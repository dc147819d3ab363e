"""Assembly of a run from its parts: `build_trainer`."""

import functools

import jax

from jaxforge.config.eval import BEST_METRIC, EARLY_STOP_METRIC
from jaxforge.config.resolution import ResolvedRun
from jaxforge.parallel import agreement
from jaxforge.program import Program
from jaxforge.tasks.opening import check_task_names
from jaxforge.training.bad_steps import BadSteps
from jaxforge.training.banner import rows
from jaxforge.training.callbacks.callback import RunParts
from jaxforge.training.callbacks.order import callbacks_of
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.early_stop import EarlyStop
from jaxforge.training.foreign import open_foreign
from jaxforge.training.frozen import open_frozen
from jaxforge.training.instruments import Instruments, Session, open_profiler
from jaxforge.training.loop import Trainer
from jaxforge.training.saves import Saves
from jaxforge.training.saving import Position
from jaxforge.training.start import RunFiles
from jaxforge.training.training_data import TrainingData, open_data
from jaxforge.training.updates import StepCompiler, Updates


def build_trainer(run: ResolvedRun, program: Program, session: Session) -> Trainer:
    """Build the trainer of a run, in the order in which user errors should surface.

    Nothing is written before the data are checked and the lock of the run directory is held. The
    records of the start (config, starts, summary) are written last, when nothing can fail anymore.

    Args:
        run: the resolved config.
        program: the program of the run, which has the same config.
        session: callbacks, console, watchdog and lock of the command.

    Raises:
        UserError: the config, the data or a checkpoint cannot be used.
    """
    config, watchdog = program.config, session.watchdog
    profiler = open_profiler(config)
    with watchdog.section("data"):
        data_sets = open_data(config)
        check_task_names(config.eval)
    # Flags of XLA are checked before the lock: their mistakes need no run directory.
    compiler = StepCompiler.of(program)
    agreement.call_on_first(session.lock.take)
    files = RunFiles.open(run, program.model, watchdog, session.attempt)
    with watchdog.naming("restoring a checkpoint" if files.has_begun else "initializing"):
        state, progress = files.saver.start(program, open_foreign)
        frozen = open_frozen(program, open_foreign, progress, run.teacher)
    data = TrainingData.of(program, data_sets, progress, has_begun=files.has_begun)
    tracked = config.metrics.writer("wandb")
    # A tracker continues the run of the checkpoint, unless the config names another one.
    progress.run_id = (tracked.run_id if tracked else "") or progress.run_id
    parts = RunParts(program, data_sets.evaluation, progress, session.lock, frozen)
    callbacks = Callbacks([*session.callbacks, *callbacks_of(parts)])
    files.saver.set_direction(parts.directions.get(BEST_METRIC))
    if jax.process_index() == 0:
        session.show_banner(rows(program, state, progress, frozen, run.rows()))
    # Before the writers open their files.
    files.rename_old_metrics(config)
    instruments = Instruments.open(session, program, progress, profiler)
    files.record_start(run, program, progress)
    position = Position(state, progress, config.train.max_steps)
    bad_steps = BadSteps.of(program, data_sets.training, progress, files.saver)
    lower = functools.partial(compiler.lower, program, frozen)
    return Trainer(
        config=config,
        position=position,
        updates=Updates(lower, data, config.train.iterations_to_skip),
        saves=Saves(position, files.saver, bad_steps, callbacks, instruments),
        bad_steps=bad_steps,
        early_stop=EarlyStop(
            config.early_stop, is_higher_better=parts.directions.get(EARLY_STOP_METRIC)
        ),
        callbacks=callbacks,
        instruments=instruments,
    )
