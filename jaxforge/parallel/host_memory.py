"""Settings of glibc's malloc, which retain freed memory in training and release it in conversions.

Each execution of an XLA:CPU program allocates its temporary buffers again. glibc returns large
freed blocks to the system, which clears all pages before it hands them out again. That took a
quarter of the time of a step. Environment variables of malloc do not help: their threshold is
limited to 32 MiB (`mallopt(3)`: M_MMAP_THRESHOLD), and each thread has its own heap, which is
trimmed regardless. The heaps of many threads also make the memory of conversions grow.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8  # malloc.h
_PAD_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Use one heap for all threads, which never shrinks, if computation runs on CPU with glibc.

    Must be called before JAX starts threads. Malloc settings in the environment take precedence.

    Returns:
        Whether the settings were applied.
    """
    return _computes_on_cpu() and _set(
        {_M_ARENA_MAX: 1, _M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: -1, _M_TOP_PAD: _PAD_BYTES}
    )


def share_heaps() -> bool:
    """Let all threads share two heaps instead of eight per core.

    Must be called before threads start. Malloc settings in the environment take precedence.

    Returns:
        Whether the settings were applied.
    """
    return _set({_M_ARENA_MAX: 2})


def in_own_memory(array: "Array") -> "Array":
    """Copy an array of CPU devices, which may share the memory of NumPy or of a mapped file.

    JAX donates no shared memory, so the first step would need the memory of a restored state twice.
    Arrays of other devices are returned as they are.
    """
    import jax  # imported lazily, because conversions may not need it

    if any(device.platform != "cpu" for device in array.devices()):
        return array
    # From NumPy, `may_alias=False` shares aligned memory all the same; from an array it copies.
    shards = [jax.device_put(shard.data, may_alias=False) for shard in array.addressable_shards]
    jax.block_until_ready(shards)  # so that the caller can free the memory
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def _set(settings: dict[int, int]) -> bool:
    prefixes = ("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")
    is_configured = any(name.startswith(prefixes) for name in os.environ)
    if is_configured or not sys.platform.startswith("linux"):
        return False
    # Other C libraries lack these settings, or ignore them.
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    results = [libc.mallopt(name, value) for name, value in settings.items()]
    return all(results)


def _computes_on_cpu() -> bool:
    """Return whether computation runs on the CPU, without starting JAX's backends."""
    import jax  # imported lazily, because conversions may not need it

    if platforms := jax.config.values["jax_platforms"]:
        return platforms.split(",")[0] == "cpu"
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    return not plugins and importlib.util.find_spec("libtpu") is None
