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

_MESSAGES = ("resource_exhausted", "out of memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out; XLA has no class for it."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or any(message in text for message in _MESSAGES)


def first_line(error: BaseException | str) -> str:
    """Return the first line of XLA's error message, without the list of buffers."""
    line = str(error).strip().partition("\n")[0] or "the host has no memory left"
    return line if len(line) < 300 else line[:300] + " ..."


def bytes_per_device(tree: PyTree) -> int:
    """Return the bytes of a tree of abstract arrays on one device, without arrays on the host."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
        if leaf.sharding.memory_kind != "pinned_host"
    )


def capacity() -> int:
    """Return the memory of a local device in bytes; for CPUs, the memory of the machine."""
    stats = jax.local_devices()[0].memory_stats() or {}
    return stats.get("bytes_limit") or host_memory()


def host_memory() -> int:
    """Return the memory of this machine in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def capacity_per_device() -> int:
    """Return the memory of a local device in bytes; virtual CPU devices share the machine's."""
    # Virtual CPU devices have the memory of one machine together.
    is_shared = jax.default_backend() == "cpu"
    return capacity() // (jax.local_device_count() if is_shared else 1)


def smallest_capacity(mesh: Mesh | AbstractMesh) -> int:
    """Return the memory of the smallest device of a mesh, in bytes.

    All processes of the job must call this function, and get the same number. For target hardware
    without devices, it is the published memory of the chip.

    Raises:
        UserError: the memory is unknown.
    """
    if isinstance(mesh, AbstractMesh):
        raise UserError(_UNKNOWN.format("a mesh without devices"))
    device = mesh.devices.flat[0]
    # A device to compile for: it has no statistics of memory.
    if device not in jax.devices():
        known = hardware.known_memory(device.device_kind)
        if known is None:
            raise UserError(_UNKNOWN.format(device.device_kind))
        return known
    capacity_here = capacity_per_device()
    if jax.process_count() == 1:
        return capacity_here
    megabytes = np.array(capacity_here >> 20, np.int32)  # collectives have no 64-bit integers
    return int(np.min(multihost_utils.process_allgather(megabytes))) << 20


_UNKNOWN = (
    'train.grad_sync = "auto" needs the memory of a device, which is unknown for {}. Pass the '
    'number of bytes, or set train.grad_sync to "update" or "microbatch"'
)


def gigabytes(n: float) -> str:
    """Format a number of bytes, such as "16 GB"."""
    return f"{n / 1e9:.3g} GB"
