"""Copies of the state in memory after a fault: jaxforge's replicas and Orbax's P2P manager.

    python benchmarks/replicas.py [--quick] [--cases WORDS]

Two processes, each with one device and a host (a directory on tmpfs) of its own, save a permanent
checkpoint of step 1 and copies in memory of later steps, and are killed. After a fault, processes
are started anew and restore what they can; every bit is compared with what was saved. Orbax's
manager is measured with the state sharded over both processes, as jaxforge's is, and with a whole
copy of the state on each process (`replicated`), for which it was made.

Seconds are those of the slowest process, without its start.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import results
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree
from orbax.checkpoint.experimental.emergency.p2p import args, checkpoint_manager, options

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.checkpoint.restore import starting_state
from jaxforge.config.job import JobConfig
from jaxforge.parallel import agreement, multihost
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState
from jaxforge.supervision.processes import free_port

SUBJECTS = ("jaxforge", "orbax", "orbax, replicated")
SHAPES = {
    True: {"dim": 128, "n_layers": 4, "n_heads": 4, "vocab_size": 1024},
    False: {"dim": 512, "n_layers": 4, "n_heads": 8, "vocab_size": 8192},
}
LAST = 4  # step of the newest complete copy
NEVER = 1 << 30  # interval
TIMEOUT_SEC = 120


class Ours:
    """Replicas and checkpoints of jaxforge."""

    def __init__(self, task: dict[str, Any], program: Program) -> None:
        self.program, config, stack = program, program.config.checkpoint, program.model.stack
        run = Path(task["disk"]) / "run"
        self.checkpoints = Checkpoints(run, config, program.model.axes, stack=stack)
        section = config.with_values({"replica_interval": 1, "replica_dir": task["memory"]})
        self.replicas = Replicas(section, run, "benchmark", {}, stack)

    def save(self, step: int, state: TrainState, *, is_permanent: bool) -> None:
        """Start to save a permanent checkpoint or a copy."""
        saver = self.checkpoints if is_permanent else self.replicas
        saver.save(Progress(step=step), state)

    def wait(self) -> None:
        """Wait for the saves."""
        self.checkpoints.wait()
        self.replicas.wait()

    def restore(self) -> PyTree:
        """Return the newest state."""
        sources = self.replicas.sources
        return tree_of(starting_state(self.program, self.checkpoints, replicas=sources)[0])


class Orbax:
    """Orbax's manager with peer-to-peer copies. It saves permanent checkpoints, too."""

    def __init__(self, task: dict[str, Any], program: Program) -> None:
        self.like = tree_of(program.abstract_state())
        disk, memory = Path(task["disk"]) / "orbax", Path(task["memory"])
        for path in (disk, memory):
            path.mkdir(parents=True, exist_ok=True)
        permanent, copies = task.get("permanent"), task.get("copies")
        local = options.LocalCheckpointOptions(1, copies[0] if copies else NEVER, max_to_keep=2)
        self.manager = checkpoint_manager.CheckpointManager(
            program.mesh, self.like, memory, disk,
            options=options.CheckpointManagerOptions(
                local, options.PersistentCheckpointOptions(NEVER, permanent or NEVER),
                program.mesh.axis_names.index("dp_replicate"),
            ),
        )  # fmt: skip

    def save(self, step: int, state: TrainState, *, is_permanent: bool) -> None:
        """Start to save what the intervals of the manager say."""
        del is_permanent
        self.manager.save(step, args.Composite(state=ocp.args.PyTreeSave(tree_of(state))))

    def wait(self) -> None:
        """Wait for the saves."""
        self.manager.wait_until_finished()

    def restore(self) -> PyTree:
        """Return the state that the manager prefers."""
        composite = args.Composite(state=ocp.args.PyTreeRestore(self.like))
        return self.manager.restore(None, composite).state


def tree_of(state: TrainState) -> PyTree:
    """Return the arrays that are saved, by name."""
    return flatten_dict(layout.to_tree(layout.stored_state(state)), sep=".")


def state_of(program: Program, step: int) -> TrainState:
    """Return a state whose arrays depend on the step."""
    abstract = program.abstract_state()

    def content(step: jax.Array) -> TrainState:
        def values(leaf: jax.ShapeDtypeStruct) -> jax.Array:
            angles = 0.7311 * jnp.arange(leaf.size, dtype=jnp.float32) + step
            return jnp.sin(angles).reshape(leaf.shape).astype(leaf.dtype)

        return dataclasses.replace(jax.tree.map(values, abstract), step=step)

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    call = jax.jit(content, out_shardings=shardings)
    with program.context():
        return jax.block_until_ready(call(jnp.asarray(step, abstract.step.dtype)))


