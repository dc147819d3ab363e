"""Reports at the end of a run: log messages and the exit code."""

import logging
import shlex
from pathlib import Path

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError, exit_code_of
from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress

log = logging.getLogger(__name__)


def log_exit_reason(
    reason: Exit, job: JobConfig, progress: Progress, last_saved: int | None
) -> None:
    """Log how a run ended and what the user can do.

    Args:
        reason: why the run ended.
        job: config of the run.
        progress: the counters of the run.
        last_saved: step of the newest checkpoint; None without one.
    """
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
    """Log that a callback failed after the end of training, and that the run is safe.

    Args:
        event: class and method of the callback.
        reason: why training ended.
        last_saved: the newest checkpoint; None without one.
    """
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

    Args:
        config: the `[train]` section.
        progress: the counters of the run.

    Raises:
        UserError: no update was applied.
    """
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
    """Return the exit code of the process, as `cli.run_main` derives it from a failure.

    Args:
        reason: why the run ended; None if it failed.
        failure: the exception that ended the run, or one raised while it was closed.
    """
    if reason and not failure:
        return reason.code
    return exit_code_of(failure) if failure else Exit.ERROR.code
