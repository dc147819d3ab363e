"""Settings of the machine for tests: compilation and patience."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil

PATIENCE = 1800
"""Seconds to wait for what is to happen however busy the machine is; only a hang takes longer."""

LARGEST_CACHE = 3e9
"""Bytes of compiled programs to keep: about ten times those of one run of the suite."""

# Tests judge what is computed, not how fast: code that LLVM hardly optimizes is compiled in half
# the time, and in another eighth less where a program is not cut into 32 for as many processors.
# Collectives wait for as long as a busy machine keeps one of the devices waiting.
_QUICKLY = [
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    f"--xla_cpu_collective_call_terminate_timeout_seconds={PATIENCE}",
]
if version("jaxlib").startswith("0.10."):  # gone since; it halves the time once more
    _QUICKLY.append("--xla_cpu_use_fusion_emitters=false")


def xla_flags(devices: int) -> str:
    """`XLA_FLAGS` for that many virtual devices, in every worker and every process of a test."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *_QUICKLY])


def compilation_cache() -> Path:
    """Return the directory of compiled programs, kept between runs: `.cache/jax/<jaxlib version>`.

    Directories of other versions are removed, and so is one that has grown beyond `LARGEST_CACHE`.
    """
    directory = Path(__file__).parents[1] / ".cache" / "jax" / version("jaxlib")
    for other in directory.parent.glob("*"):
        size = sum(file.stat().st_size for file in other.iterdir()) if other == directory else 0
        if other != directory or size > LARGEST_CACHE:
            shutil.rmtree(other, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def give_back_memory() -> None:
    """Return freed memory to the system; glibc retains half a gigabyte after some files."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def memory_in_use() -> int:
    """Bytes of this process that are in memory."""
    return psutil.Process().memory_info().rss


def wait_until(true: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Looks again and again; a process that is to bring it about must not end before."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