def save(task: dict[str, Any], program: Program, subject: Ours | Orbax) -> list[float]:
    """Save steps; return median seconds of blocking and until complete, without the first copy."""
    update = jax.jit(
        lambda s: jax.tree.map(lambda x: (x * 0.999).astype(x.dtype), s), donate_argnums=0
    )
    times = []
    for step in [task["permanent"], *task["copies"]]:
        state = state_of(program, step)
        spare = jax.block_until_ready(update(state_of(program, 0)))
        began = time.perf_counter()
        jax.block_until_ready(update(spare))
        alone = time.perf_counter() - began
        began = time.perf_counter()
        subject.save(step, state, is_permanent=step == task["permanent"])
        if step == task.get("torn"):
            os.kill(os.getpid(), signal.SIGKILL)
        jax.block_until_ready(update(state))  # pays for what the call has deferred
        blocked = time.perf_counter() - began - alone
        subject.wait()
        times.append((blocked, time.perf_counter() - began))
    return [statistics.median(column) for column in zip(*times[2:] or [(0, 0)], strict=True)]


def restore(program: Program, make: Callable[[], Ours | Orbax]) -> list[Any]:
    """Return the restored step, the seconds, and whether all values are those saved."""
    began = time.perf_counter()
    tree = jax.block_until_ready(make().restore())
    seconds = time.perf_counter() - began
    step = int(tree["step"].addressable_data(0))
    saved = tree_of(state_of(program, step))
    is_same = all(
        np.array_equal(tree[name].addressable_data(0), leaf.addressable_data(0))
        for name, leaf in saved.items()
        if leaf.size > 1
    )
    return [step, seconds, is_same]


def act(task: dict[str, Any]) -> None:
    """Act as a process of the job, print the result, and die without an orderly end."""
    if task["processes"] > 1:
        multihost.initialize()
    is_replicated = task["subject"] == "orbax, replicated" and task["processes"] > 1
    axes = {"dp_replicate": 2, "dp_shard": 1} if is_replicated else {"dp_shard": task["processes"]}
    config = JobConfig.model_validate({"model": SHAPES[task["quick"]], "distributed": axes})
    program = Program(config, make_mesh(config))
    subject = Ours if task["subject"] == "jaxforge" else Orbax
    # Orbax's manager exchanges what hosts hold in a way that no mesh may be set for.
    with program.context() if subject is Ours else contextlib.nullcontext():
        if task["action"] == "save":
            result = save(task, program, subject(task, program))
        else:
            result = restore(program, lambda: subject(task, program))
    print("result", json.dumps(result), flush=True)
    if task["processes"] > 1:
        agreement.gather("")  # without process 0, JAX ends the others before they print
    os.kill(os.getpid(), signal.SIGKILL)


