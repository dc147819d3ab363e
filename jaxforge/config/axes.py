"""Axes of the device mesh, and the parallel degrees that follow from their sizes."""

import math
from collections.abc import Callable, Iterator, Mapping

from jaxforge.config.job import JobConfig
from jaxforge.config.problems import Problem

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh axes, slowest network first: devices adjacent along tp are adjacent in the machine."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""Axes over which the sequences of a batch are sharded."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp", "ep")
"""Axes over which devices hold different tokens: other sequences, or other parts of a sequence."""

Mesh = Mapping[str, int]
"""Size of each axis."""

Rule = Callable[[JobConfig, Mesh], Iterator[str | Problem]]
"""A rule yields a message or a `Problem` for each violation (`rules.py`)."""


def declared_sizes(config: JobConfig) -> dict[str, int]:
    """Return the configured axis sizes, with 1 for an unresolved dp_shard (-1)."""
    return {axis: max(1, getattr(config.distributed, axis)) for axis in AXES}


def data_parallel(mesh: Mesh) -> int:
    """Return the number of device groups that process different sequences."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)


def token_parallel(mesh: Mesh) -> int:
    """Return the number of device groups that process different tokens and have own gradients."""
    return math.prod(mesh[axis] for axis in DATA_AXES)


def with_equal_shards(config: JobConfig, mesh: Mesh) -> dict[str, int]:
    """Return the axis sizes with which every device holds an equal share of each parameter.

    Parameters are sharded along `model.dim`, and those of latent attention also along its ranks. If
    dp_shard does not divide these, it keeps its largest factor that does, and the remaining factor
    moves to dp_replicate. Parameters are then sharded over the former and replicated over the
    latter. The split of the batch is unchanged.

    Args:
        config: A config that has passed `check`.
        mesh: Its axis sizes, from `mesh_shape`.
    """
    width = math.gcd(*config.model.split_widths)
    shards = math.gcd(mesh["dp_shard"], width // (mesh["cp"] * mesh["ep"]))
    copies = mesh["dp_shard"] // shards
    return {**mesh, "dp_replicate": mesh["dp_replicate"] * copies, "dp_shard": shards}


def cp_strategy(config: JobConfig) -> str:
    """Return `distributed.cp_strategy`, with "auto" resolved."""
    d = config.distributed
    if d.cp_strategy != "auto":
        return d.cp_strategy
    return "ring" if config.model.n_heads % (d.cp * d.tp) else "ulysses"
