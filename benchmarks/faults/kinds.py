"""Kinds of faults: how each is injected, and what must hold afterwards.

A scenario starts a run with a fault, checks how it ends, and usually restarts it as its user would.
`Broken` reports what did not hold.
"""

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

from benchmarks.faults import data
from benchmarks.faults.bucket_kinds import BUCKET_KINDS
from benchmarks.faults.case import INTERVAL, STEPS, Case, require
from benchmarks.faults.damage_kinds import DAMAGE_KINDS
from benchmarks.faults.difference_kinds import DIFFERENCE_KINDS
from benchmarks.faults.elastic_kinds import ELASTIC_KINDS
from benchmarks.faults.io_error_kinds import IO_ERROR_KINDS
from benchmarks.faults.job_kinds import JOB_KINDS
from benchmarks.faults.kind import (
    GAVE_UP,
    GOES_ON,
    HUNG,
    INT,
    INTERRUPTED,
    LEFT_OUT,
    MACHINE,
    SAVES,
    STOPPED,
    STORAGE,
    TERM,
    USER,
    USR1,
    Kind,
    array_files,
    asked_to_stop,
    copy_half_run,
    flip,
    killed_anywhere,
    killed_in_save,
    least_saved,
    moment_of,
    of_job,
    one_bad_step,
    one_is_killed,
    one_is_told_to_stop,
    remove,
    rolled_back,
    started,
    stopped,
    truncate,
)
from benchmarks.faults.ray_kinds import RAY_KINDS
from benchmarks.faults.recovery_kinds import RECOVERY_KINDS
from benchmarks.faults.scheduler_kinds import SCHEDULER_KINDS

# Kills and signals


def signalled_anywhere(case: Case) -> None:
    """Send a signal from outside; before handlers are installed, it terminates the process.

    Python loses a Ctrl-C that it handles during a garbage collection: "Exception ignored in".
    """
    number, code = case.rng.choice(
        [(signal.SIGTERM, STOPPED), (signal.SIGUSR1, STOPPED), (signal.SIGINT, INTERRUPTED)]
    )
    job = started(case)
    early = not case.run.directory.exists()
    job.signal(number)
    case.ends(job, *({code, 0} | ({-number, 1} if early else set())), noisy=early)
    case.goes_on()
    case.matches(case.undisturbed())


# Numbers


