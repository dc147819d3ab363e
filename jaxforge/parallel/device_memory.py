"""What a device can hold, and how one says that it cannot."""

import math
import os

import jax
from jaxtyping import PyTree

_WORDS = ("resource_exhausted", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of JAX or Python says so; XLA has no class for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(word in text for word in _WORDS)


def gist(error: BaseException | str) -> str:
    """XLA's first line; pages on who has which buffer follow it."""
    line = str(error).strip().partition("\n")[0] or "the host has no more"
    return line if len(line) < 300 else line[:300] + " ..."


def per_device(tree: PyTree) -> int:
    """Bytes of the abstract arrays of a tree on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def capacity() -> int:
    """Bytes of a device; of a CPU, of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gigabytes(n: float) -> str:
    """Bytes for a reader."""
    return f"{n / 1e9:.3g} GB"
