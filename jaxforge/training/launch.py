"""Start of a run: devices, mesh and trainer, then the training loop and an orderly end."""

import contextlib
from collections.abc import Callable, Sequence

import jax
from rich.console import Console

from jaxforge.cli.process import began, end_now, process_start
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.config.resolution import known_config
from jaxforge.exit_codes import Exit
from jaxforge.parallel import multihost
from jaxforge.program import Program
from jaxforge.runs import run_directory
from jaxforge.runs.attempts import AttemptLog
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry.console import LiveLine, begin_run
from jaxforge.training.build import build_trainer
from jaxforge.training.callbacks.callback import Callback, named_callbacks
from jaxforge.training.health import out_of_memory
from jaxforge.training.health.watchdog import Limits, Watchdog
from jaxforge.training.instruments import Session, serving_metrics
from jaxforge.training.preemption import Signals
from jaxforge.training.resolution import resolve_run

MakeStep = Callable[[Program], jax.stages.Wrapped]
"""Makes the jitted update `(state, batch, controls) -> (state, metrics)` of a program."""


def fit(
    config: JobConfig | UnresolvedConfig,
    callbacks: Sequence[Callback] = (),
    make_step: MakeStep | None = None,
) -> Exit:
    """Train from the newest checkpoint of the run directory, or from the start.

    Args:
        config: the config, as `load_config` returns it. Lengths in epochs or tokens of an
            unresolved config are turned into updates here.
        callbacks: your callbacks, called in order at each event.
        make_step: makes an update of your own, with the arguments and results of `Program.step`, to
            which it may delegate. By default `Program.step`.

    Returns:
        The reason why training ended; `Exit.code` is the exit code.

    Raises:
        UserError: the config, the data or a checkpoint cannot be used.
    """
    since = began()  # `train.exit_duration_in_mins` counts from the start of the process
    console = begin_run()
    known = known_config(config)
    # The watchdog comes first: joining the other processes may already hang.
    with Watchdog(Limits.of(known.train), since=process_start()) as watchdog:
        multihost.initialize(known.distributed.heartbeat_timeout_sec)
        with (
            watchdog.watching_peers(known.train.hang_timeout),
            multihost.exit_at_once_on_failure(watchdog.note_failure),
            open_live_line(console, known, watchdog) as live,
        ):
            run, mesh = resolve_run(config, watchdog)
            config = run.config
            # Callbacks decide what the step collects, so they exist before the program.
            users = [*callbacks, *named_callbacks(config)]
            collected = [name for user in users for name in user.collect]
            program = Program(config, mesh, collect=collected)
            with (
                Signals(config.train.shutdown_timeout_sec) as signals,
                RunLock(run_directory.root(config)) as lock,
                AttemptLog(watchdog.clock) as attempt,
                program.context(),
                out_of_memory.explained(program),
                serving_metrics(config, watchdog) as metrics,
            ):
                if make_step is not None:
                    program.step, program.pads_batches = make_step(program), False
                session = Session(users, console, watchdog, lock, attempt, live, metrics)
                trainer = build_trainer(run, program, session)
                reason: Exit | None = None
                try:
                    reason = trainer.train(signals, since)
                finally:
                    if reason is not Exit.UNHEALTHY:  # closing may wait forever for the devices
                        with watchdog.section("end"):
                            reason = trainer.close(reason)
            assert reason is not None  # nothing was raised
            if reason is Exit.UNHEALTHY or signals.has_background_thread:
                attempt.close(reason.code)
                end_now(reason.code)  # a thread may still compile: no clean exit
            return reason


def open_live_line(
    console: Console, config: JobConfig, watchdog: Watchdog
) -> contextlib.AbstractContextManager[LiveLine | None]:
    """Return the live line for a terminal of process 0; None in the context without one."""
    is_watched = console.is_terminal and not console.is_dumb_terminal
    if is_watched and config.metrics.log_format == "kempnerforge" and jax.process_index() == 0:
        return LiveLine(console, watchdog.activity)
    return contextlib.nullcontext()