def gives_up(case: Case) -> None:
    """Plant as many bad steps in a row as are allowed, then none."""
    bad = moment_of(case)
    fault = ("spoil", {"what": "NaN loss", "first": bad, "count": 3})
    output = case.ends(case.run.start(fault=fault), GAVE_UP)
    case.says(output, f"gave up at step {bad + 3}: 3 steps in a row")
    require(case.run.durable()[-1] == bad // INTERVAL * INTERVAL, "a bad step is saved")
    case.goes_on()
    case.matches(case.undisturbed())


def stops_at_once(what: str, rule: str) -> Callable[[Case], None]:
    """Check `stop`: the run ends before the update, and continues without the fault."""

    def scenario(case: Case) -> None:
        bad = moment_of(case)
        overrides = [f"--train.{rule}=stop", "--train.spike_warmup=20"]
        fault = ("spoil", {"what": what, "first": bad})
        case.ends(case.run.start(*overrides, fault=fault), GAVE_UP)
        require(case.run.last_logged() == bad + 1, "does not stop at the bad step")
        case.goes_on(*overrides)
        case.matches(case.undisturbed())

    return scenario


def same_answer_again(case: Case) -> None:
    """Check a reproducible bad step: its sequences are named, and it is skipped."""
    bad = moment_of(case)
    fault = ("spoil", {"what": "NaN loss", "first": bad})
    output = case.ends(case.run.start("--train.rerun_bad_steps=true", fault=fault), 0)
    case.says(output, f"step {bad + 1}, rerun from the same state, gave the same result")
    left_out = case.undisturbed(f"--train.iterations_to_skip=[{bad + 1}]")
    case.matches(left_out, unlike=[bad + 1])


def another_answer_again(case: Case) -> None:
    """Check a bad step that is not reproducible: later results of the machine are discarded."""
    bad = moment_of(case)
    fault = ("mend_when_run_again", {"first": bad})
    output = case.ends(case.run.start("--train.rerun_bad_steps=true", fault=fault), MACHINE)
    case.says(output, f"step {bad + 1}, rerun from the same state, gave two results")
    require(case.run.durable()[-1] == bad // INTERVAL * INTERVAL, "a doubtful step is saved")
    case.goes_on("--train.rerun_bad_steps=true")
    case.matches(case.undisturbed())


def warned(case: Case) -> None:
    """Check `warn`: the loss is not finite, but its gradients are."""
    bad = moment_of(case)
    fault = ("spoil", {"what": "NaN loss", "first": bad})
    case.ends(case.run.start("--train.on_nonfinite=warn", fault=fault), 0)
    case.matches(case.undisturbed(), unlike=[bad + 1])


# Storage


def damaged(
    harm: Callable[[Path, Case], None], files: Callable[[Path], list[Path]] = array_files
) -> Callable[[Case], None]:
    """Damage the newest checkpoint while no process runs."""

    def scenario(case: Case) -> None:
        copy_half_run(case)
        newest = case.run.checkpoints / f"step_{STEPS // 2}"
        harm(case.rng.choice(files(newest)), case)
        output = case.ends(case.run.start(), USER, noisy=True)
        before = STEPS // 2 - INTERVAL
        case.says(output, f"error: {newest} is damaged", f"remove it to go on from step {before}")
        shutil.rmtree(newest)
        case.goes_on()
        case.matches(case.undisturbed())

    return scenario


def metadata_files(checkpoint: Path) -> list[Path]:
    """Return the files without which nothing can be read."""
    state = checkpoint / "state"
    return [state / "_METADATA", state / "manifest.ocdbt", checkpoint / "progress" / "metadata"]


def disk_full_at_save(case: Case) -> None:
    """Fill the disk before a checkpoint is due."""
    case.mount(case.run.directory, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    step = case.rng.randrange(INTERVAL, STEPS - INTERVAL)
    fault = ("fill_disk", {"step": step, "directory": str(case.run.directory)})
    output = case.ends(case.run.start(fault=fault), STORAGE, noisy=True)
    case.says(output, "a checkpoint could not be written", "No space left on device")
    least_saved(case, step)
    (case.run.directory / "ballast").unlink()
    case.goes_on()
    case.matches(case.undisturbed())


def disk_full_between_saves(case: Case) -> None:
    """Fill the disk between checkpoints, so that metrics cannot be written for a while."""
    case.mount(case.run.directory, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    step = case.rng.randrange(INTERVAL, STEPS - INTERVAL, INTERVAL) + 1
    where = {"step": step, "until": step + 6, "directory": str(case.run.directory)}
    output = case.ends(case.run.start(fault=("fill_disk", where)), 0)
    case.says(output, "metrics.jsonl failed: ")
    case.matches(case.undisturbed())


def disk_full_at_start(case: Case) -> None:
    """Start with disk space for the config and little else."""
    case.mount(case.run.directory, "-t", "tmpfs", "-o", "size=16k", "tmpfs")
    (case.run.directory / "ballast").write_bytes(b"\0" * 4096)
    case.ends(case.run.start(), USER, STORAGE, noisy=True)
    case.unmount()
    case.goes_on()
    case.matches(case.undisturbed())


def read_only_at_start(case: Case) -> None:
    """Start on a read-only file system."""
    case.mount(case.run.directory, "-t", "tmpfs", "-o", "ro", "tmpfs")
    output = case.ends(case.run.start(), USER)
    case.says(output, "error: checkpoint.dir", "Read-only file system")
    case.unmount()
    case.goes_on()
    case.matches(case.undisturbed())


def read_only_later(case: Case) -> None:
    """Make the checkpoint directory read-only; other directories stay writable."""
    case.mount(case.run.checkpoints, "--bind", str(case.run.checkpoints))
    step = case.rng.randrange(INTERVAL, STEPS - 2 * INTERVAL)
    fault = ("read_only", {"step": step, "directory": str(case.run.checkpoints)})
    output = case.ends(case.run.start(fault=fault), STORAGE, noisy=True)
    case.says(output, "a checkpoint could not be written", "Read-only file system")
    case.unmount()
    case.goes_on()
    case.matches(case.undisturbed())


def shard_gone_at_start(case: Case) -> None:
    """Remove a shard between two starts; plain files have no manifest that would reveal it."""
    copy_half_run(case)
    training = case.own_tokens() / data.TRAINING
    moved = training.rename(training.with_name("elsewhere"))
    output = case.ends(case.run.start(), USER)
    case.says(output, "error: data.dataset_path", "does not exist")
    moved.rename(training)
    case.goes_on()
    case.matches(case.undisturbed())


def shard_harmed_on_the_way(fault: str, said: str) -> Callable[[Case], None]:
    """Remove or truncate a shard after the start, before it is read."""

    def scenario(case: Case) -> None:
        victim = sorted((case.own_tokens() / data.TRAINING).iterdir())[case.rng.choice([5, 6])]
        spare = shutil.copy(victim, case.run.tokens)
        where = {"window": 128 * data.ROWS, "path": str(victim)}  # what is read second
        output = case.ends(case.run.start(fault=(fault, where)), USER)
        case.says(output, str(victim), said)
        least_saved(case, case.run.last_logged())
        shutil.copy(spare, victim)
        case.goes_on()
        case.matches(case.undisturbed())

    return scenario


def read_hangs(case: Case) -> None:
    """Let a read hang, as with a file server that does not respond, without a signal."""
    where = {"window": case.rng.choice([0, 128 * data.ROWS])}
    limits = ["--train.watchdog_setup_sec=60", "--train.watchdog_step_sec=15"]
    output = case.ends(case.run.start(*limits, fault=("hang_in_read", where)), HUNG)
    case.says(output, "inject.py")  # the stacks show where
    least_saved(case, case.run.last_logged())
    case.goes_on()
    case.matches(case.undisturbed())


def read_hangs_at_the_end(case: Case) -> None:
    """Let a read-ahead hang; the run ends before it would have to wait for it."""
    where = {"window": 128 * data.ROWS}
    last = case.rng.randrange(30, 60)
    fault = ("hang_in_read", where)
    output = case.ends(case.run.start(f"--train.exit_interval={last}", fault=fault), STOPPED)
    case.says(output, f"stopped at step {last} of", "while threads are running")
    case.goes_on()
    case.matches(case.undisturbed())


def clock_jumps(case: Case) -> None:
    """Let clocks jump by up to twelve days, forwards or backwards."""
    step = case.rng.randrange(1, STEPS)
    seconds = case.rng.choice([-1, 1]) * 10 ** case.rng.uniform(1, 6)
    fault = ("clock_jump", {"step": step, "seconds": seconds})
    case.ends(case.run.start(fault=fault), 0)
    case.matches(case.undisturbed())


# Two processes


def one_of_two_is_told_while_evaluating(case: Case) -> None:
    """Stop one of two processes in an evaluation: both stop at the same batch and resume there."""
    arguments = {"batch": case.rng.randrange(3), "number": signal.SIGTERM, "pause": 2.0}
    fault = ("signal_in_evaluation", arguments)
    stopped(case, fault, STOPPED, only=case.rng.choice([0, 1]))
    first = case.run.directory.with_suffix(".1.0.log").read_text()
    require("eval_loss" not in first, "the evaluation was not stopped")


def nan_from_one_host(case: Case) -> None:
    """Spoil a batch whose marked row is only read by the second process."""
    bad = moment_of(case)
    fault = ("spoil", {"what": "NaN loss", "first": bad})
    case.ends(case.run.start(fault=fault), 0)
    left_out = case.undisturbed(f"--train.iterations_to_skip=[{bad + 1}]")
    case.matches(left_out, unlike=[bad + 1])


_DAMAGED = "names the checkpoint, goes on from the one before once it is removed"

KINDS = (
    Kind("kill -9, at any time", 220, killed_anywhere, GOES_ON),
    Kind("kill -9, during a save", 120, killed_in_save, GOES_ON),
    Kind("a signal, at any time", 90, signalled_anywhere, GOES_ON),
    Kind("SIGTERM, compiling", 8, asked_to_stop(TERM, STOPPED, "signal_in_compilation"), SAVES),
    Kind("SIGTERM, in a step", 30,
         asked_to_stop(TERM, STOPPED, "signal_in_step", step=range(1, STEPS)), SAVES),
    Kind("SIGTERM, saving", 30,
         asked_to_stop(TERM, STOPPED, "signal_in_save", step=range(10, STEPS, 10)), SAVES),
    Kind("SIGTERM, evaluating", 24,
         asked_to_stop(TERM, STOPPED, "signal_in_evaluation", batch=range(6)), SAVES),
    Kind("SIGTERM, waiting for data", 8,
         asked_to_stop(TERM, STOPPED, "signal_while_waiting", window=range(0, 1025, 1024)), SAVES),
    Kind("SIGUSR1, in a step", 18,
         asked_to_stop(USR1, STOPPED, "signal_in_step", step=range(1, STEPS)), SAVES),
    Kind("SIGINT, in a step", 18,
         asked_to_stop(INT, INTERRUPTED, "signal_in_step", step=range(1, STEPS)), SAVES),
    Kind("NaN loss, skip", 4, one_bad_step("NaN loss"), LEFT_OUT),
    Kind("NaN gradient, skip", 4, one_bad_step("NaN gradient"), LEFT_OUT),
    Kind("infinite loss, skip", 4, one_bad_step("infinite loss"), LEFT_OUT),
    Kind("NaN loss, warn", 2, warned, "counted, and applied"),
    Kind("NaN loss, run again: the same", 2, same_answer_again, LEFT_OUT),
    Kind("NaN loss, run again: another", 3, another_answer_again, GOES_ON),
    Kind("NaN loss, stop", 3, stops_at_once("NaN loss", "on_nonfinite"), GOES_ON),
    Kind("NaNs in a row, skip", 4, gives_up, GOES_ON),
    Kind("NaNs in a row, rollback", 4, rolled_back("NaN loss"), "as if the span were not there"),
    Kind("NaNs in a row, rollback, kill -9", 24, rolled_back("NaN loss", killed=True),
         "as if the span were not there"),
    Kind("spike, skip", 4, one_bad_step("spike"), LEFT_OUT),
    Kind("spike, stop", 3, stops_at_once("spike", "on_spike"), GOES_ON),
    Kind("spikes in a row, rollback", 3, rolled_back("spike"), "as if the span were not there"),
    Kind("newest checkpoint: flipped bit", 32, damaged(flip), _DAMAGED),
    Kind("newest checkpoint: array file cut", 18, damaged(truncate), _DAMAGED),
    Kind("newest checkpoint: array file missing", 12, damaged(remove), _DAMAGED),
    Kind("newest checkpoint: metadata cut or missing", 18,
         lambda case: damaged(case.rng.choice([truncate, remove]), metadata_files)(case), _DAMAGED),
    Kind("disk full, at a save", 18, disk_full_at_save, GOES_ON, mounts=True),
    Kind("disk full, between saves", 12, disk_full_between_saves, "no line is lost", mounts=True),
    Kind("disk full, at the start", 2, disk_full_at_start, "says so", mounts=True),
    Kind("read-only, at the start", 2, read_only_at_start, "says so", mounts=True),
    Kind("read-only, on the way", 12, read_only_later, GOES_ON, mounts=True),
    Kind("data gone, at the start", 2, shard_gone_at_start, GOES_ON),
    Kind("shard gone, on the way", 6, shard_harmed_on_the_way("vanish", "No such file"), GOES_ON),
    Kind("shard cut, on the way", 4, shard_harmed_on_the_way("cut", "greater than"), GOES_ON),
    Kind("a read hangs", 4, read_hangs, GOES_ON),
    Kind("a read hangs, and the run ends before it is missed", 4, read_hangs_at_the_end, SAVES),
    Kind("clock jumps", 18, clock_jumps, "nothing"),
    Kind("two processes: signal to one", 12, of_job(one_is_told_to_stop, n=2), SAVES, n=2),
    Kind("two processes: signal to one, evaluating", 6,
         of_job(one_of_two_is_told_while_evaluating, n=2), SAVES, n=2),
    Kind("two processes: kill -9 of one", 12, of_job(one_is_killed, n=2), GOES_ON, n=2),
    Kind("two processes: NaN from one", 2, of_job(nan_from_one_host, n=2), LEFT_OUT, n=2),
    *RECOVERY_KINDS,
    *DIFFERENCE_KINDS,
    *DAMAGE_KINDS,
    *BUCKET_KINDS,
    *IO_ERROR_KINDS,
    *JOB_KINDS,
    *SCHEDULER_KINDS,
    *ELASTIC_KINDS,
    *RAY_KINDS,
)  # fmt: skip
