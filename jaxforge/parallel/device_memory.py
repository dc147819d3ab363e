"""Memory of a device, and out-of-memory errors."""

import math
import os

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import PyTree

from jaxforge.errors import UserError
from jaxforge.parallel import hardware

_WORDS = ("resource_exhausted", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; XLA has no class for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(word in text for word in _WORDS)


def first_line(error: BaseException | str) -> str:
    """XLA's first line; pages on who has which buffer follow it."""
    line = str(error).strip().partition("\n")[0] or "the host has no more"
    return line if len(line) < 300 else line[:300] + " ..."


def bytes_per_device(tree: PyTree) -> int:
    """Bytes of the abstract arrays of a tree on one device; what is on the host is not."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != "pinned_host"
    )


def capacity() -> int:
    """Bytes of a device; of a CPU, of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def capacity_per_device() -> int:
    """Bytes of a device of this process; virtual devices of a CPU share the machine's memory."""
    shared = jax.default_backend() == "cpu"
    return capacity() // (jax.local_device_count() if shared else 1)


def smallest_capacity(mesh: Mesh | AbstractMesh) -> int:
    """Bytes of a device of a mesh, the same number in all processes of the job, which all ask.

    Of devices that are elsewhere, it is what is known of their kind.

    Raises:
        UserError: nothing is known of them.
    """
    if isinstance(mesh, AbstractMesh):
        raise UserError(_UNKNOWN.format("a mesh without devices"))
    device = mesh.devices.flat[0]
    if device not in jax.devices():
        known = hardware.known_memory(device.device_kind)
        if known is None:
            raise UserError(_UNKNOWN.format(device.device_kind))
        return known
    mine = capacity_per_device()
    if jax.process_count() == 1:
        return mine
    megabytes = np.array(mine >> 20, np.int32)  # collectives have no 64-bit integers
    return int(np.min(multihost_utils.process_allgather(megabytes))) << 20


_UNKNOWN = (
    'train.grad_sync = "auto" needs to know how much a device holds, and of {} nobody does: pass '
    'its bytes, or set train.grad_sync to "update" or "microbatch"'
)


def gigabytes(n: float) -> str:
    """Bytes for a reader."""
    return f"{n / 1e9:.3g} GB"
