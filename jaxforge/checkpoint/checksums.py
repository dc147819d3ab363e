"""Checksums of arrays, which verify that a restore equals the saved state bit by bit.

Tensorstore has checksums of its index but not of the values, so a bit that flips on disk or in
transfer would go unnoticed. Each array is hashed on its devices before it is saved, and again after
it is restored. The hash depends on positions in the whole array, so it is independent of the mesh.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PyTree, Shaped

from jaxforge.kernels.hashing import block_checksum
from jaxforge.state.checksum import checksum

Checksums = dict[str, int]
"""Array name -> hash."""

_hash = jax.jit(lambda tree: jax.tree.map(checksum, tree))


def begin(tree: PyTree) -> Callable[[], Checksums]:
    """Start to hash each array.

    Accelerators hash asynchronously, and their arrays may be donated right afterwards. Arrays in
    host memory are hashed in the call of the returned function, in the caller's thread, and must
    stay unchanged until then.

    Returns:
        Function that waits for the hashes and returns them by array name.
    """
    # Dispatched here: devices run the hashes before the next step, which may donate the arrays.
    leaves = {name: jnp.asarray(leaf) for name, leaf in flatten_dict(tree, sep=".").items()}
    _list_shards(leaves)
    if not is_on_this_host(leaves):
        hashes = _hash(leaves)
        return lambda: {name: int(value) for name, value in jax.device_get(hashes).items()}
    return lambda: {name: host_checksum(leaf) for name, leaf in leaves.items()}


def _list_shards(leaves: Mapping[str, Array]) -> None:
    """List the shards of each array in this thread.

    Before JAX 0.12, the first access to the shards of an array builds their list without a lock. A
    second thread may find a part of the list, or each shard twice: a hash of the array would be
    wrong, and Orbax would leave chunks out of the checkpoint (docs/upstream.md).
    """
    for name, leaf in leaves.items():
        assert len(leaf.addressable_shards) == len(leaf.sharding.addressable_devices), name


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
        more = f" and {len(changed) - 1} more arrays" if changed[1:] else ""
        raise ValueError(f"not what was saved: {changed[0]}{more}")


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
    """Return `state.checksum` of an array on CPUs of this process, without large temporaries.

    XLA:CPU does not fuse the mixing of bits into the sum and would store four bytes per element.
    """
    # Keyed by region and not by `replica_id`, so that each region counts once.
    regions = {
        tuple(axis.start or 0 for axis in shard.index): shard for shard in array.addressable_shards
    }
    return (
        sum(
            block_checksum(run, first)
            for start, shard in regions.items()
            for first, run in _runs(np.asarray(shard.data), start, array.shape)
        )
        % 2**32
    )


def _runs(
    part: np.ndarray, start: Sequence[int], shape: Sequence[int]
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the pieces of a part that are consecutive in its array, with their first index."""
    inner = part.ndim  # axes from here on are whole, except for the first of them
    while inner > 0 and part.shape[inner:] == tuple(shape[inner:]):
        inner -= 1
    strides = [math.prod(shape[axis + 1 :]) for axis in range(part.ndim)]
    for index in np.ndindex(part.shape[:inner]):
        at = (i + first for i, first in itertools.zip_longest(index, start, fillvalue=0))
        yield sum(i * stride for i, stride in zip(at, strides, strict=True)), part[index]
