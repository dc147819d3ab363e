"""Measurements of resources that must not grow, and of services with thousands of events.

- the metrics endpoint of a run, with thousands of requests by clients of all kinds;
- a supervisor whose command makes progress and fails each time;
- two supervisors of an elastic job that make a new roster for each failure.
"""

import concurrent.futures
import contextlib
import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import results

from benchmarks.faults.case import PATIENCE, Broken, Run, require
from benchmarks.faults.hosts import Hosts
from jaxforge.supervision.processes import free_port

EARLY = "the second quarter"
Measured = tuple[list[results.Row], list[str]]
"""Rows and notes of a part."""

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
        """Return a row per value: the largest of the last quarter, and that of the second one.

        Medians would jump: replicas alternate between those of one host and of two.
        """
        rows = []
        for name, values in self.values.items():
            quarter = max(1, len(values) // 4)
            early, late = values[quarter : 2 * quarter] or values[:1], values[-quarter:]
            what, _, unit = name.rpartition(": ")
            rows.append(results.Row(f"{case}, {what}", round(max(late), 1),
                                    EARLY, round(max(early), 1),
                                    unit, smaller_is_better=True))  # fmt: skip
        return rows


_PATHS = ("/metrics", "/healthz", "/readyz")
_REQUESTS, _PARALLEL = 64, 8
_CROWD = 100  # clients that never finish a request: more than the server has connections


def scrape(run: Run, rounds: int) -> Measured:
    """Ask the endpoint of a run that trains, among clients that hang and break off."""
    port, log = free_port("127.0.0.1"), Log()
    job = run.start(
        f"--metrics.prometheus_port={port}", "--train.max_steps=1000000", "--eval.enabled=false",
        "--checkpoint.interval=100", "--checkpoint.keep_last_n=1",
        '--plugins.callbacks=["benchmarks.faults.pace.Pace"]',
    )  # fmt: skip
    try:
        _await(lambda: job.ended or run.last_logged() >= 20, "20 steps")
        process = psutil.Process(job.processes[0].pid)
        for _ in range(rounds):
            _ask_in_a_crowd(port, process)
            log.add("the training process", process)
        job.signal(signal.SIGTERM)
        require(job.wait() == [75], job.tail())
    finally:
        job.kill()
    note = (f"endpoint: {rounds * _REQUESTS:,} requests answered, {_PARALLEL} at a time, among "
            f"{rounds * _CROWD:,} clients that hung or broke off")  # fmt: skip
    return log.rows("metrics endpoint"), [note]


def _ask_in_a_crowd(port: int, process: psutil.Process) -> None:
    """Ask while other clients hang; wait until no connection is left."""

    def has_clients() -> bool:
        connections = process.net_connections("tcp")
        return any(c.laddr.port == port and c.status != psutil.CONN_LISTEN for c in connections)

    crowd = [_hanging_client(port) for _ in range(_CROWD)]
    with concurrent.futures.ThreadPoolExecutor(_PARALLEL) as pool:
        answers = set(pool.map(lambda i: _ask(port, i), range(_REQUESTS)))
    require(answers == {200}, f"answers {answers}")
    for connection in crowd:
        connection.close()
    _await(lambda: not has_clients(), "no connections")


def _hanging_client(port: int) -> socket.socket:
    """Return a connection with half of a request, which will be reset."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    # With this option, closing sends RST, as if the client were killed.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    with contextlib.suppress(ConnectionError):  # the server may have made room for another client
        connection.sendall(b"GET /metrics HTTP/1.1\r\nAccept: ")
    return connection


def _ask(port: int, number: int) -> int:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{_PATHS[number % len(_PATHS)]}",
        headers={"Accept": "application/openmetrics-text"} if number % 2 else {},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        response.read()
        return int(response.status)


_TRAINER = """
import os, pathlib, signal, subprocess, sys, time
checkpoints, last = pathlib.Path(os.environ["CHECKPOINTS"]), int(os.environ["LAST"])
checkpoints.mkdir(parents=True, exist_ok=True)
subprocess.Popen(["sleep", "1000", os.environ["MARK"]])  # a data worker, which lives on
while os.environ["JAX_PROCESS_ID"] != "0":  # in a collective, until the supervisor kills it
    if (checkpoints / f"step_{last}").exists():
        raise SystemExit(0)
    time.sleep(0.1)
time.sleep(float(os.environ["SECONDS"]))
steps = sorted(int(path.name[5:]) for path in checkpoints.glob("step_*"))
step = (steps or [0])[-1] + 1
(checkpoints / f"step_{step}").mkdir()
for old in steps[:-1]:
    (checkpoints / f"step_{old}").rmdir()
print("step", step, flush=True)
if step == last:
    raise SystemExit(0)
if step % 2:
    os.kill(os.getpid(), signal.SIGKILL)
raise SystemExit(70)
"""
_PROGRAM = (sys.executable, "-S", "-c", _TRAINER, "jaxforge.train")
"""Command like `jaxforge train`: each start makes progress, and is killed or fails."""


def restart(run: Run, starts: int) -> Measured:
    """Supervise two processes whose first one fails again and again."""
    log, mark = Log(), _prepare(run, starts, seconds=0.05)
    command = [
        sys.executable, "-m", "jaxforge", "supervise", "--nproc=2", "--backoff=0.1",
        "--peer-grace=0.1", "--", *_PROGRAM, "--config", str(run.config),
        f"--checkpoint.dir={run.directory}",
    ]  # fmt: skip
    with run.directory.with_suffix(".log").open("wb") as output:
        supervisor = subprocess.Popen(
            command, env={**os.environ, **run.environment}, stdout=output, stderr=output
        )
    try:
        _measure(run, starts, log, [psutil.Process(supervisor.pid)])
        require(supervisor.wait(PATIENCE) == 0, "the supervisor failed")
    finally:
        supervisor.kill()
    _check_no_process(mark)
    return log.rows("supervise"), [
        f"supervise: {starts} starts of two processes, each with a child"
    ]


def regroup(run: Run, rosters: int) -> Measured:
    """Let two elastic hosts agree on a roster after each failure."""
    log, mark = Log(), _prepare(run, rosters, seconds=1.0)
    overrides = ["--plugins.callbacks=[]"]
    with Hosts(run, None, overrides, 2, _PROGRAM) as hosts:
        hosts.start(0, 1)
        _measure(run, rosters, log, [hosts.processes(host)[0] for host in range(2)])
        codes = hosts.codes(0, 1)
    require(set(codes) == {0}, f"exit codes {codes}: {hosts.output(0)[-1500:]}")
    _check_no_process(mark)
    return log.rows("supervise --elastic"), [f"supervise --elastic: {rosters} rosters of two hosts"]


def _prepare(run: Run, starts: int, seconds: float) -> str:
    """Set the environment of `_TRAINER`; return the mark of its children."""
    run.directory.mkdir(parents=True)
    mark = f"0.{os.getpid()}{starts}"
    run.environment = {
        "CHECKPOINTS": str(run.checkpoints), "LAST": str(starts), "MARK": mark,
        "SECONDS": str(seconds),
    }  # fmt: skip
    return mark


def _measure(run: Run, starts: int, log: Log, supervisors: Sequence[psutil.Process]) -> None:
    """Note resources of supervisors after every fourth start."""
    path = run.directory / "supervise.jsonl"

    def seen() -> int:
        return path.read_bytes().count(b"\n") if path.exists() else 0

    for number in range(2, starts - 1, 4):
        _await(functools.partial(lambda least: seen() >= least, number), f"start {number}")
        for supervisor in supervisors:
            log.add("the supervisor", supervisor)
            log.note("the supervisor: processes", 1 + len(supervisor.children(recursive=True)))
        log.note("supervise.jsonl: bytes per start", path.stat().st_size / seen())
        log.note("run directory: files", sum(1 for _ in run.directory.rglob("*")))


def _check_no_process(mark: str) -> None:
    left = [p.pid for p in psutil.process_iter(["cmdline"]) if mark in (p.info["cmdline"] or [])]
    require(not left, f"processes {left} have outlived their supervisor")


def _await(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        if time.monotonic() > deadline:
            raise Broken(f"not within {PATIENCE:.0f} s: {what}")
        time.sleep(0.02)
