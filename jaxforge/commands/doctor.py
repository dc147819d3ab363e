"""`jaxforge doctor`: check the installation and the devices."""

import functools
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxforge.cli.redaction import redacted_message
from jaxforge.cli.running import run_main, wide_console
from jaxforge.commands.command_line import CommandParser
from jaxforge.tools.starting.machine import gpu_memories

_ABOUT = """`jaxforge doctor`: check the installation and the devices.

The exit code is 1 if there is a problem. Include the output in bug reports.
"""

_EXTRAS = {
    "torch": ("torch", "exports and imports that run PyTorch"),
    "transformers": ("transformers", "models for comparison"),
    "data": ("pyarrow", "Parquet files and Hugging Face datasets"),
    "tensorboard": ("tensorboardX", "tensorboard in metrics.writers"),
    "wandb": ("wandb", "wandb in metrics.writers"),
    "trackio": ("trackio", "trackio in metrics.writers"),
}
"""Module and purpose of each optional extra."""
_VARIABLES = ("JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "XLA_PYTHON_CLIENT_MEM_FRACTION",
              "CUDA_VISIBLE_DEVICES", "JAX_COMPILATION_CACHE_DIR")  # fmt: skip
"""Environment variables that affect JAX."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the checks; return 1 if there is a problem."""
    parser().parse_args(argv)
    console = wide_console()
    _show(console, "packages", _packages())
    _show(console, "machine", _machine())
    _show(console, "environment", ((name, redacted_message(os.environ[name])) for name in _VARIABLES
                                   if name in os.environ))  # fmt: skip
    from jaxforge.parallel import multihost  # imported here, because JAX takes a second

    multihost.initialize()
    # A device that JAX lists may still fail to compute.
    total = _sum_of_squares()
    _show(console, "devices", _devices(total))
    problems = list(_problems(total))
    for problem in problems:
        console.print(f"problem: {problem}", style="red", markup=False)
    if not problems:
        console.print("no problems found", style="green")
    return 1 if problems else 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    return CommandParser("doctor", description=_ABOUT)


def _show(console: Console, title: str, rows: Iterator[tuple[str, str]]) -> None:
    table = Table(title=title, title_justify="left", show_header=False, box=None)
    for row in rows:
        table.add_row(*map(escape, row))
    if table.row_count:
        console.print(table)


def _packages() -> Iterator[tuple[str, str]]:
    from jaxforge.runs.starts import PACKAGES  # with the tables of the config, which are slow

    yield "python", f"{platform.python_version()} ({sys.executable})"
    for package in PACKAGES:
        yield package, metadata.version(package)
    for extra, (module, use) in _EXTRAS.items():
        there = importlib.util.find_spec(module) is not None
        yield f"[{extra}]", metadata.version(module) if there else f"not installed: {use}"


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", platform.platform()
    yield "cores", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    yield "memory", f"{memory / 1e9:.1f} GB"
    disk = shutil.disk_usage(Path.cwd())
    yield "disk", f"{disk.free / 1e9:.1f} GB free in {Path.cwd()}"


def _devices(total: str) -> Iterator[tuple[str, str]]:
    import jax

    from jaxforge.parallel import device_memory

    kinds = [device.device_kind for device in jax.local_devices()]
    for kind in sorted(set(kinds)):
        yield kind, f"{kinds.count(kind)}, {device_memory.gigabytes(device_memory.capacity())} each"
    if jax.process_count() > 1:
        yield "processes", f"{jax.process_count()}, this is {jax.process_index()}"
    yield "a sum of squares", f"{total} on {jax.default_backend()}"


def _sum_of_squares() -> str:
    """Sum the square of a 1024 x 1024 matrix of ones on the device; return "right" or the error."""
    import jax
    import jax.numpy as jnp

    total = float(jax.jit(lambda x: jnp.sum(x @ x))(jnp.ones((1024, 1024))))
    return "right" if total == 1024**3 else f"{total:g}, not {1024**3}"


def _problems(total: str) -> Iterator[str]:
    import jax

    platforms = os.environ.get("JAX_PLATFORMS", "")
    if jax.default_backend() == "cpu" and not platforms:
        if gpus := len(gpu_memories()):
            yield f"{gpus} GPU(s) exist, but JAX finds none: pip install 'jaxforge[cuda]'"
        if Path("/dev/accel0").exists() or Path("/dev/vfio").exists():
            yield "a TPU exists, but JAX finds none: pip install 'jaxforge[tpu]'"
    if total != "right":
        yield "the devices compute wrong results"
    if shutil.disk_usage(Path.cwd()).free < 1e9:
        yield "less than 1 GB is free on this disk: checkpoints will not fit"


entry = functools.partial(run_main, main, uses_devices=True)
