"""Faults of an elastic job on a Ray cluster: Ray replaces the hosts, and the run stays the same.

Three nodes on this machine have room for four hosts. The first node holds Ray's own table and the
driver; the last one has room for two hosts.
"""

import contextlib
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil

from benchmarks.faults.case import PATIENCE, Case, Run, require
from benchmarks.faults.elastic_kinds import (
    ALL,
    ALL_AGAIN,
    CONTINUES,
    await_end,
    moment,
    nearly_matches,
)
from benchmarks.faults.hosts import TIMEOUT, Hosts
from benchmarks.faults.kind import SAVES, Kind
from jaxforge.supervision.processes import free_port

HEAD, SMALL, LARGE = range(3)
DRIVER = 3
"""Number of the driver next to those of the nodes."""
_ROOM = (1, 1, 2)  # hosts of each node


class RayHosts(Hosts):
    """Nodes of a Ray cluster, and the driver of an elastic job.

    Args:
        run: the run that they train.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run, None, count=0)
        self._directory = Path(tempfile.mkdtemp(prefix="jffray"))  # paths of sockets must be short
        self._begin: dict[int, int] = {}  # characters of output before the latest start
        self._address = f"127.0.0.1:{free_port('127.0.0.1')}"

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        shutil.rmtree(self._directory, ignore_errors=True)

    def start(self, *hosts: int) -> None:
        """Start nodes."""
        for node in hosts:
            port = self._address.rpartition(":")[2]
            head = ["--head", f"--port={port}", f"--temp-dir={self._directory}",
                    "--include-dashboard=false"]  # fmt: skip
            command = [
                sys.executable, "-m", "ray.scripts.scripts", "start", "--block",
                "--disable-usage-stats", "--object-store-memory=80000000",
                f"--num-cpus={_ROOM[node]}",
                *(head if node == HEAD else [f"--address={self._address}"]),
            ]  # fmt: skip
            self._open(node, command, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="120")
            # Ray gives a node 30 s, which a busy machine may exceed.
            while not self._has_started(node):
                self._open(node, command, RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S="120")

    def _has_started(self, node: int) -> bool:
        """Wait until a node has joined the cluster; return False if it gave up."""
        process = self.supervisors[node]
        self.wait_until(
            lambda: process.poll() is not None or "runtime started" in self._latest(node),
            "a node of Ray",
        )
        return process.poll() is None

    def _latest(self, node: int) -> str:
        """Return the output of a node since its latest start."""
        return self.output(node)[self._begin[node] :]

    def drive(self) -> None:
        """Start the driver."""
        command = [
            sys.executable, "-m", "jaxforge", "supervise", "--elastic", "--engine=ray",
            f"--hosts=1:{len(ALL)}", "--host-resources=CPU=1", f"--hang-timeout={TIMEOUT}",
            "--peer-grace=3", "--backoff=1", "--", *self._train(),
        ]  # fmt: skip
        self._open(DRIVER, command, RAY_ADDRESS=self._address, RAY_DEDUP_LOGS="0")

    def _open(self, host: int, command: Sequence[str], **env: str) -> None:
        self._log(host).touch()
        self._begin[host] = len(self.output(host))
        super()._open(host, command, **env)

    def named(self, node: int, text: str) -> list[psutil.Process]:
        """Return the processes of a node with a text in their command lines."""
        return [p for p in self.processes(node) if text in _command(p)]

    def is_training(self) -> bool:
        """Return whether a process of the run is left, whoever its parent is."""
        directory = f"--checkpoint.dir={self._run.directory}"
        return any(directory in _command(process) for process in psutil.process_iter())

    def await_count(self, count: int) -> float:
        """Wait until a roster has this many hosts; return the seconds."""
        return self.wait_until(
            lambda: len(self.roster(DRIVER)) == count, f"a roster of {count} hosts"
        )


def _command(process: psutil.Process) -> str:
    """Return the command line of a process; nothing if it has ended."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def job(case: Case) -> Iterator[RayHosts]:
    """Start a cluster and a job on it."""
    with RayHosts(case.run) as hosts:
        hosts.start(HEAD, SMALL, LARGE)
        hosts.drive()
        hosts.await_step(1)
        require(hosts.roster(DRIVER) == list(ALL), "the job started without all hosts")
        yield hosts


