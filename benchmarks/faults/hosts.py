"""Hosts of an elastic job on one machine: supervisors that can be killed and frozen."""

import contextlib
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from benchmarks.faults import data
from benchmarks.faults.case import PATIENCE, ROOT, Broken, Run
from benchmarks.faults.network import Network
from jaxforge.supervision.processes import free_port

N_HOSTS = 4
TIMEOUT = 6.0
"""`--hang-timeout` of the supervisors, in seconds."""


class Hosts:
    """Supervisors of an elastic job with one process and one device per host.

    Args:
        run: the run that they train.
        network: network of the hosts; None for ports of this machine.
        overrides: further settings of the run.
        count: number of hosts.
        program: command of a process, up to the options of `jaxforge train`.
        are_pods: whether the hosts find each other by their names, as pods of a JobSet.
    """

    def __init__(
        self,
        run: Run,
        network: Network | None,
        overrides: Sequence[str] = (),
        count: int = N_HOSTS,
        program: Sequence[str] = (sys.executable, "-m", "jaxforge.train"),
        are_pods: bool = False,
    ) -> None:
        self._count, self._are_pods = count, are_pods
        self._run, self._network, self._overrides = run, network, overrides
        self._program = program
        names = [network.address(i) if network else "127.0.0.1" for i in range(count)]
        self._peers = ",".join(f"{name}:{free_port('127.0.0.1')}" for name in names)
        self.supervisors: dict[int, subprocess.Popen[bytes]] = {}
        self._frozen: list[psutil.Process] = []

    def __enter__(self) -> "Hosts":
        return self

    def __exit__(self, *_: object) -> None:
        self.thaw()
        for host in list(self.supervisors):
            self.signal(host, signal.SIGKILL)
            self.supervisors[host].wait()

    def start(self, *hosts: int) -> None:
        """Start the supervisors of some hosts."""
        for host in hosts:
            inside = self._network.command(host) if self._network else []
            engine, env = [f"--peers={self._peers}", f"--host-index={host}"], {}
            if self._are_pods:
                assert self._network is not None
                inside, env = self._network.pod_command(host), {"JOB_COMPLETION_INDEX": str(host)}
                engine = ["--engine=jobset", f"--hosts=1:{self._count}"]
            command = [
                *inside, sys.executable, "-m", "jaxforge", "supervise", "--elastic", *engine,
                f"--hang-timeout={TIMEOUT}", "--peer-grace=3", "--backoff=1", "--", *self._train(),
            ]  # fmt: skip
            self._open(host, command, **env)

    def _open(self, host: int, command: Sequence[str], **env: str) -> None:
        with self._log(host).open("ab") as file:
            self.supervisors[host] = subprocess.Popen(
                command, cwd=ROOT, env={**self._run._environment(0, 1, 0), **env}, stdout=file,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def _train(self) -> list[str]:
        return [
            *self._program, "--config", str(self._run.config),
            f"--checkpoint.dir={self._run.directory}",
            f"--data.dataset_path={self._run.tokens / data.TRAINING}",
            f"--eval.dataset_path={self._run.tokens / data.HELD_OUT}",
            '--plugins.callbacks=["benchmarks.faults.pace.Pace"]', "--distributed.dp_shard=-1",
            *self._overrides,
        ]  # fmt: skip

    def _log(self, host: int) -> Path:
        return self._run.directory.with_suffix(f".host{host}.log")

    def output(self, host: int) -> str:
        """Return the output of a host's supervisor and processes."""
        return self._log(host).read_text(errors="replace")

    def processes(self, host: int) -> list[psutil.Process]:
        """Return the processes of a host, its supervisor first."""
        with contextlib.suppress(psutil.NoSuchProcess):
            supervisor = psutil.Process(self.supervisors[host].pid)
            return [supervisor, *supervisor.children(recursive=True)]
        return []

    def signal(self, host: int, number: int) -> None:
        """Send a signal to the supervisor and all processes of a host."""
        for process in self.processes(host):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def freeze(self, host: int) -> None:
        """Stop all processes of a host until `thaw`."""
        processes = self.processes(host)
        for process in processes:
            process.suspend()
        self._frozen += processes

    def thaw(self) -> None:
        """Let the stopped processes run."""
        for process in self._frozen:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
        self._frozen.clear()

    def roster(self, host: int) -> list[int]:
        """Return the hosts of the latest roster that a host has joined."""
        rosters = re.findall(r"roster \d+: hosts? ([\d, ]+) of", self.output(host))
        return [int(number) for number in rosters[-1].split(",")] if rosters else []

    def wait_until(self, true: Callable[[], bool], what: str) -> float:
        """Wait until a condition is true; return the seconds.

        Raises:
            Broken: it does not become true.
        """
        began = time.monotonic()
        while not true():
            if time.monotonic() - began > PATIENCE:
                ends = "\n".join(self.output(host)[-600:] for host in self.supervisors)
                raise Broken(f"not within {PATIENCE:.0f} s: {what}\n{ends}")
            time.sleep(0.05)
        return time.monotonic() - began

    def await_step(self, step: int) -> float:
        """Wait until a step is logged; return the seconds."""
        return self.wait_until(lambda: self._run.last_logged() >= step, f"step {step}")

    def await_roster(self, *hosts: int) -> float:
        """Wait until exactly these hosts have joined a roster together; return the seconds."""
        return self.wait_until(
            lambda: all(self.roster(host) == list(hosts) for host in hosts), f"roster {hosts}"
        )

    def resumed_from(self, host: int) -> int:
        """Wait until the process of a host that has process 0 resumes; return the step.

        It is 0 for a run that begins again, because no checkpoint was durable.
        """
        steps: list[str] = []

        def has_resumed() -> bool:
            latest = self.output(host).rpartition(" supervise: roster ")[2]
            steps[:] = re.findall(r"resuming from step (\d+)", latest)
            if not steps and "[step 1]" in latest:
                steps[:] = ["0"]
            return bool(steps)

        self.wait_until(has_resumed, "a resumed run")
        return int(steps[-1])

    def codes(self, *hosts: int) -> list[int]:
        """Return the exit codes of supervisors."""
        try:
            return [self.supervisors[host].wait(PATIENCE) for host in hosts]
        except subprocess.TimeoutExpired:
            ends = "\n".join(self.output(host)[-600:] for host in hosts)
            raise Broken(f"a supervisor did not end: {ends}") from None
