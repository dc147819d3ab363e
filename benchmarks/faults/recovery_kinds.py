"""Faults in the recovery from a fault."""

import shutil
import signal
from collections.abc import Callable

from benchmarks.faults.case import INTERVAL, STEPS, Case, require
from benchmarks.faults.kind import (
    GOES_ON,
    HALF,
    KILLED,
    SAVES,
    STOPPED,
    STORAGE,
    Kind,
    copy_half_run,
    last_step_is_saved,
    of_job,
    resumes,
)


def killed_in_restore(case: Case) -> None:
    """Kill the run while it restores a checkpoint."""
    copy_half_run(case)
    arguments = {"number": signal.SIGKILL, "seconds": case.rng.uniform(0.001, 0.5)}
    case.ends(case.run.start(fault=("signal_in_restore", arguments)), KILLED)
    require(case.run.durable()[-1] >= HALF, "the checkpoint is lost")
    resumes(case)


def stopped_in_restore(case: Case) -> None:
    """Ask the run to stop while it restores a checkpoint."""
    copy_half_run(case)
    seconds = case.rng.choice([0.0, case.rng.uniform(0.001, 0.5)])
    arguments = {"number": signal.SIGTERM, "seconds": seconds}
    case.ends(case.run.start(fault=("signal_in_restore", arguments)), STOPPED)
    last_step_is_saved(case)
    resumes(case)


def full_disk_in_restore(case: Case) -> None:
    """Resume on a disk that is full."""
    case.mount(case.run.directory, "-t", "tmpfs", "-o", "size=64m", "tmpfs")
    half = case.undisturbed(f"--train.exit_interval={HALF}", code=STOPPED)
    shutil.copytree(half.directory, case.run.directory, dirs_exist_ok=True)
    ballast = case.run.directory / "ballast"
    with ballast.open("ab", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 4096)
        except OSError:
            pass
    output = case.ends(case.run.start(), STORAGE, noisy=True)
    case.says(output, "No space left on device")
    require(case.run.durable()[-1] == HALF, "a checkpoint is lost")
    ballast.unlink()
    resumes(case)


def killed_in_next_save(case: Case) -> None:
    """Kill the run, and again during its first save after the restart."""
    step = case.rng.randrange(INTERVAL + 1, STEPS - 2 * INTERVAL)
    fault = ("signal_in_step", {"step": step, "number": signal.SIGKILL})
    case.ends(case.run.start(fault=fault), KILLED)
    before = max(case.run.durable(), default=0)
    arguments = {"step": before + 1, "number": signal.SIGKILL, "seconds": case.rng.uniform(0, 0.06)}
    case.ends(case.run.start(fault=("signal_in_save", arguments)), KILLED)
    require(max(case.run.durable(), default=0) >= before, "the checkpoint is lost")
    resumes(case)


def killed_three_times(case: Case) -> None:
    """Kill the run three times in a row, each time in a start, restore, step or save."""
    for _ in range(3):
        newest = max(case.run.durable(), default=0)
        step = min(newest + case.rng.randrange(1, 2 * INTERVAL), STEPS - 1)
        moments: list[Callable[[], tuple]] = [
            lambda: ("signal_in_restore", {"seconds": case.rng.uniform(0.001, 0.5)}),
            lambda step=step: ("signal_in_step", {"step": step}),
            lambda step=step: ("signal_in_save", {"step": step,
                                                  "seconds": case.rng.uniform(0, 0.06)}),
        ]  # fmt: skip
        # The first start has nothing to restore.
        name, arguments = case.rng.choice(moments[0 if newest else 1 :])()
        fault = (name, {**arguments, "number": signal.SIGKILL})
        case.ends(case.run.start(fault=fault), KILLED)
        require(max(case.run.durable(), default=0) >= newest, "the checkpoint is lost")
    resumes(case)


def killed_in_starts(case: Case) -> None:
    """Kill three starts of a run with checkpoints in their first seconds."""
    copy_half_run(case)
    for _ in range(3):
        job = case.run.start()
        job.wait_at_most(case.rng.uniform(0, 5))
        job.kill()
        case.ends(job, KILLED, 0)
        require(case.run.durable()[-1] >= HALF, "the checkpoint is lost")
    resumes(case)


def one_of_two_killed_in_restore(case: Case) -> None:
    """Kill one of two processes while both restore."""
    half = case.undisturbed(f"--train.exit_interval={HALF}", code=STOPPED)
    shutil.copytree(half.directory, case.run.directory)
    only = case.rng.choice([0, 1])
    arguments = {"number": signal.SIGKILL, "seconds": case.rng.uniform(0.001, 0.3)}
    job = case.run.start(fault=("signal_in_restore", arguments), only=only)
    codes = job.wait()
    case.codes += codes
    require(codes[only] == KILLED and codes[1 - only] not in (0, 2), f"codes {codes}")
    require(case.run.durable()[-1] >= HALF, "the checkpoint is lost")
    resumes(case)


RECOVERY_KINDS = (
    Kind("recovery: kill -9, restoring", 16, killed_in_restore, GOES_ON),
    Kind("recovery: SIGTERM, restoring", 10, stopped_in_restore, SAVES),
    Kind("recovery: kill -9, in the first save", 16, killed_in_next_save, GOES_ON),
    Kind("recovery: kill -9, three times in a row", 12, killed_three_times, GOES_ON),
    Kind("recovery: kill -9, in three starts", 8, killed_in_starts, GOES_ON),
    Kind("recovery: disk full, restoring", 2, full_disk_in_restore, GOES_ON, mounts=True),
    Kind(
        "two processes: kill -9 of one, restoring",
        6,
        of_job(one_of_two_killed_in_restore, n=2),
        GOES_ON,
        n=2,
    ),
)
