"""Compilation settings, memory and timeouts of tests."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil

PATIENCE = 900
"""Timeout in seconds that only a hang exceeds, however busy the machine is."""

LARGEST_CACHE = 3e9
"""Maximum bytes of compiled programs, about ten times those of one run of the suite."""

# Tests check results, not speed. Compilation with few LLVM optimizations takes half the time, and
# another eighth less without splitting a program into 32 parts. The timeouts of collectives allow
# for a busy machine that delays a device.
_QUICKLY = [
    "--xla_cpu_parallel_codegen_split_count=1",
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=300",
    f"--xla_cpu_collective_call_terminate_timeout_seconds={PATIENCE}",
]
if version("jaxlib").startswith("0.10."):  # removed in later versions; halves the time again
    _QUICKLY.append("--xla_cpu_use_fusion_emitters=false")


def xla_flags(devices: int) -> str:
    """Return `XLA_FLAGS` for this number of virtual devices, for workers and processes of tests."""
    return " ".join([f"--xla_force_host_platform_device_count={devices}", *_QUICKLY])


def compilation_cache() -> Path:
    """Return the directory of compiled programs, kept between runs: `.cache/jax/<jaxlib version>`.

    Directories of other versions are removed, as is one larger than `LARGEST_CACHE`.
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
    """Return the resident memory of this process in bytes."""
    return psutil.Process().memory_info().rss


def wait_until(true: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Poll until a condition is true; fail if the given process ends before."""
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert process is None or process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.002)
