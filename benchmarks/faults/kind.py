"""Kind of fault, and what the scenarios of several modules share."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from benchmarks.faults.case import INTERVAL, STEPS, Case, Job, require

USER, MACHINE, GAVE_UP, HUNG, STORAGE, STOPPED, INTERRUPTED = 2, 16, 65, 70, 74, 75, 130
KILLED = -signal.SIGKILL
TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
LOST_PEER = (-signal.SIGABRT, 1)
"""Codes of a process that has noticed the end of another one."""


class Kind(NamedTuple):
    """Kind of fault.

    Attributes:
        name: name of the fault.
        count: number of such faults in a complete drill.
        scenario: function that injects the fault and checks the result.
        expected: description of the expected behaviour.
        mounts: whether the fault needs to mount file systems.
        n: processes of a run.
        has_network: whether the fault needs network namespaces.
        compiles: whether the fault needs a C compiler.
        has_ray: whether the fault needs Ray.
    """

    name: str
    count: int
    scenario: Callable[[Case], None]
    expected: str
    mounts: bool = False
    n: int = 1
    has_network: bool = False
    compiles: bool = False
    has_ray: bool = False


LEFT_OUT = "as if the batch's update were left out"
GOES_ON = "goes on from the newest durable step"
SAVES = "saves that very step and goes on"
HALF = STEPS // 2
"""Step at which the runs stop that `copy_half_run` copies."""


def copy_half_run(case: Case) -> None:
    """Let the case begin with a run that has stopped at step `HALF`."""
    half = case.undisturbed(f"--train.exit_interval={HALF}", code=STOPPED)
    shutil.copytree(half.directory, case.run.directory)


def of_job(scenario: Callable[[Case], None], *settings: str, n: int = 1) -> Callable[[Case], None]:
    """Return a scenario with settings and number of processes of the job."""

    def job_scenario(case: Case) -> None:
        case.run.job, case.run.n = settings, n
        scenario(case)

    return job_scenario


def resumes(case: Case, *overrides: str) -> None:
    """Run the command again to the end, and compare the curve."""
    case.goes_on(*overrides)
    case.matches(case.undisturbed())


def least_saved(case: Case, logged: int) -> None:
    """Return the least step that must be saved: a save waits for the previous save.

    A step is logged before it is saved: the save of step `logged` may not have started.
    """
    newest, started = max(case.run.durable(), default=0), (logged - 1) // INTERVAL * INTERVAL
    require(newest >= started - INTERVAL, f"step {logged} logged, {newest} saved")


def last_step_is_saved(case: Case) -> int:
    """Require a checkpoint of the last step, and return it; 0 before the first step."""
    last = max(case.run.durable(), default=0)
    require(last == case.run.last_logged(), f"logged {case.run.last_logged()}, saved {last}")
    return last


def array_files(checkpoint: Path) -> list[Path]:
    """Return the files with numbers; smaller files are indices."""
    files = sorted((checkpoint / "state").rglob("d/*"))
    return [path for path in files if path.stat().st_size > 100_000]


def flip(path: Path, case: Case, first: int = 0, end: int | None = None) -> None:
    """Flip a bit of a byte from `first` on, before `end`."""
    with path.open("r+b") as file:
        at = case.rng.randrange(first, end or path.stat().st_size)
        file.seek(at)
        byte = file.read(1)[0] ^ (1 << case.rng.randrange(8))
        file.seek(at)
        file.write(bytes([byte]))


def truncate(path: Path, case: Case) -> None:
    """Truncate the file at a random byte."""
    os.truncate(path, case.rng.randrange(path.stat().st_size))


def remove(path: Path, case: Case) -> None:
    """Remove the file."""
    path.unlink()


# Kills and signals


def started(case: Case) -> Job:
    """Start a run, and return at a random time before its end."""
    job = case.run.start()
    # Most of a short run is its start: half of the faults wait for it.
    before = case.run.last_logged()
    after = case.rng.choice([0, case.rng.randrange(max(1, min(before, STEPS - 1)), STEPS)])
    case.wait_until(lambda: job.last_step() >= after, job)
    job.wait_at_most(case.rng.uniform(0, 4 if after == 0 else 0.2))
    return job


Restart = Callable[[Case], None]
"""Runs the command of a killed run again, and compares the curve."""


def killed_anywhere(case: Case, restart: Restart = resumes) -> None:
    """Kill all processes from outside, between the first import and the last line."""
    job = started(case)
    logged = case.run.last_logged()
    job.kill()
    case.ends(job, KILLED, 0, *(LOST_PEER if case.run.n > 1 else ()))
    least_saved(case, logged)
    restart(case)


def killed_in_save(case: Case) -> None:
    """Kill a process from within, while a checkpoint is written."""
    step = case.rng.randrange(INTERVAL, STEPS + 1, INTERVAL)
    seconds = case.rng.uniform(0, 0.06)
    arguments = {"step": step, "number": signal.SIGKILL, "seconds": seconds}
    kill_one(case, ("signal_in_save", arguments))
    least_saved(case, step + 1)
    resumes(case)


def kill_one(case: Case, fault: tuple) -> None:
    """Let a process kill itself: JAX's coordination service or a failing save stops the others."""
    if case.run.n == 1:
        case.ends(case.run.start(fault=fault), KILLED, 0)
        return
    only = case.rng.choice(range(case.run.n))
    codes = case.run.start(fault=fault, only=only).wait()
    case.codes += codes
    others = codes[:only] + codes[only + 1 :]
    require(codes[only] == KILLED and not {0, USER} & set(others), f"codes {codes}")


