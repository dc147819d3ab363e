"""End of a run: last saves and notifications, closed sinks, and the exit code."""

import contextlib
import logging
import sys
from collections.abc import Callable
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.errors import StorageError
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.exit_report import (
    check_learned,
    exit_code,
    log_exit_reason,
    log_failed_callback,
)
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Exits
from jaxforge.training.saves import Saves
from jaxforge.training.saving import Saver

log = logging.getLogger(__name__)


def end_training(reason: Exit, exits: Exits, config: JobConfig, saves: Saves) -> Exit:
    """Wait for the last saves and log why training ended.

    Args:
        reason: why the loop ended.
        exits: logs requested ends.
        config: the config of the run.
        saves: the saves of the run.

    Returns:
        `reason`, or `Exit.NON_FINITE` if the state of the last steps no longer changed.

    Raises:
        UserError: a completed run has not applied any update.
    """
    position, bad_steps, instruments = saves.position, saves.bad_steps, saves.instruments
    position.follow_device(instruments.tracker)
    instruments.watchdog.clock.end_steps()
    has_halted = bad_steps.has_halted(position.progress)
    if has_halted and not bad_steps.rollback and reason is not Exit.MACHINE:
        reason = Exit.NON_FINITE
        instruments.tracker.log_latest()
    with instruments.watchdog.section("checkpoint"):
        saves.saver.wait()
    saves.note_durable()
    if reason in (Exit.COMPLETED, Exit.EARLY_STOPPED):
        check_learned(config.train, position.progress)
    exits.log_reason(reason, position.step)
    log_exit_reason(reason, config, position.progress, saves.saver.latest())
    exits.log_total_time()
    return reason


def close_run(
    reason: Exit | None,
    progress: Progress,
    callbacks: Callbacks,
    saver: Saver,
    instruments: Instruments,
) -> Exit | None:
    """End the run: wait for saves, notify callbacks, close the sinks.

    Each of these actions takes place even if an earlier one fails.

    Args:
        reason: why training ended; None if it failed.
        progress: the counters of the run.
        callbacks: the callbacks of the run.
        saver: the checkpoints of the run.
        instruments: metrics, watchdog and profiler.

    Returns:
        Why the process ends: `Exit.STORAGE` if metrics or logs are lost, the code of a callback
        that raised SystemExit here, otherwise `reason`.

    Raises:
        Exception: the last failure of an action, such as that of a callback.
    """
    losses: list[StorageError] = []
    callbacks.control.take()  # requests that came too late
    instruments.watchdog.clock.end_steps()  # also after a failure

    def note_loss(end: Callable[..., object], *arguments: object) -> None:
        try:
            end(*arguments)
        except StorageError as error:
            log.error("%s", error)
            losses.append(error)

    def notify(callback: Callback, event: Callable[..., None], *arguments: Any) -> None:  # noqa: ANN401
        nonlocal reason
        try:
            note_loss(callbacks.call_callback, callback, event, *arguments)
        except Exception:
            if reason is not None:
                name = f"{type(callback).__name__}.{event.__name__}"
                log_failed_callback(name, reason, saver.latest_path())
            raise
        requested = callbacks.control.take().exit
        if reason is not None and requested is not None and requested.code:
            reason = requested

    def code(failure: BaseException | None) -> int:
        failure = failure or sys.exception() or (losses[0] if losses else None)
        return exit_code(reason, failure)

    def close_tracker(_: object, failure: BaseException | None, __: object) -> None:
        if not instruments.tracker.close(code(failure)):
            losses.append(StorageError("metrics are lost"))

    def close_attempt(_: object, failure: BaseException | None, __: object) -> None:
        if instruments.attempt is not None:
            instruments.attempt.close(code(failure))

    # Pushed in reverse: the profiler closes first and the mirror last. Each callback of the
    # stack runs even if an earlier one fails; the last failure is raised.
    with contextlib.ExitStack() as stack:
        stack.callback(note_loss, saver.close_mirror)
        stack.push(close_attempt)
        stack.push(close_tracker)
        in_reverse = [*callbacks][::-1]
        for callback in in_reverse:
            stack.callback(notify, callback, Callback.close)
        ended = Callback.on_train_end, progress.step, progress.tokens, reason
        for callback in in_reverse:
            stack.callback(notify, callback, *ended)
        stack.callback(saver.close, together=reason is not None and reason.is_agreed)
        stack.callback(instruments.profiler.close)
    return Exit.STORAGE if losses else reason
