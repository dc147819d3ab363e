"""Bitwise comparison of the replicas of each parameter.

The partitioner assumes that replicas are equal and reads any of them, so a bit flip in one replica
is never noticed, and spreads. Here each device hashes its own shards.

    devices of a mesh     (dp_replicate, dp_shard) = (2, 2)
    shard of a weight     device 0: A   device 1: B   device 2: A   device 3: B
    compared              {0, 2} and {1, 3}
"""

import collections
import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, UInt32

from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Params
from jaxforge.state.checksum import checksum
from jaxforge.training.callbacks.callback import IntervalContext, RunCallback, RunParts

log = logging.getLogger(__name__)

Hasher = Callable[[Params], UInt32[Array, "device parameter"]]
Outliers = dict[jax.Device, list[str]]
"""Device -> names of the parameters whose replica differs from the other replicas."""


class WeightHashes(RunCallback):
    """Compares the replicas of every shard of every parameter, over all devices of the job."""

    checks_start = True
    judges_state = True

    def __init__(self, interval: int, mesh: Mesh) -> None:
        self.every, self._mesh = interval, mesh
        self._hash: Hasher | None = None

    @classmethod
    def of_run(cls, run: RunParts) -> "WeightHashes | None":
        """Return the callback if `train.check_weight_hash_across_dp_replicas_interval` is set."""
        interval = run.config.train.check_weight_hash_across_dp_replicas_interval
        return cls(interval, run.mesh) if interval else None

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log that all replicas match, or the devices and parameters that differ."""
        step, params = context.step, context.state.params
        # Compiled at the first check: shardings are known from the arrays themselves.
        if self._hash is None:
            self._hash = make_hasher(params, self._mesh)
        # [devices, parameters]: rows in the order of the mesh, on every process.
        table = multihost_utils.process_allgather(self._hash(params), tiled=True)
        outliers = find_outliers(table, params, self._mesh)
        for device, names in outliers.items():
            log.error(
                "Parameter hashes not matching across DP replicas: at step %d, %s (process %d) "
                "differs from the others in %d parameters: %s",
                step, device, device.process_index, len(names), ", ".join(names),
            )  # fmt: skip
        if outliers:
            return Exit.UNHEALTHY
        log.info(">>> Weight hashes match after %d iterations...", step)
        return None


def make_hasher(params: Params, mesh: Mesh) -> Hasher:
    """Return a jitted function that hashes, on each device, its shard of each parameter.

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
            check_vma=False,  # inputs that count as equal may give different outputs
        )
    )


def find_outliers(
    table: UInt32[np.ndarray, "device parameter"], params: Params, mesh: Mesh
) -> Outliers:
    """Return the devices whose hashes differ from those of most replicas of the same shard.

    If only two replicas exist and differ, either may be wrong; the later device is returned.
    """
    outliers: Outliers = collections.defaultdict(list)
    leaves = jax.tree.leaves_with_path(params)
    for column, (path, leaf) in zip(table.T, leaves, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        hashes = dict(zip(mesh.devices.flat, column.tolist(), strict=True))
        # Devices that hold the same part of the array, by the index of the part.
        replicas: dict[str, list[jax.Device]] = collections.defaultdict(list)
        for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
            replicas[str(index)].append(device)
        for devices in replicas.values():
            counts = collections.Counter(hashes[device] for device in devices)
            # The majority is taken as right; with two replicas there is none.
            ((usual, _),) = counts.most_common(1)
            for device in devices:
                if hashes[device] != usual:
                    outliers[device].append(name)
    return outliers