def one_is_killed(case: Case, restart: Restart = resumes) -> None:
    """Kill one of several processes in a step."""
    step = case.rng.randrange(1, STEPS - 20)
    kill_one(case, ("signal_in_step", {"step": step, "number": signal.SIGKILL}))
    least_saved(case, case.run.last_logged())
    restart(case)


def stopped(case: Case, fault: tuple, code: int, only: int | None = None) -> None:
    """Check a fault that asks the run to stop: it saves its state and resumes from it."""
    output = case.ends(case.run.start(fault=fault, only=only), code)
    last = last_step_is_saved(case)
    case.says(output, f"stopped at step {last} of {STEPS}; run the same command to resume")
    resumes(case)


def asked_to_stop(number: int, code: int, fault: str, **sections: range) -> Callable[[Case], None]:
    """Send a signal in a random one of `sections`."""

    def scenario(case: Case) -> None:
        drawn = {name: case.rng.choice(values) for name, values in sections.items()}
        stopped(case, (fault, {**drawn, "number": number}), code)

    return scenario


def one_is_told_to_stop(case: Case) -> None:
    """Stop one of several processes: all stop at the same step."""
    number = case.rng.choice([signal.SIGTERM, signal.SIGUSR1])
    step = case.rng.randrange(1, STEPS // 2)
    fault = ("signal_in_step", {"step": step, "number": number, "pause": 0.05})
    stopped(case, fault, STOPPED, only=case.rng.choice(range(case.run.n)))


# Bad steps


def one_bad_step(what: str) -> Callable[[Case], None]:
    """Check that a bad step is skipped, as if its batch did not exist."""

    def scenario(case: Case) -> None:
        bad = moment_of(case)
        guard = ["--train.on_spike=skip", "--train.spike_warmup=20"] if what == "spike" else []
        case.ends(case.run.start(*guard, fault=("spoil", {"what": what, "first": bad})), 0)
        require(case.run.progress(STEPS)["skipped"] == 1, "not counted as skipped")
        left_out = case.undisturbed(f"--train.iterations_to_skip=[{bad + 1}]")
        case.matches(left_out, unlike=[bad + 1])

    return scenario


def moment_of(case: Case) -> int:
    """Return a batch to spoil; there are few choices, since each compiles another program."""
    return case.rng.choice([63, 125])


def rolled_back(what: str, *, killed: bool = False) -> Callable[[Case], None]:
    """Check a rollback: the run equals one without the data since the good checkpoint."""

    def scenario(case: Case) -> None:
        bad, rule = moment_of(case), "on_spike" if what == "spike" else "on_nonfinite"
        overrides = [f"--train.{rule}=rollback", "--train.spike_warmup=20",
                     "--checkpoint.keep_last_n=0"]  # fmt: skip
        fault = ("spoil", {"what": what, "first": bad, "count": 3})
        job = case.run.start(*overrides, fault=fault)
        if killed:
            after = case.rng.randrange(bad, STEPS - 10)
            case.wait_until(lambda: case.run.last_logged() >= after, job)
            job.wait_at_most(case.rng.uniform(0, 0.2))
            job.kill()
            case.ends(job, KILLED, 0)
            case.goes_on(*overrides, fault=fault)
        else:
            output = case.ends(job, 0)
            case.says(output, f"rolled back from step {bad + 3} to step")
        good = bad // INTERVAL * INTERVAL
        require(case.run.durable() == list(range(0, STEPS + 1, INTERVAL)), "saves are missing")
        (jump,) = case.run.progress(STEPS)["rollbacks"]
        require((jump["from"], jump["to"]) == (bad + 3, good), f"another jump: {jump}")
        case.matches(case.undisturbed(left_out=range(good, bad + 3)))

    return scenario