class Bench(NamedTuple):
    """Directories of a subject: one on disk, and one in memory for each host."""

    subject: str
    quick: bool
    disk: Path
    memory: Path

    def run(self, hosts: tuple[int, ...], **task: Any) -> list[Any]:  # noqa: ANN401
        """Run one process on each host; return what each printed last, or its errors."""
        port, processes = free_port(), []
        task |= {"subject": self.subject, "quick": self.quick, "processes": len(hosts)}
        env = os.environ | {"JAX_PLATFORMS": "cpu",
                            "JAX_COMPILATION_CACHE_DIR": f"{self.disk}_programs"}  # fmt: skip
        for index, host in enumerate(hosts):
            task |= {"disk": str(self.disk), "memory": str(self.memory / f"host_{host}")}
            job = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                   "JAX_NUM_PROCESSES": str(len(hosts)), "JAX_PROCESS_ID": str(index)}  # fmt: skip
            processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, "--act", json.dumps(task)], text=True,
                    env=env | (job if len(hosts) > 1 else {}),
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip
        printed, deadline = [], time.monotonic() + TIMEOUT_SEC
        for process in processes:
            try:
                out, err = process.communicate(timeout=max(1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # waits for a process that has failed
                process.kill()
                out, err = process.communicate()
            lines = [line[7:] for line in out.splitlines() if line.startswith("result ")]
            printed.append(json.loads(lines[-1]) if lines else err)
        return printed

    def begin(self, *steps: int, **more: int) -> list[Any]:
        """Save step 1 permanently and copies of steps in memory."""
        for path in (self.disk, self.memory):
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir()
        return self.run((0, 1), action="save", permanent=1, copies=steps, **more)

    def reset(self, *, keep: bool = False) -> None:
        """Bring the directories back as they were when they were last kept, or keep them."""
        for path in map(str, (self.disk, self.memory)):
            source, target = (path, f"{path}_kept") if keep else (f"{path}_kept", path)
            shutil.rmtree(target, ignore_errors=True)
            shutil.copytree(source, target)

    def files(self) -> dict[Path, int]:
        """Return the size of each file in memory."""
        return {path: path.stat().st_size for path in self.memory.rglob("*") if path.is_file()}

    def lose(self, *hosts: int) -> None:
        """Remove the memory of hosts."""
        for host in hosts:
            shutil.rmtree(self.memory / f"host_{host}")

    def flip_bit(self) -> None:
        """Flip a bit in the largest file of the newest copy on host 1: its own array data."""
        pattern = re.compile(rf"host_1/(.*/)?(step_)?{LAST}[./].*(1\.data|/d/)")
        newest = {path: n for path, n in self.files().items() if pattern.search(str(path))}
        path = max(newest, key=lambda path: newest[path])
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Bench], object], tuple[int, ...]]] = {
    "both processes killed": (lambda bench: None, (0, 1)),
    "memory of one host lost": (lambda bench: bench.lose(1), (0, 1)),
    "memory of both hosts lost": (lambda bench: bench.lose(0, 1), (0, 1)),
    "killed while the next copy is written": (
        lambda bench: bench.begin(*range(2, LAST + 2), torn=LAST + 1), (0, 1)
    ),
    "a bit flipped in the newest copy": (Bench.flip_bit, (0, 1)),
    "processes exchange their hosts": (lambda bench: None, (1, 0)),
    "one host left, a job of one process": (lambda bench: bench.lose(1), (0,)),
    "the permanent checkpoint is newer": (
        lambda bench: bench.run((0, 1), action="save", permanent=LAST + 1, copies=[]), (0, 1)
    ),
}  # fmt: skip


def outcome(printed: list[Any]) -> str:
    """Return the restored step and the seconds in words."""
    for result in printed:
        if isinstance(result, str):
            print(result[-3000:], file=sys.stderr)
            return "no start"
    seconds = max(seconds for _, seconds, _ in printed)
    is_same = all(is_same for _, _, is_same in printed)
    return f"step {printed[0][0]}, {seconds:.1f} s" if is_same else "WRONG VALUES"


def measure(subject: str, quick: bool, cases: str) -> dict[str, str]:
    """Return the column of a subject."""
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd()) as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        bench = Bench(subject, quick, Path(disk) / "disk", Path(memory) / "memory")
        times = bench.begin(*range(2, LAST + 1))
        if any(isinstance(result, str) for result in times):
            raise SystemExit("\n".join(map(str, times)))
        blocked, complete = (max(column) for column in zip(*times, strict=True))
        column = {
            "training waits for a copy": f"{blocked:.2f} s",
            "until the copy is complete": f"{complete:.2f} s",
            "two steps in the memory of both hosts": f"{sum(bench.files().values()) / 1e6:,.0f} MB",
        }
        bench.reset(keep=True)
        for name, (fault, hosts) in FAULTS.items():
            if cases in name:
                bench.reset()
                fault(bench)
                column[name] = outcome(bench.run(hosts, action="restore"))
                print(f"{subject}: {name}: {column[name]}", flush=True)
        return column


def main() -> None:
    """Print the table and write the results."""
    parser = results.arguments(__doc__, cases=True)
    parser.add_argument("--act", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.act:
        act(chosen.act)
    columns = {subject: measure(subject, chosen.quick, chosen.cases) for subject in SUBJECTS}
    rows = [
        {"case": case, **{subject: columns[subject][case] for subject in SUBJECTS}}
        for case in columns["jaxforge"]
    ]
    for row in rows:
        print(" | ".join(row.values()))
    if not chosen.quick and not chosen.cases:
        results.write_json("replicas", rows, ("jax", "orbax-checkpoint"))


if __name__ == "__main__":
    main()
