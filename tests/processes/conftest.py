"""Real processes: `jaxforge train` as a user starts it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from jaxforge.commands import train
from jaxforge.supervision.processes import free_port
from jaxforge.tools.prove import xla_flags
from tests.machine import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]

BASE = """
[model]
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
vocab_size = 256
max_seq_len = 64
[train]
global_batch_size = 8
seq_len = 32
max_steps = 30
mixed_precision = "fp32"
[optimizer]
lr = 3e-3
[scheduler]
warmup_steps = 4
decay_steps = 26
[data]
dataset_type = "synthetic"
[checkpoint]
interval = 5
[metrics]
log_interval = 1
"""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.processes)


def environment(devices=1, **extra):
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": xla_flags(devices),
        "PYTHONUNBUFFERED": "1",
        **extra,
    }


class Run:
    """A run directory and the command that works on it."""

    def __init__(self, tmp_path: Path, name: str) -> None:
        self.directory = tmp_path / name
        self.config = tmp_path / f"{name}.toml"
        self.config.write_text(BASE)

    def command(self, *overrides: str) -> list[str]:
        return [
            sys.executable, "-m", "jaxforge.train", "--config", str(self.config),
            f"--checkpoint.dir={self.directory}", *overrides,
        ]  # fmt: skip

    def start(self, *overrides: str, devices: int = 1, **extra: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(*overrides), cwd=ROOT, env=environment(devices, **extra), text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def finish(self, *overrides: str, devices: int = 1, code: int = 0, **extra: str) -> str:
        process = self.start(*overrides, devices=devices, **extra)
        output = process.communicate(timeout=PATIENCE)[0]
        assert process.returncode == code, output
        return output

    def finish_here(self, *overrides: str, code: int = 0) -> None:
        """In this process, with all devices that it has: `capsys` has what it prints."""
        assert train.main(self.command(*overrides)[3:]) == code

    def lines(self) -> list[dict]:
        path = self.directory / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def losses(self) -> dict[int, float]:
        losses = {}
        for line in self.lines():
            if "train/loss" in line:
                assert line["step"] not in losses, "a step is logged twice"
                losses[line["step"]] = line["train/loss"]
        return losses

    def steps(self) -> list[int]:
        paths = (self.directory / "checkpoints").glob("step_*")
        return sorted(int(p.name.split("_")[1]) for p in paths if p.name.split("_")[1].isdigit())

    def wait_for_step(self, step: int, process: subprocess.Popen) -> None:
        path = self.directory / "metrics.jsonl"
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline and process.poll() is None:
            if path.exists() and f'"step": {step},' in path.read_text():
                return
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        raise AssertionError(f"never saw step {step}: {process.communicate()[0]}")


@pytest.fixture
def new_run(tmp_path):
    return lambda name="run": Run(tmp_path, name)


class Hosts:
    """Supervisors of the hosts of a job, each with a process of one device."""

    def __init__(self, run, count, directory, overrides):
        self.run, self.directory, self.supervisors = run, directory, {}
        self.overrides = overrides
        self.peers = ",".join(f"127.0.0.1:{free_port()}" for _ in range(count))

    def start(self, *hosts):
        for host in hosts:
            command = [sys.executable, "-m", "jaxforge", "supervise", "--elastic", "--peers",
                       self.peers, f"--host-index={host}", "--hang-timeout=15",
                       "--peer-grace=5", "--", *self.run.command(*self.overrides)]  # fmt: skip
            with (self.directory / f"host-{host}").open("ab") as log:
                self.supervisors[host] = subprocess.Popen(
                    command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
                )

    def processes(self, host):
        supervisor = psutil.Process(self.supervisors[host].pid)
        return [*supervisor.children(recursive=True), supervisor]

    def signal(self, host, number):
        for process in self.processes(host):
            process.send_signal(number)

    def log(self, host):
        return (self.directory / f"host-{host}").read_text()

    def await_roster(self, host, *hosts):
        """Wait until a host runs in a roster of these hosts."""
        text = f"hosts {', '.join(map(str, hosts))} of" if len(hosts) > 1 else f"host {hosts[0]} of"
        wait_until(lambda: text in self.log(host).rpartition("roster ")[2])

    def await_more_steps(self):
        first = self.latest_step()
        wait_until(lambda: self.latest_step() > first + 2)

    def latest_step(self):
        try:
            return max(self.run.losses(), default=0)
        except FileNotFoundError:  # a restart without a checkpoint renames the file
            return 0


@pytest.fixture
def new_hosts(tmp_path):
    started = []

    def new(run, count, overrides):
        started.append(Hosts(run, count, tmp_path, overrides))
        return started[-1]

    yield new
    for hosts in started:
        for supervisor in hosts.supervisors.values():
            if supervisor.poll() is None:
                for process in [*psutil.Process(supervisor.pid).children(recursive=True),
                                supervisor]:  # fmt: skip
                    process.send_signal(signal.SIGKILL)
            supervisor.wait()
