"""Compilation settings, memory and timeouts of tests."""

import ctypes
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import psutil

from jaxforge.tools.prove import COLLECTIVE_SEC

PATIENCE = COLLECTIVE_SEC
"""Timeout in seconds that only a hang exceeds, however busy the machine is."""

LARGEST_CACHE = 3e9
"""Maximum bytes of compiled programs, about ten times those of one run of the suite."""


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
