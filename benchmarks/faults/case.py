"""A run directory, the processes that work on it, and checks of the result."""

import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.faults import data
from jaxforge.supervision.processes import free_port

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL, EVALUATION = 200, 10, 50
"""Steps of a run, between its checkpoints, and between its evaluations."""
PATIENCE = 300.0
"""Seconds after which a process is taken to hang."""
_END = 1 << 16  # bytes: many lines of metrics

CONFIG = f"""
[model]
dim = 64
n_layers = 2
n_heads = 4
n_kv_heads = 2
vocab_size = {data.VOCABULARY}
max_seq_len = {data.LENGTH}
[train]
global_batch_size = {data.ROWS}
seq_len = {data.LENGTH}
max_steps = {STEPS}
mixed_precision = "fp32"
nan_consecutive_max = 3
[optimizer]
lr = 3e-3
[scheduler]
warmup_steps = 4
[data]
shuffle = false
num_workers = 1
[eval]
enabled = true
interval = {EVALUATION}
[checkpoint]
interval = {INTERVAL}
[metrics]
log_interval = 1
"""


@dataclasses.dataclass(frozen=True)
class Variation:
    """Differences of a process from the others of its job.

    Attributes:
        overrides: further settings.
        environment: further environment variables.
        root: directory of the code.
        wrapper: command that starts the process.
    """

    overrides: Sequence[str] = ()
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    root: Path = ROOT
    wrapper: Sequence[str] = ()


Curve = list[dict[str, Any]]
"""What was logged of steps and evaluations, in order, less what depends on the clock."""


class Broken(Exception):
    """Violated requirement."""


def require(holds: bool, otherwise: str) -> None:
    """Raise Broken if a condition does not hold."""
    if not holds:
        raise Broken(otherwise)


