"""Endurance: one run of many steps with a fault every few hundred steps.

    python -m benchmarks.faults.endurance [--quick] [--steps N] [--every N] [--directory DIR]

Two runs of the drill's model:

- an elastic job of two hosts with replicas in memory; a host or its process is killed, stopped for
  a moment or for good, or preempted, and returns;
- one process that loses a batch to a NaN once per epoch and continues.

Every step must be logged once. Rounding differs between two processes and one, and such differences
grow over thousands of steps, so two processes without faults are compared as well.

Memory, open files and disk are measured halfway between faults: the last quarter of the
measurements is compared with the second quarter, as caches fill in the first.
"""

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults.case import Job, Run, Shared, require
from benchmarks.faults.data import N_BATCHES
from benchmarks.faults.hosts import TIMEOUT, Hosts

N_HOSTS = 2
EARLY = "the second quarter"
TOLERANCE = 1e-5  # of a loss, as in the drill
_DATA_FILES = {"metrics.jsonl", "logs"}  # these grow with each step


def disk(*directories: Path) -> int:
    """Return the bytes of files that should not grow: checkpoints and replicas."""
    total = 0
    for directory in directories:
        for where, names, files in os.walk(directory):
            names[:] = set(names) - _DATA_FILES
            for name in set(files) - _DATA_FILES:
                with contextlib.suppress(FileNotFoundError):  # a save replaces others
                    total += (Path(where) / name).stat().st_size
    return total


