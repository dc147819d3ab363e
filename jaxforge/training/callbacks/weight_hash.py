"""Comparison of the copies of each parameter, bit for bit.

What is replicated is equal by assumption: the partitioner takes any copy for all of them, so a bit
that flips in one is never noticed, and spreads. Here each device hashes what it really holds.
"""

import collections
import logging
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, UInt32

from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Params
from jaxforge.state.checksum import checksum
from jaxforge.training.callbacks.callback import Callback, IntervalContext

log = logging.getLogger(__name__)

Hasher = Callable[[Params], UInt32[Array, "device parameter"]]
Odd = dict[jax.Device, list[str]]
"""Device -> parameters of which its copy differs from the others'."""


class WeightHashes(Callback):
    """Compares the copies of every shard of every parameter, over all devices of all processes.

    Args:
        interval: steps between comparisons.
        mesh: the run's.
    """

    def __init__(self, interval: int, mesh: Mesh) -> None:
        self.every, self._mesh = interval, mesh
        self._hash: Hasher | None = None

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log that all copies match, or which devices differ in which parameters."""
        step, params = context.step, context.state.params
        if self._hash is None:
            self._hash = make_hasher(params, self._mesh)
        table = multihost_utils.process_allgather(self._hash(params), tiled=True)
        odd = find_outliers(table, params, self._mesh)
        for device, names in odd.items():
            log.error(
                "Parameter hashes not matching across DP replicas: at step %d, %s (process %d) "
                "differs from the others in %d parameters: %s",
                step, device, device.process_index, len(names), ", ".join(names),
            )  # fmt: skip
        if odd:
            return Exit.UNHEALTHY
        log.info(">>> Weight hashes match after %d iterations...", step)
        return None


def make_hasher(params: Params, mesh: Mesh) -> Hasher:
    """A program that hashes, on each device, the shard of each parameter that lies there.

    Args:
        params: arrays on the mesh, or their shapes and shardings.
        mesh: it.

    Returns:
        `params -> table`: a row per device in the order of the mesh, a column per parameter.
    """
    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, params)

    def hash_shards(params: Params) -> UInt32[Array, "1 parameter"]:
        return jnp.stack([checksum(leaf) for leaf in jax.tree.leaves(params)])[None]

    return jax.jit(
        jax.shard_map(
            hash_shards,
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(mesh.axis_names),
            check_vma=False,  # it is the point that equal inputs may give unequal outputs
        )
    )


def find_outliers(table: UInt32[np.ndarray, "device parameter"], params: Params, mesh: Mesh) -> Odd:
    """The devices whose hashes differ from those of most copies of the same shard.

    Of two copies that differ, nothing says which is right; the later device counts as odd.
    """
    odd: Odd = collections.defaultdict(list)
    leaves = jax.tree.leaves_with_path(params)
    for column, (path, leaf) in zip(table.T, leaves, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        hashes = dict(zip(mesh.devices.flat, column.tolist(), strict=True))
        for devices in _copies(leaf):
            counts = collections.Counter(hashes[device] for device in devices)
            ((usual, _),) = counts.most_common(1)
            for device in devices:
                if hashes[device] != usual:
                    odd[device].append(name)
    return odd


def _copies(leaf: Array) -> Iterator[list[jax.Device]]:
    """The devices that hold the same part of an array, part by part, in the order of the mesh."""
    parts: dict[str, list[jax.Device]] = collections.defaultdict(list)
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        parts[str(index)].append(device)
    yield from parts.values()