class Job:
    """Processes that were started together; their output goes to files.

    Args:
        commands: command of each process.
        environments: environment of each process.
        outputs: output file of each process.
        roots: working directory of each process.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[dict[str, str]],
        outputs: Sequence[Path],
        roots: Sequence[Path],
    ) -> None:
        self._outputs = outputs
        self.processes = []
        for command, environment, output, root in zip(
            commands, environments, outputs, roots, strict=True
        ):
            with output.open("wb") as file:
                process = subprocess.Popen(
                    command, cwd=root, env=environment, stdout=file, stderr=subprocess.STDOUT
                )
            self.processes.append(process)

    @property
    def ended(self) -> bool:
        """Return whether all processes have ended."""
        return all(process.poll() is not None for process in self.processes)

    def kill(self) -> None:
        """Kill all processes with SIGKILL."""
        for process in self.processes:
            process.kill()

    def signal(self, number: int) -> None:
        """Send a signal to all running processes."""
        for process in self.processes:
            process.send_signal(number)

    def wait_at_most(self, seconds: float) -> None:
        """Wait for a time or until all processes have ended."""
        deadline = time.monotonic() + seconds
        while not self.ended and time.monotonic() < deadline:
            time.sleep(0.005)

    def wait(self, patience: float = PATIENCE) -> list[int]:
        """Return the exit codes; those of signals are negative.

        Args:
            patience: seconds after which a process is taken to hang.

        Raises:
            Broken: a process does not end.
        """
        deadline = time.monotonic() + patience
        try:
            return [p.wait(max(0.1, deadline - time.monotonic())) for p in self.processes]
        except subprocess.TimeoutExpired:
            self.kill()
            raise Broken(f"did not end within {patience:.0f} s: {self.tail()}") from None

    def output(self) -> str:
        """Return the output of all processes."""
        return "\n".join(path.read_text(errors="replace") for path in self._outputs)

    def last_step(self) -> int:
        """Return the last step on the console, or 0."""
        steps = re.findall(r"^\[step (\d+)\]", self.output(), re.MULTILINE)
        return max(map(int, steps), default=0)

    def tail(self) -> str:
        """Return the end of the output."""
        return self.output()[-1500:]


class Run:
    """Run directory and the command that works on it.

    Args:
        directory: directory of the run; data and outputs are next to it.
        compiled: compilation cache that all runs share.
        tokens: directory that `data.write` wrote.

    Attributes:
        location: `checkpoint.dir`, if it is not the directory.
        data: settings of the data, if they are not those of `tokens`.
        n: number of processes.
        variations: differences of processes, by their numbers, at starts that state none.
        job: settings that change the curve. `{tokens}` stands for the directory of the data.
        settings: further settings of each start.
        environment: further environment variables of all processes.
        fetch: copies a run from its location to the directory.
    """

    def __init__(self, directory: Path, compiled: Path, tokens: Path) -> None:
        self.directory, self._compiled, self.tokens = directory, compiled, tokens
        self._starts = 0
        self.location = str(directory)
        self.data: Sequence[str] = ()
        self.n = 1
        self.job: Sequence[str] = ()
        self.variations: Mapping[int, Variation] = {}
        self.settings: Sequence[str] = ()
        self.environment: dict[str, str] = {}
        self.fetch: Callable[[], None] = lambda: None
        self.config = directory.with_suffix(".toml")
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(CONFIG)

    @property
    def checkpoints(self) -> Path:
        """Directory of the checkpoints."""
        return self.directory / "checkpoints"

    def start(
        self,
        *overrides: str,
        fault: Sequence[Any] = (),
        only: int | None = None,
        variations: Mapping[int, Variation] | None = None,
    ) -> Job:
        """Start processes.

        Args:
            overrides: further settings.
            fault: name and arguments of a fault in `inject`.
            only: number of the process with the fault; by default all have it.
            variations: differences of processes, by their numbers.
        """
        n, port = self.n, free_port("127.0.0.1")
        self._starts += 1
        commands, environments, outputs, roots = [], [], [], []
        for index in range(n):
            broken = fault if only in (None, index) else ()
            other = (variations or self.variations).get(index) or Variation()
            module = [f"{__package__}.inject", broken[0], json.dumps(broken[1])] if broken else []
            command = self._command(module or ["jaxforge.train"], [*overrides, *other.overrides])
            commands.append([*other.wrapper, *command])
            environments.append({**self._environment(port, n, index), **other.environment})
            outputs.append(self.directory.with_suffix(f".{self._starts}.{index}.log"))
            roots.append(other.root)
        return Job(commands, environments, outputs, roots)

    def _command(self, module: Sequence[str], overrides: Sequence[str]) -> list[str]:
        tokens = self.data or [
            f"--data.dataset_path={self.tokens / data.TRAINING}",
            f"--eval.dataset_path={self.tokens / data.HELD_OUT}",
        ]
        return [
            sys.executable, "-m", *module, "--config", str(self.config),
            f"--checkpoint.dir={self.location}", *tokens,
            *(setting.replace("{tokens}", str(self.tokens))
              for setting in (*self.job, *self.settings, *overrides)),
        ]  # fmt: skip

    def _environment(self, port: int, n: int, index: int) -> dict[str, str]:
        several = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(n),
                   "JAX_PROCESS_ID": str(index)}  # fmt: skip
        return {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
            "PYTHONUNBUFFERED": "1",
            "JAX_COMPILATION_CACHE_DIR": str(self._compiled),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **self.environment,
            **(several if n > 1 else {}),
        }

    def durable(self) -> list[int]:
        """Return the sorted steps of the checkpoints."""
        numbers = (path.name.removeprefix("step_") for path in self.checkpoints.glob("step_*"))
        return sorted(int(number) for number in numbers if number.isdigit())

    def is_torn(self) -> bool:
        """Return whether a partial checkpoint exists."""
        return any(self.checkpoints.glob("*.orbax-checkpoint-tmp*"))

    def logged(self) -> list[dict[str, Any]]:
        """Return the complete lines of `metrics.jsonl`."""
        path = self.directory / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def last_logged(self) -> int:
        """Return the step of the last complete line, or 0."""
        path = self.directory / "metrics.jsonl"
        if not path.exists():
            return 0
        # The end only: this is asked many times per second, and a long run has megabytes of lines.
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _END))
            lines = file.read().split(b"\n")[:-1]
        for line in reversed(lines):
            with contextlib.suppress(ValueError):  # the first line may be a part
                return int(json.loads(line)["step"])
        return 0

    def curve(self) -> Curve:
        """Return the values that must be bit-identical after any fault."""
        return [_timeless(x) for x in self.logged() if {"train/loss", "eval/loss"} & x.keys()]

    def progress(self, step: int) -> dict[str, Any]:
        """Return the counters of a checkpoint."""
        return json.loads((self.checkpoints / f"step_{step}" / "progress" / "metadata").read_text())


_OF_A_STEP = ("train/loss", "train/grad_norm", "train/lr", "train/tokens", "train/skipped_steps")


def _timeless(line: dict[str, Any]) -> dict[str, Any]:
    lines = {"step", *_OF_A_STEP}
    return {k: v for k, v in line.items() if k in lines or k.startswith("eval/")}


@dataclasses.dataclass
class Shared:
    """Undisturbed runs and their data, computed once and shared by cases."""

    root: Path
    lock: Any = dataclasses.field(default_factory=threading.RLock)
    runs: dict[tuple[Any, ...], Run] = dataclasses.field(default_factory=dict)
    _locks: dict[tuple[Any, ...], Any] = dataclasses.field(default_factory=dict)

    def tokens(self, left_out: Sequence[int] = ()) -> Path:
        """Return the data without some batches."""
        name = f"{left_out[0]}-{left_out[-1]}" if left_out else "whole"
        path = self.root / "tokens" / name
        with self.lock:
            if not path.exists():
                data.write(path, left_out)
        return path

    def undisturbed(
        self, *overrides: str, n: int = 1, left_out: Sequence[int] = (), code: int = 0
    ) -> Run:
        """Return an undisturbed run."""
        key = (overrides, n, tuple(left_out))
        with self.lock:
            lock = self._locks.setdefault(key, threading.Lock())
            number = list(self._locks).index(key)
        with lock:  # cases wait for the run that they need, but not for other ones
            if key not in self.runs:
                directory = self.root / "undisturbed" / str(number)
                run = Run(directory, self.root / "compiled", self.tokens(left_out))
                run.n = n
                job = run.start(*overrides)
                require(set(job.wait()) == {code}, f"an undisturbed run failed: {job.tail()}")
                self.runs[key] = run
            return self.runs[key]


class Case:
    """Fault case: random numbers, run directory and observations.

    Attributes:
        rng: generator seeded by the case's name.
        codes: exit codes of the processes that met the fault.
        identical: whether the curve was compared and equal.
        torn: whether a partial checkpoint was left.
        notes: measured values by name.
    """

    def __init__(self, name: str, shared: Shared) -> None:
        self.name, self.shared, self.rng = name, shared, random.Random(name)
        self._root = shared.root / "cases" / name.replace(" ", "_")
        self.run = Run(self._root / "run", shared.root / "compiled", shared.tokens())
        self.codes: list[int] = []
        self.identical: bool | None = None
        self.torn = False
        self.notes: dict[str, float] = {}
        self._mounted: list[Path] = []

    def own_tokens(self) -> Path:
        """Return a copy of the data that may be damaged."""
        self.run.tokens = self._root / "tokens"
        return shutil.copytree(self.shared.tokens(), self.run.tokens)

    def mount(self, directory: Path, *how: str) -> None:
        """Mount a file system at a directory until the case ends."""
        directory.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", *how, str(directory)], check=True)
        self._mounted.append(directory)

    def unmount(self) -> None:
        """Unmount all file systems."""
        while self._mounted:
            subprocess.run(["umount", str(self._mounted.pop())], check=True)

    def close(self, *, keep: bool) -> None:
        """Remove the case's files unless they are to be kept."""
        self.unmount()
        if not keep:
            shutil.rmtree(self._root)

    def ends(self, job: Job, *codes: int, noisy: bool = False, patience: float = PATIENCE) -> str:
        """Wait for a job with a fault and return its output.

        Args:
            job: the job.
            codes: allowed exit codes.
            noisy: whether libraries may print tracebacks.
            patience: seconds after which a process is taken to hang.

        Raises:
            Broken: the job ended with another code or with a traceback.
        """
        seen = job.wait(patience)
        self.run.fetch()
        self.codes += seen
        self.torn |= self.run.is_torn()
        require(set(seen) <= set(codes), f"exit codes {seen}, not {codes}: {job.tail()}")
        has_words = not noisy and not ({-signal.SIGKILL, -signal.SIGABRT, 1} & set(seen))
        require(not (has_words and "Traceback" in job.output()), f"traceback: {job.tail()}")
        return job.output()

    def says(self, output: str, *texts: str) -> None:
        """Require texts in the output."""
        for text in texts:
            require(text in output, f"does not say {text!r}: {output[-1500:]}")

    def undisturbed(self, *overrides: str, left_out: Sequence[int] = (), code: int = 0) -> Run:
        """Return an undisturbed run of the same job."""
        settings = (*self.run.job, *overrides)
        return self.shared.undisturbed(*settings, n=self.run.n, left_out=left_out, code=code)

    def goes_on(self, *overrides: str, fault: Sequence[Any] = ()) -> str:
        """Run the command again, from the newest durable step to the end; return the output."""
        durable = self.run.durable()
        job = self.run.start(*overrides, fault=fault)
        require(set(job.wait()) == {0}, f"does not go on: {job.tail()}")
        self.run.fetch()
        output = job.output()
        if durable:
            self.says(output, f"resuming from step {durable[-1]} ")
        else:
            require("resuming" not in output, "resumes, from nothing")
        require(self.run.durable()[-1] == STEPS, "the last step is not saved")
        require(not self.run.is_torn(), "a torn checkpoint is left")
        return output

    def matches(self, reference: Run, unlike: Sequence[int] = ()) -> None:
        """Compare the curve with that of another run, except for the steps `unlike`."""
        ours, theirs = ([line for line in run.curve() if line["step"] not in unlike]
                        for run in (self.run, reference))  # fmt: skip
        self.identical = ours == theirs
        if not self.identical:
            differ = [o["step"] for o, t in zip(ours, theirs, strict=False) if o != t]
            counts = collections.Counter(line["step"] for line in ours if "train/loss" in line)
            twice = [step for step, count in counts.items() if count > 1]
            missing = sorted(set(range(1, STEPS + 1)) - counts.keys() - set(unlike))
            raise Broken(f"another curve: from step {differ[:1]}; {twice=} {missing=}")

    def wait_until(self, true: Callable[[], bool], job: Job) -> None:
        """Wait until a condition is true or the job has ended."""
        while not true() and not job.ended:
            time.sleep(0.01)
