"""End of a run: last saves and notifications, closed sinks, what the user reads, the exit code."""

import contextlib
import logging
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.errors import StorageError, UserError, exit_code_of
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.instruments import Instruments
from jaxforge.training.preemption import Exits
from jaxforge.training.saves import Saves
from jaxforge.training.saving import Saver

log = logging.getLogger(__name__)


def end_training(reason: Exit, exits: Exits, config: JobConfig, saves: Saves) -> Exit:
    """Wait for the last saves and log why training ended.

    Returns:
        `reason`, or `Exit.NON_FINITE` if the state of the last steps no longer changed.

    Raises:
        UserError: a completed run has not applied any update.
    """
    position, bad_steps, instruments = saves.position, saves.bad_steps, saves.instruments
    # The last steps may still run: their counters decide about the reason below.
    position.follow_device(instruments.tracker)
    instruments.watchdog.clock.end_steps()
    # Steps after the halt were launched, but changed nothing: the run did not complete.
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

    Returns:
        Why the process ends: `Exit.STORAGE` if metrics or logs are lost, the code of a callback
        that raised SystemExit here, otherwise `reason`.

    Raises:
        Exception: the last failure of an action, such as that of a callback.
    """
    losses: list[StorageError] = []
    # After the loop nobody fulfils requests.
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
            # The run itself is complete: this is said before the error hides it.
            if reason is not None:
                name = f"{type(callback).__name__}.{event.__name__}"
                log_failed_callback(name, reason, saver.latest_path())
            raise
        # SystemExit in an event became a request; an error code replaces a success.
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


def log_exit_reason(
    reason: Exit, job: JobConfig, progress: Progress, last_saved: int | None
) -> None:
    """Log how a run ended and what the user can do."""
    step, tokens, config = progress.step, f"{progress.tokens:,}", job.train
    if reason is Exit.COMPLETED:
        log.info("Training complete: %d steps, %s tokens", step, tokens)
        if job.data.tokenizer_path and last_saved is not None:
            run = shlex.quote(job.checkpoint.dir)
            log.info(
                "try the model: jaxforge generate %s; its curves: jaxforge report %s", run, run
            )
    elif reason is Exit.EARLY_STOPPED:
        log.info("Training ended early: %d steps, %s tokens", step, tokens)
    elif reason is Exit.NON_FINITE:
        stops = "stop" in (config.on_nonfinite, config.on_spike)
        bad = "the last step" if stops else f"{config.nan_consecutive_max} steps in a row"
        log.error(
            "gave up at step %d: %s had a loss or gradient norm that is not finite, or a spike. "
            "These steps did not change the weights. The last checkpoint is step %s. Lower "
            "optimizer.lr, inspect the data of these steps (train.rerun_bad_steps names them), "
            "or change train.on_nonfinite, on_spike or nan_consecutive_max",
            step, bad, last_saved,
        )  # fmt: skip
    elif reason is Exit.MACHINE:
        log.error(
            "stopped at step %d without saving: the hardware is faulty. The last checkpoint is "
            "step %s", step, last_saved,
        )  # fmt: skip
    else:
        log.info("stopped at step %d of %d; run the same command to resume", step, config.max_steps)


def log_failed_callback(event: str, reason: Exit, last_saved: Path | None) -> None:
    """Log that a callback failed after the end of training, and that the run is safe."""
    saved = "no checkpoint was saved"
    if last_saved is not None:
        saved = f"the last checkpoint is complete: {last_saved}"
    log.error(
        "%s failed after the end of training (%s); %s. Correct the callback and run the same "
        "command: it calls the callback again",
        event, reason.meaning, saved,
    )  # fmt: skip


def log_already_complete(config: TrainConfig, progress: Progress) -> None:
    """Log that the run was complete before this start."""
    log.info(
        "nothing to train: the run has reached step %d of train.max_steps = %d. Raise "
        "train.max_steps to continue, or set another checkpoint.dir to start a new run",
        progress.step, config.max_steps,
    )  # fmt: skip


def check_learned(config: TrainConfig, progress: Progress) -> None:
    """Check that a completed run has applied at least one update.

    Raises:
        UserError: no update was applied.
    """
    # Tokens count in applied updates only.
    if progress.tokens or not progress.step:
        return
    counts = {
        "had a loss or gradient norm that is not finite": progress.nonfinite,
        "had a spike": progress.spikes,
        "are named by train.iterations_to_skip": sum(
            n <= progress.step for n in config.iterations_to_skip
        ),
    }
    other_reason = "had no valid label"
    if config.mixed_precision == "fp16":
        other_reason += ", or gradients that overflowed"
    counts[other_reason] = progress.step - sum(counts.values())
    causes = ", ".join(f"{n} {description}" for description, n in counts.items() if n)
    raise UserError(
        f"nothing was learned: none of {progress.step} update(s) was applied. Of these, {causes}. "
        "Check the data and their loss masks. If prompts are longer than a sequence, raise "
        "train.seq_len"
    )


def exit_code(reason: Exit | None, failure: BaseException | None) -> int:
    """Return the exit code of the process, as `cli.run_main` derives it from a failure."""
    if reason and not failure:
        return reason.code
    return exit_code_of(failure) if failure else Exit.ERROR.code
