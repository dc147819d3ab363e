"""Settings of glibc's malloc: freed memory is retained for steps and released for conversions.

Each run of an executable of XLA:CPU allocates its temporary buffers anew. glibc gives large blocks
back to the system when they are freed, and the system clears every page before it hands it out
again: a quarter of the time of a step. The environment variables of malloc cannot help, for they
stop at 32 MiB (`mallopt(3)`: M_MMAP_THRESHOLD), and each thread has a heap of its own that is
trimmed regardless. Those heaps of many threads are also what a stream of blocks grows by.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
_PAD_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """One heap for all threads, which grows as needed and never shrinks; for CPU and glibc only.

    To be called before JAX starts its threads. A user's own malloc settings in the environment are
    left alone.

    Returns:
        Whether it was done.
    """
    return _computes_on_cpu() and _set(
        {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: _PAD_BYTES}
    )


def share_heaps() -> bool:
    """Let all threads share two heaps instead of eight per core.

    To be called before threads start; a user's own settings are left alone.

    Returns:
        Whether it was done.
    """
    return _set({_M_ARENA_MAX: 2})


def _set(settings: dict[int, int]) -> bool:
    own = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ)
    if own or not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    results = [libc.mallopt(name, value) for name, value in settings.items()]
    return all(results)


def _computes_on_cpu() -> bool:
    """Return whether computation runs on the CPU, without starting JAX's backends."""
    import jax  # here, for a conversion may not need it

    if platforms := jax.config.values["jax_platforms"]:
        return platforms.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
