"""Memory that XLA:CPU frees stays with the process.

Each run of an executable allocates its temporary buffers anew. glibc gives large blocks back to the
system when they are freed, and the system clears every page before it hands it out again: a quarter
of the time of a step. The environment variables of malloc cannot help, for they stop at 32 MiB
(`mallopt(3)`: M_MMAP_THRESHOLD), and each thread has a heap of its own that is trimmed regardless.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys

import jax

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
_PAD_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """One heap for all threads, which grows as needed and never shrinks; for CPU and glibc only.

    To be called before JAX starts its threads. A user's own malloc settings in the environment are
    left alone.

    Returns:
        Whether it was done.
    """
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)
    if own or not sys.platform.startswith("linux") or not _computes_on_cpu():
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = {
        _M_ARENA_MAX: 1,
        _M_MMAP_MAX: 0,
        _M_TRIM_THRESHOLD: -1,
        _M_TOP_PAD: _PAD_BYTES,
    }
    results = [libc.mallopt(name, value) for name, value in settings.items()]
    return all(results)


def _computes_on_cpu() -> bool:
    """What can be told without starting JAX's backends."""
    if platforms := jax.config.values["jax_platforms"]:
        return platforms.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