def ends(case: Case, hosts: RayHosts, code: int = 0) -> None:
    """Wait for the end of the job, and compare the curve."""
    await_end(case, hosts, DRIVER, code=code)
    if code:
        case.goes_on()
    nearly_matches(case)


def lost(
    node: int, phase: str, *, returns: bool = False, number: int = signal.SIGKILL
) -> Callable[[Case], None]:
    """Return a scenario in which a node is killed or stopped, and perhaps replaced."""

    def scenario(case: Case) -> None:
        with job(case) as hosts:
            moment(case, hosts, phase)
            newest = max(case.run.durable(), default=0)
            if number == signal.SIGSTOP:
                hosts.freeze(node)
            else:
                hosts.signal(node, number)
            case.notes["seconds until the next roster"] = hosts.await_count(len(ALL) - _ROOM[node])
            require(hosts.resumed_from(DRIVER) >= newest, f"lost the checkpoint {newest}")
            if returns:
                hosts.supervisors[node].wait(PATIENCE)
                hosts.start(node)
                hosts.await_count(len(ALL))
            ends(case, hosts)

    return scenario


def killed(node: int, text: str) -> Callable[[Case], None]:
    """Return a scenario in which processes of a node are killed: all hosts start again."""

    def scenario(case: Case) -> None:
        with job(case) as hosts:
            moment(case, hosts, "steps")
            for process in hosts.named(node, text):
                process.kill()
            hosts.wait_until(lambda: "roster 2: " in hosts.output(DRIVER), "another roster")
            ends(case, hosts)

    return scenario


def preempted(case: Case) -> None:
    """Ask a node to end: Ray drains it, and all processes save."""
    with job(case) as hosts:
        moment(case, hosts, "steps")
        logged = case.run.last_logged()
        hosts.supervisors[SMALL].terminate()
        hosts.await_count(len(ALL) - 1)
        resumed = hosts.resumed_from(DRIVER)
        require(resumed >= logged, f"resumed from {resumed}, but step {logged} had been logged")
        ends(case, hosts)


def driver_is_stopped(case: Case) -> None:
    """Stop the driver, as `ray job stop` does; the run resumes without Ray."""
    with job(case) as hosts:
        moment(case, hosts, "steps")
        logged = case.run.last_logged()
        hosts.supervisors[DRIVER].terminate()
        await_end(case, hosts, DRIVER, code=75)
        require(max(case.run.durable()) >= logged, "nothing was saved")
    case.goes_on()
    nearly_matches(case)


def driver_is_killed(case: Case) -> None:
    """Kill the driver: no process of the run stays; the run resumes without Ray."""
    with job(case) as hosts:
        moment(case, hosts, "steps")
        hosts.supervisors[DRIVER].kill()
        hosts.supervisors[DRIVER].wait()
        hosts.wait_until(lambda: not hosts.is_training(), "all processes end")
    case.goes_on()
    nearly_matches(case)


def _kind(name: str, scenario: Callable[[Case], None], expected: str) -> Kind:
    return Kind(f"ray: {name}", 2, scenario, expected, n=len(ALL), has_ray=True)


RAY_KINDS = (
    _kind("node killed, steps", lost(SMALL, "steps"), CONTINUES),
    _kind("node with two hosts killed, save", lost(LARGE, "save"), CONTINUES),
    _kind("node stopped", lost(SMALL, "steps", number=signal.SIGSTOP), CONTINUES),
    _kind("node killed and replaced", lost(LARGE, "steps", returns=True),
          "the others continue, and take the hosts back"),
    _kind("process killed", killed(LARGE, "jaxforge.train"), ALL_AGAIN),
    _kind("actor of a host killed", killed(SMALL, "ray::Host"), ALL_AGAIN),
    _kind("node preempted", preempted, CONTINUES),
    _kind("driver stopped", driver_is_stopped, SAVES),
    _kind("driver killed", driver_is_killed, "all processes end; one process goes on"),
)  # fmt: skip
