"""Parts of arrays: copies of a process's own shards, and byte ranges of a box in a shard."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint.checksums import is_on_this_host
from jaxforge.checkpoint.replica.store import BLOCK, Shard


class HostShard(NamedTuple):
    """Copy of a shard in host memory.

    Attributes:
        array: name of the array.
        start: index of the first element in the array.
        data: the elements, an array of NumPy or JAX.
    """

    array: str
    start: tuple[int, ...]
    data: Any


def copy_tree(tree: PyTree) -> PyTree:
    """Return a tree whose arrays in memory of this process are copied, others as they are."""
    if not is_on_this_host(tree):
        return tree
    return jax.tree.map(lambda leaf: jax.device_put(leaf, may_alias=False), tree)


def copy_shards(tree: PyTree, *, is_copied: bool) -> list[HostShard]:
    """Copy the shards that this process saves to host memory.

    Each element of an array is saved by exactly one process. Copies of accelerators are complete on
    return, copies on CPUs are only requested: the next step waits for them before it overwrites
    the state.

    Args:
        tree: the state.
        is_copied: True if the next step does not overwrite the arrays.
    """
    shards = [
        HostShard(name, tuple(axis.start or 0 for axis in shard.index), shard.data)
        for name, leaf in flatten_dict(tree, sep=".").items()
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    if is_copied:
        return shards
    if all(device.platform == "cpu" for device in jax.local_devices()):
        # The runtime orders the next step's writes after these copies, so nobody waits here.
        return [s._replace(data=jax.device_put(s.data, may_alias=False)) for s in shards]
    for shard in shards:  # all transfers are under way before the first is awaited
        shard.data.copy_to_host_async()
    return [shard._replace(data=np.asarray(shard.data)) for shard in shards]


def blocks_of(shards: list[HostShard]) -> Iterator[memoryview]:
    """Yield the bytes of shards in order, in blocks of at most `BLOCK` bytes.

    The list is emptied, so that the memory of each shard is free once it is written.
    """
    shards.reverse()  # `pop` frees the end of a list
    while shards:
        array = np.ascontiguousarray(np.asarray(shards.pop().data))
        view = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(view), BLOCK):
            yield view[start : start + BLOCK]


def locate(shards: Sequence[HostShard]) -> list[Shard]:
    """Return the locations of shards whose bytes follow one another."""
    sizes = [shard.data.nbytes for shard in shards]
    offsets = itertools.accumulate(sizes, initial=0)
    return [
        Shard(shard.array, shard.start, tuple(shard.data.shape), offset)
        for shard, offset in zip(shards, offsets, strict=False)
    ]


class Overlap(NamedTuple):
    """Common part of a shard and a region of the same array.

    Attributes:
        in_shard: index within the shard.
        in_region: index within the region.
        size: number of elements.
    """

    in_shard: tuple[slice, ...]
    in_region: tuple[slice, ...]
    size: int


def overlap(shard: Shard, start: Sequence[int], shape: Sequence[int]) -> Overlap | None:
    """Return the part of a shard within a region of its array; None if there is none."""
    first = [max(a, b) for a, b in zip(shard.start, start, strict=True)]
    ends = zip(shard.start, shard.shape, start, shape, strict=True)
    stop = [min(a + length, b + width) for a, length, b, width in ends]
    sizes = [last - begin for begin, last in zip(first, stop, strict=True)]
    if any(size <= 0 for size in sizes):
        return None

    def relative(origin: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, origin, strict=True))

    return Overlap(relative(shard.start), relative(start), math.prod(sizes))


def blocks_in(shard: Shard, box: Sequence[slice], itemsize: int) -> np.ndarray:
    """Return the sorted numbers of the blocks of data that hold a box of a shard."""
    lengths = [axis.stop - axis.start for axis in box]
    # Elements of the axes from `inner` on are contiguous: only the first of them is cut.
    inner = len(lengths)
    while inner > 0 and math.prod(lengths[inner:]) == math.prod(shard.shape[inner:]):
        inner -= 1
    strides = [math.prod(shard.shape[axis + 1 :]) for axis in range(len(lengths))]
    first = np.array([sum(axis.start * stride for axis, stride in zip(box, strides, strict=True))])
    for length, stride in zip(lengths[:inner], strides[:inner], strict=True):
        first = (first[:, None] + np.arange(length) * stride).reshape(-1)
    # Now `first` has the offset of each contiguous run of the box, in elements of the shard.
    run = math.prod(lengths[inner:]) * itemsize
    begins = shard.offset + first * itemsize
    spans = np.stack([begins // BLOCK, (begins + run - 1) // BLOCK], axis=1)
    return np.unique(np.concatenate([np.arange(a, b + 1) for a, b in np.unique(spans, axis=0)]))


def runs_of(blocks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return the byte ranges of sorted blocks, with neighbours joined.

    Args:
        blocks: numbers of blocks.
        size: bytes of the data, whose last block may be shorter.
    """
    runs: list[tuple[int, int]] = []
    for block in map(int, blocks):
        begin, end = block * BLOCK, min((block + 1) * BLOCK, size)
        if runs and runs[-1][1] == begin:
            runs[-1] = runs[-1][0], end
        else:
            runs.append((begin, end))
    return runs
