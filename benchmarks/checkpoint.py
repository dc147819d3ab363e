"""Time for which an asynchronous save blocks the loop, until it is durable, and of a restore.

    python benchmarks/checkpoint.py [--quick]

The same random state (parameters and both AdamW moments in float32; 10 GB on a GPU) is saved
alternately by jaxforge and by PyTorch's distributed checkpoint (`async_save`, one process, default
settings). Both sync their files before they are done, and then remove the previous save. Each save
is directly followed by an in-place update of the whole state, so that costs that a save defers to
the next step count. A restore writes the last save into the state; its files are in the page cache.
"""

import dataclasses
import itertools
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import results
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import parameter_count
from jaxforge.parallel import host_memory
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState

SHAPES = {
    "quick": {"dim": 128, "n_layers": 4, "n_heads": 4, "vocab_size": 1024},
    "cpu": {"dim": 512, "n_layers": 14, "n_heads": 8, "vocab_size": 8192},
    "gpu": {
        "dim": 2048,
        "n_layers": 12,
        "n_heads": 16,
        "ffn_hidden_dim": 8192,
        "vocab_size": 16384,
    },
}
Times = tuple[float, ...]
"""Seconds of each action of `WHAT`."""

WHAT = ("call", "call and slower next update", "until durable", "restore")


class Saver(NamedTuple):
    """Subject of the comparison: four actions on a state."""

    save: Callable[[Path, int], None]
    update: Callable[[], None]
    wait: Callable[[], None]
    restore: Callable[[], object]


def state_of(size: str) -> tuple[TrainState, int, PyTree]:
    """Return a state on one device, its number of parameters and their logical axes."""
    config = JobConfig.model_validate({"model": SHAPES[size]})
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    with program.context():
        state = program.init(0)
        # Moments of zero would compress to nothing.
        moments = jax.tree.map(lambda x: jax.random.normal(jax.random.key(x.size), x.shape), state)
        state = dataclasses.replace(state, opt_state=moments.opt_state)
    return jax.block_until_ready(state), parameter_count(program.model.abstract), program.model.axes


def ours(state: TrainState, axes: PyTree) -> Saver:
    """Return a saver that uses one `Checkpoints` manager for all saves, as in a run."""
    held, managers = [state], dict[Path, Checkpoints]()
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    scale = jax.jit(
        lambda s: jax.tree.map(lambda x: (x * 0.999).astype(x.dtype), s), donate_argnums=0
    )

    def save(directory: Path, step: int) -> None:
        if not managers:
            managers[directory] = Checkpoints(directory, CheckpointConfig(keep_last_n=1), axes)
        managers[directory].save(Progress(step=step), held[0])

    def update() -> None:
        held[0] = jax.block_until_ready(scale(held[0]))

    def restore() -> None:
        (manager,) = managers.values()
        latest = manager.latest()
        assert latest is not None
        held[0] = jax.block_until_ready(manager.restore(like, latest)[0])

    return Saver(save, update, lambda: next(iter(managers.values())).wait(), restore)


def theirs(state: TrainState) -> Saver:
    """Return a saver that saves the arrays as tensors with DCP's `async_save`."""
    tree = {"params": state.params, **_moments(state)}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    tensors = {
        name: torch.tensor(jax.device_get(leaf), device=device)
        for name, leaf in flatten_dict(tree, sep=".").items()
    }
    futures: list[Any] = []
    saved: list[Path] = []

    def save(directory: Path, step: int) -> None:
        saved.append(directory / f"step_{step}")
        futures[:] = [dcp.async_save(tensors, checkpoint_id=saved[-1])]

    def update() -> None:
        torch._foreach_mul_(list(tensors.values()), 0.999)
        if device == "cuda":
            torch.cuda.synchronize()

    def wait() -> None:
        futures[0].result()
        while len(saved) > 1:
            shutil.rmtree(saved.pop(0))

    return Saver(save, update, wait, lambda: dcp.load(tensors, checkpoint_id=saved[-1]))


def _moments(state: TrainState) -> dict[str, PyTree]:
    (adam,) = (node for node in state.opt_state if hasattr(node, "mu"))
    return {"mu": adam.mu, "nu": adam.nu}


def times_of(saver: Saver, directory: Path, step: int) -> Times:
    """Time a save and the update after it, relative to an update without a save; and a restore."""
    clock = [time.perf_counter()]
    actions = (
        saver.update, lambda: saver.save(directory, step), saver.update, saver.wait, saver.restore
    )  # fmt: skip
    for action in actions:
        action()
        clock.append(time.perf_counter())
    alone, call, disturbed, _, restore = (b - a for a, b in itertools.pairwise(clock))
    return call, call + disturbed - alone, clock[4] - clock[1], restore


def measure(savers: dict[str, Saver], rounds: int) -> dict[str, Times]:
    """Return the median milliseconds of each, alternating; the first round is warm-up."""
    times: dict[str, list[Times]] = {name: [] for name in savers}
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:
        for step in range(1, rounds + 2):
            for name, saver in savers.items():
                times[name].append(times_of(saver, Path(directory) / name, step))
    return {
        name: tuple(1e3 * statistics.median(column) for column in zip(*rows[1:], strict=True))
        for name, rows in times.items()
    }


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    results.leave_room()
    host_memory.keep_freed_memory()  # as a run does
    on_gpu = jax.default_backend() == "gpu"
    state, parameters, axes = state_of("quick" if quick else "gpu" if on_gpu else "cpu")
    dist.init_process_group("cpu:gloo", rank=0, world_size=1, store=dist.HashStore())
    savers = {"theirs": theirs(state), "ours": ours(state, axes)}
    times = measure(savers, rounds=2 if quick else 1 if on_gpu else 7)
    size = f"{parameters / 1e6:.0f}M parameters, {parameters * 12 / 1e6:,.0f} MB"
    rows = [
        results.Row(f"{what}, {size}", round(our, 1), "torch DCP async_save", round(their, 1), "ms",
                    smaller_is_better=True)
        for what, our, their in zip(WHAT, times["ours"], times["theirs"], strict=True)
    ]  # fmt: skip
    results.report("checkpoint", rows, ("jax", "orbax-checkpoint", "torch"), write=not quick)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