class Log:
    """Measurements of a run, by name."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def add(self, who: str, process: psutil.Process) -> None:
        """Note the resources that a process uses."""
        self.note(f"{who}: MB of memory", process.memory_info().rss / 1e6)
        self.note(f"{who}: open files", process.num_fds())
        self.note(f"{who}: threads", process.num_threads())

    def note(self, name: str, value: float) -> None:
        """Note a value."""
        self.values.setdefault(name, []).append(value)

    def rows(self, case: str) -> list[results.Row]:
        """Return a row per value: the last quarter, and the second one as its peer."""
        rows = []
        for name, values in self.values.items():
            quarter = max(1, len(values) // 4)
            early, late = values[quarter : 2 * quarter] or values[:1], values[-quarter:]
            what, _, unit = name.rpartition(": ")
            rows.append(results.Row(f"{case}, {what}", round(statistics.median(late), 1),
                                    EARLY, round(statistics.median(early), 1),
                                    unit, smaller_is_better=True))  # fmt: skip
        return rows


# Faults of a host; each returns when both hosts are in one roster again, or soon will be


def kill_process(hosts: Hosts, host: int) -> None:
    """Kill the training process of a host; its supervisor starts it again."""
    hosts.processes(host)[-1].kill()


def kill_host(hosts: Hosts, host: int) -> None:
    """Kill a host, and start it again."""
    hosts.signal(host, 9)
    hosts.supervisors[host].wait()
    hosts.await_roster(1 - host)
    hosts.start(host)


def preempt(hosts: Hosts, host: int) -> None:
    """Ask a host to leave, and start it again."""
    hosts.supervisors[host].terminate()
    hosts.codes(host)
    hosts.start(host)


def stop_process(hosts: Hosts, host: int) -> None:
    """Stop the training process of a host for good: it is found and replaced."""
    hosts.processes(host)[-1].suspend()


def stop_host(hosts: Hosts, host: int) -> None:
    """Stop all of a host for longer than its timeout."""
    hosts.freeze(host)
    time.sleep(2 * TIMEOUT)
    hosts.thaw()


def stop_briefly(hosts: Hosts, host: int) -> None:
    """Stop all of a host for a second."""
    hosts.freeze(host)
    time.sleep(1)
    hosts.thaw()


STRIKES: tuple[Callable[[Hosts, int], None], ...] = (
    kill_process, kill_host, stop_briefly, preempt, stop_process, stop_host,
)  # fmt: skip


def settings(steps: int) -> list[str]:
    """Return the settings of all runs."""
    return [
        f"--train.max_steps={steps}", f"--eval.interval={steps // 10}",
        "--checkpoint.interval=100", "--checkpoint.keep_last_n=2",
    ]  # fmt: skip


@contextlib.contextmanager
def elastic_job(run: Run, steps: int, memory: Path) -> Iterator[Hosts]:
    """Start an elastic job of two hosts whose replicas are in `memory`."""
    overrides = [
        *settings(steps), "--plugins.callbacks=[]", "--checkpoint.replica_interval=25",
        f"--checkpoint.replica_dir={memory}", "--train.hang_timeout=10",
    ]  # fmt: skip
    with Hosts(run, None, overrides, N_HOSTS) as hosts:
        hosts.start(*range(N_HOSTS))
        yield hosts


def strike_again_and_again(run: Run, steps: int, every: int, memory: Path) -> Log:
    """Train with a fault every `every` steps, and return what was measured."""
    log, strikes = Log(), itertools.cycle(STRIKES)
    with elastic_job(run, steps, memory) as hosts:
        for number, step in enumerate(range(every, steps - every + 1, every)):
            hosts.await_step(step - every // 2)
            hosts.await_roster(0, 1)
            for host in range(N_HOSTS):
                supervisor, trainer = hosts.processes(host)[0], hosts.processes(host)[-1]
                log.add("supervisors", supervisor)
                log.add("training processes", trainer)
            log.note("checkpoints: MB", disk(run.directory) / 1e6)
            log.note("replicas: MB", disk(memory) / 1e6)
            hosts.await_step(step)
            strike, began = next(strikes), time.monotonic()
            strike(hosts, number % N_HOSTS)
            lasted = hosts.await_step(run.last_logged() + 1)
            print(f"step {step}: {strike.__name__} of host {number % N_HOSTS}: next step after "
                  f"{time.monotonic() - began:.1f} s ({lasted:.1f} s after the fault's end)",
                  flush=True)  # fmt: skip
        codes = hosts.codes(*range(N_HOSTS))
    require(set(codes) == {0}, f"exit codes {codes}")
    return log


def lose_a_batch_per_epoch(run: Run, steps: int, every: int) -> Log:
    """Train one process that skips a NaN once per epoch, and return what was measured."""
    log = Log()
    job = run.start(*settings(steps), fault=("spoil", {"what": "NaN loss", "first": 63}))
    process = psutil.Process(job.processes[0].pid)
    for step in range(every // 2, steps, every):
        while run.last_logged() < step and not job.ended:
            time.sleep(0.1)
        require(not job.ended, f"ended: {job.tail()}")
        log.add("the training process", process)
        log.note("checkpoints: MB", disk(run.directory) / 1e6)
    require(job.wait() == [0], job.tail())
    skipped, expected = run.progress(steps)["skipped"], len(range(63, steps, N_BATCHES))
    require(skipped == expected, f"{skipped} steps skipped, not {expected}")
    return log


def difference(run: Run, reference: Run) -> str:
    """Require the same steps once in both runs, and describe how far their losses are apart."""
    ours, theirs = (
        [line for line in curve if "train/loss" in line]
        for curve in (run.curve(), reference.curve())
    )
    for name in ("step", "train/lr", "train/tokens"):
        same = [line[name] for line in ours] == [line[name] for line in theirs]
        require(same, f"another {name}, or a step is missing or logged twice")
    apart = [
        abs(line["train/loss"] / expected["train/loss"] - 1)
        for line, expected in zip(ours, theirs, strict=True)
    ]
    beyond = next((i + 1 for i, value in enumerate(apart) if value > TOLERANCE), None)
    since = f", above {TOLERANCE:g} first at step {beyond:,}" if beyond else ""
    return f"largest relative difference of the loss {max(apart):.1e}{since}"


def finish(job: Job) -> None:
    """Wait for an undisturbed run."""
    codes = [process.wait() for process in job.processes]
    require(set(codes) == {0}, job.tail())


def main() -> None:
    """Train both runs and report."""
    parser = results.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500, help="steps between two faults")
    parser.add_argument("--directory", type=Path, help="where to work; by default a temporary one")
    options: argparse.Namespace = parser.parse_args()
    steps, every = (1_200, 300) if options.quick else (options.steps, options.every)
    root = options.directory or Path(tempfile.mkdtemp(prefix="jaxforge-endurance-"))
    shared = Shared(root)

    def new(name: str) -> Run:
        return Run(root / name / "run", root / "compiled", shared.tokens())

    undisturbed, both, elastic, alone = map(new, ("undisturbed", "both", "elastic", "alone"))
    finish(undisturbed.start(*settings(steps)))
    finish(both.start(*settings(steps), n=N_HOSTS))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        rows = strike_again_and_again(elastic, steps, every, Path(memory)).rows("elastic")
    notes = [
        f"elastic job beside one process without faults, each of {steps:,} steps once: "
        f"{difference(elastic, undisturbed)}",
        "two processes without faults beside one: " + difference(both, undisturbed),
    ]
    rows += lose_a_batch_per_epoch(alone, steps, every).rows("one process")
    report = [sys.executable, "-m", "jaxforge", "report", "--goodput", str(elastic.directory)]
    print(subprocess.run(report, capture_output=True, text=True, check=True).stdout)
    results.report("endurance", rows, ("jax", "orbax-checkpoint"), notes=notes,
                   write=not options.quick, limits={EARLY: 0.9})  # fmt: skip


if __name__ == "__main__":
    main()
