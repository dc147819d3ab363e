"""Checksums of arrays, which verify that a restore equals the saved state bit by bit.

Tensorstore has checksums of its index but not of the values, so a bit that flips on disk or in
transfer would go unnoticed. Each array is hashed on its devices before it is saved, and again after
it is restored. The hash depends on positions in the whole array, so it is independent of the mesh.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PyTree, Shaped, UInt, UInt32

from jaxforge.kernels.hashing import FACTOR, fmix32
from jaxforge.state.checksum import checksum

Checksums = dict[str, int]
"""Array name -> hash."""

_WIDTH = 4096
"""Smallest number of elements per row, if the array has as many."""

SMALL = 1 << 16
"""Number of elements up to which NumPy with temporaries is faster than compiling a program."""

_hash = jax.jit(lambda tree: jax.tree.map(checksum, tree))


def begin(tree: PyTree) -> Callable[[], Checksums]:
    """Start to hash each array.

    Accelerators hash asynchronously, and their arrays may be donated right afterwards. Arrays in
    host memory are hashed in the call of the returned function, in the caller's thread, and must
    stay unchanged until then.

    Returns:
        Function that waits for the hashes and returns them by array name.
    """
    leaves = {name: jnp.asarray(leaf) for name, leaf in flatten_dict(tree, sep=".").items()}
    if not is_on_this_host(leaves):
        hashes = _hash(leaves)
        return lambda: {name: int(value) for name, value in jax.device_get(hashes).items()}
    return lambda: {name: host_checksum(leaf) for name, leaf in leaves.items()}


def check(tree: PyTree, saved: Mapping[str, int], dtypes: Mapping[str, object]) -> None:
    """Raise ValueError if an array differs from the saved one, or has no hash.

    Args:
        tree: restored arrays; may be a part of the state.
        saved: hashes of the saved arrays.
        dtypes: dtypes of the saved arrays. Arrays restored in another dtype are not compared.
    """
    leaves = flatten_dict(tree, sep=".")
    changed = [
        name
        for name, value in begin(tree)().items()
        if leaves[name].dtype == dtypes[name] and value != saved.get(name)
    ]
    if changed:
        others = f" and {len(changed) - 1} more arrays" if changed[1:] else ""
        raise ValueError(f"not what was saved: {changed[0]}{others}")


class ChecksumsHandler(ocp.JsonCheckpointHandler):
    """Orbax handler that writes hashes in the background once they are computed."""

    async def async_save(
        self, directory: Path, item: None = None, args: "ChecksumsSave | None" = None
    ) -> list[ocp.future.Future]:
        """Start the write; return its future."""
        assert args is not None

        async def save() -> None:
            hashes = args.wait()
            if jax.process_index() == 0:
                (directory / "metadata").write_text(json.dumps(hashes))

        return [ocp.future.CommitFutureAwaitingContractedSignals(save(), name="checksums")]


@ocp.args.register_with_handler(ChecksumsHandler, for_save=True)
@dataclasses.dataclass
class ChecksumsSave(ocp.args.CheckpointArgs):
    """Pending save of checksums; `wait` is the result of `begin`."""

    wait: Callable[[], Checksums]


def is_on_this_host(tree: PyTree) -> bool:
    """Return whether all arrays are on CPU devices of this process."""
    return all(
        leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())
        for leaf in jax.tree.leaves(tree)
    )


def host_checksum(array: Shaped[Array, "..."]) -> int:
    """Return `state.checksum` of an array on CPUs of this process, in one pass without temporaries.

    XLA:CPU does not fuse the mixing of bits into the sum and would store four bytes per element.
    Rows are therefore accumulated into one sum per column, which stays in the cache of a core.
    """
    # Keyed by region and not by `replica_id`, so that each region counts once.
    regions = {
        tuple(axis.start or 0 for axis in shard.index): shard for shard in array.addressable_shards
    }
    return (
        sum(
            _shard_checksum(np.asarray(shard.data), start, array.shape)
            for start, shard in regions.items()
        )
        % 2**32
    )


def _shard_checksum(part: np.ndarray, start: Sequence[int], shape: Sequence[int]) -> int:
    """Return the contribution of a shard to the sum."""
    # The flat index of an element in the whole array is a sum over axes of (index * stride). With
    # the axes split into two groups, it is a row term plus a column term: [row] + [column].
    axes = range(part.ndim)
    steps = [
        (np.arange(part.shape[i]) + start[i]).astype(np.uint32)
        * np.uint32(math.prod(shape[i + 1 :]) % 2**32)
        for i in axes
    ]
    split = max((i for i in axes if math.prod(part.shape[i:]) >= _WIDTH), default=0)
    rows, columns = _sums(steps[:split]), _sums(steps[split:])
    bits = part.reshape(rows.size, columns.size).view(f"uint{8 * part.itemsize}")
    if part.size <= SMALL:
        position = rows[:, None] + columns
        return int(
            fmix32(bits.astype(np.uint32) + position * np.uint32(FACTOR)).sum(dtype=np.uint32)
        )
    return int(mixed_sum(bits, rows, columns))


def _sums(steps: Sequence[UInt32[np.ndarray, " size"]]) -> UInt32[np.ndarray, " product"]:
    """Return the sums of one step per axis for all combinations, in row-major order."""
    sums = np.zeros(1, np.uint32)
    for axis_steps in steps:
        sums = (sums[:, None] + axis_steps).reshape(-1)
    return sums


@jax.jit
def mixed_sum(
    bits: UInt[Array, "row column"], rows: UInt32[Array, " row"], columns: UInt32[Array, " column"]
) -> UInt32[Array, ""]:
    """Return the sum of mixed bits; the index of an element is its row term plus column term."""

    def add(i: UInt32[Array, ""], sums: UInt32[Array, " column"]) -> UInt32[Array, " column"]:
        position = rows[i] + columns
        return sums + fmix32(bits[i].astype(jnp.uint32) + position * jnp.uint32(FACTOR))

    sums = jax.lax.fori_loop(0, len(rows), add, jnp.zeros_like(columns))
    return jnp.sum(sums, dtype=jnp.uint32)
