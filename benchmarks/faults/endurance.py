"""Endurance: one run of many steps with a fault every few hundred steps.

    python -m benchmarks.faults.endurance [--quick] [--steps N] [--every N] [--directory DIR]

Runs of the drill's model:

- one process and two without faults;
- an elastic job of two hosts with replicas in memory; a host or its process is killed, stopped for
  a moment or for good, or preempted, and returns;
- one process that loses a batch to a NaN once per epoch and continues.

The other parts are in `services`: the metrics endpoint, and supervisors with many starts.

Every step must be logged once, with the loss of one process without faults. Rounding differs
between two processes and one. At the drill's settings such differences grow to the size of the
loss, since Adam divides by gradients near zero. A larger `optimizer.eps`, and a rate that falls
with the number of steps, keep them at the size of one rounding, as two processes without faults
show, so that one lost update is visible. (At a rate of 1e-3 the model learns its data by heart
within 8,000 steps, and the control then differs by 1.1e-5.)

Memory, open files and disk are measured halfway between faults: the largest value of the last
quarter is compared with that of the second quarter, as caches fill in the first.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks import one another by their names

import results

from benchmarks.faults.case import Curve, Run, Shared, require
from benchmarks.faults.data import N_BATCHES
from benchmarks.faults.hosts import TIMEOUT, Hosts
from benchmarks.faults.services import EARLY, Log, Measured, disk, regroup, restart, scrape

N_HOSTS = 2
TOLERANCE = 1e-5  # of a loss, as in the drill
FIRST_SPOILT = 64  # step


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
        f"--optimizer.lr={min(1e-3, 10 / steps):g}", "--optimizer.eps=1e-2",
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
    job = run.start(
        *settings(steps), fault=("spoil", {"what": "NaN loss", "first": FIRST_SPOILT - 1})
    )
    process = psutil.Process(job.processes[0].pid)
    for step in range(every // 2, steps, every):
        while run.last_logged() < step and not job.ended:
            time.sleep(0.1)
        require(not job.ended, f"ended: {job.tail()}")
        log.add("the training process", process)
        log.note("checkpoints: MB", disk(run.directory) / 1e6)
    require(job.wait() == [0], job.tail())
    skipped, expected = (
        run.progress(steps)["skipped"],
        len(range(FIRST_SPOILT - 1, steps, N_BATCHES)),
    )
    require(skipped == expected, f"{skipped} steps skipped, not {expected}")
    return log


def losses(run: Run) -> Curve:
    """Return the lines of `metrics.jsonl` that have a training loss."""
    return [line for line in run.curve() if "train/loss" in line]


def relative(lines: Curve, expected: Curve) -> float:
    """Return the largest relative difference of the loss."""
    pairs = zip(lines, expected, strict=True)
    return max(abs(line["train/loss"] / other["train/loss"] - 1) for line, other in pairs)


def difference(run: Run, reference: Run) -> str:
    """Require that both runs logged the same steps and losses, and describe the difference."""
    lines, expected = losses(run), losses(reference)
    for name in ("step", "train/lr", "train/tokens"):
        same = [line[name] for line in lines] == [line[name] for line in expected]
        require(same, f"another {name}, or a step is missing or logged twice")
    largest = relative(lines, expected)
    require(largest <= TOLERANCE, f"the loss differs by {largest:.1e}, not {TOLERANCE:g} at most")
    return f"largest relative difference of the loss {largest:.1e}"


def effect_of_an_update(run: Run, reference: Run) -> str:
    """Describe how much the losses differ between the first skipped update and the next one."""
    after = slice(FIRST_SPOILT, FIRST_SPOILT + N_BATCHES - 1)
    return f"{relative(losses(run)[after], losses(reference)[after]):.1e}"


def undisturbed(run: Run, steps: int, n: int) -> None:
    """Train without faults."""
    run.n = n
    job = run.start(*settings(steps))
    codes = [process.wait() for process in job.processes]
    require(set(codes) == {0}, job.tail())


def compare_processes(run: Run, steps: int, reference: Run) -> Measured:
    """Train two processes without faults, as the control of the elastic job."""
    undisturbed(run, steps, N_HOSTS)
    return [], [f"two processes without faults next to one: {difference(run, reference)}"]


def elastic(run: Run, steps: int, every: int, reference: Run) -> Measured:
    """Train an elastic job with faults."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        rows = strike_again_and_again(run, steps, every, Path(memory)).rows("elastic")
    report = [sys.executable, "-m", "jaxforge", "report", "--goodput", str(run.directory)]
    print(subprocess.run(report, capture_output=True, text=True, check=True).stdout)
    count = len(range(every, steps - every + 1, every))
    return rows, [f"elastic job with {count} faults next to one process without faults, each of "
                  f"{steps:,} steps once: {difference(run, reference)}"]  # fmt: skip


def one_process(run: Run, steps: int, every: int, reference: Run) -> Measured:
    """Train a process that skips one update per epoch."""
    rows = lose_a_batch_per_epoch(run, steps, every).rows("one process")
    return rows, [
        f"one update left out changes the loss by up to {effect_of_an_update(run, reference)}"
    ]


def complete(root: Path, name: str, part: Callable[[], Measured | None]) -> Measured:
    """Return what a part measured, from its file if the part is complete."""
    file = root / f"{name}.json"
    if not file.exists():
        shutil.rmtree(root / name, ignore_errors=True)  # of an interrupted part
        rows, notes = part() or ([], [])
        file.write_text(json.dumps([[dataclasses.asdict(row) for row in rows], notes]))
    rows, notes = json.loads(file.read_text())
    return [results.Row(**row) for row in rows], notes


def main() -> None:
    """Measure all parts and report."""
    parser = results.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=500, help="steps between two faults")
    parser.add_argument("--directory", type=Path, help="where to work, by default a temporary one; "
                        "parts that are complete there are not repeated")  # fmt: skip
    options: argparse.Namespace = parser.parse_args()
    quick = options.quick
    steps, every = (1_200, 300) if quick else (options.steps, options.every)
    root = options.directory or Path(tempfile.mkdtemp(prefix="jaxforge-endurance-"))
    shared = Shared(root)

    def run(name: str) -> Run:
        return Run(root / name / "run", root / "compiled", shared.tokens())

    parts: dict[str, Callable[[], Measured | None]] = {
        "endpoint": lambda: scrape(run("endpoint"), 12 if quick else 60),
        "supervisor": lambda: restart(run("supervisor"), 24 if quick else 200),
        "rosters": lambda: regroup(run("rosters"), 8 if quick else 48),
        "undisturbed": lambda: undisturbed(run("undisturbed"), steps, 1),
        "processes": lambda: compare_processes(run("processes"), steps, run("undisturbed")),
        "elastic": lambda: elastic(run("elastic"), steps, every, run("undisturbed")),
        "alone": lambda: one_process(run("alone"), steps, every, run("undisturbed")),
    }
    rows, notes = list[results.Row](), list[str]()
    for name, part in parts.items():
        measured, remarks = complete(root, name, part)
        rows, notes = rows + measured, notes + remarks
    results.report("endurance", rows, ("jax", "orbax-checkpoint"), notes=notes,
                   write=not quick, limits={EARLY: 0.9})  # fmt: skip


if __name__ == "__main__":
    main()
