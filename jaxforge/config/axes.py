"""The axes of the device mesh, and what is counted over them."""

import math
from collections.abc import Callable, Iterator, Mapping

from jaxforge.config.job import JobConfig
from jaxforge.config.problems import Problem

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
"""Mesh axes, slowest network first: neighbours in tp are neighbours in the machine."""

BATCH_AXES = ("dp_replicate", "dp_shard", "ep")
"""The axes that sequences are spread over."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp", "ep")
"""The axes over which devices have other tokens: other sequences, or other parts of them."""

Mesh = Mapping[str, int]
"""Size of each axis."""

Rule = Callable[[JobConfig, Mesh], Iterator[str | Problem]]
"""Of `rules.py`."""


def declared(config: JobConfig) -> dict[str, int]:
    """The axes as written, with 1 for a dp_shard that is still open."""
    return {axis: max(1, getattr(config.distributed, axis)) for axis in AXES}


def data_parallel(mesh: Mesh) -> int:
    """Number of groups of devices that see different sequences."""
    return math.prod(mesh[axis] for axis in BATCH_AXES)


def token_parallel(mesh: Mesh) -> int:
    """Number of groups of devices that see different tokens, and have gradients of their own."""
    return math.prod(mesh[axis] for axis in DATA_AXES)


def with_copies(config: JobConfig, mesh: Mesh) -> dict[str, int]:
    """The axes that devices are laid out in, where every device has as much of each parameter.

    Parameters are cut along `model.dim`. Of a dp_shard that does not divide it, the largest factor
    that does stays dp_shard, and the rest joins dp_replicate: parameters are split over the one and
    copied over the other, and the batch is split as before.

    Args:
        config: A config that `check` has passed.
        mesh: Its axes, as of `mesh_shape`.
    """
    shards = math.gcd(mesh["dp_shard"], config.model.dim // (mesh["cp"] * mesh["ep"]))
    copies = mesh["dp_shard"] // shards
    return {**mesh, "dp_replicate": mesh["dp_replicate"] * copies, "dp_shard": shards}


def cp_strategy(config: JobConfig) -> str:
    """`distributed.cp_strategy`, or what "auto" stands for."""
    d = config.distributed
    if d.cp_strategy != "auto":
        return d.cp_strategy
    return "ring" if config.model.n_heads % (d.cp * d.tp) else "ulysses"
