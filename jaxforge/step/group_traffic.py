"""Bytes that devices send between groups that train apart (`train.outer_interval`)."""

import math
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import split
from jaxforge.parallel.exchange import sent_bytes
from jaxforge.parallel.groups import number_of_groups
from jaxforge.parallel.sharding import param_shardings


class GroupTraffic(NamedTuple):
    """Bytes that a device sends to other groups per update, on average.

    Attributes:
        groups: number of groups.
        interval: updates from one exchange to the next.
        apart: with exchanges of changes every `interval` updates.
        together: with the gradients of every update, if the groups trained together.
    """

    groups: int
    interval: int
    apart: float
    together: float


def group_traffic(
    config: JobConfig, model: Model, mesh: Mesh | AbstractMesh
) -> GroupTraffic | None:
    """Return the traffic between groups; None if all devices train together.

    Args:
        config: a config that `rules.check` has passed for the mesh, without "auto" in
            `train.grad_sync`.
        model: model of the config.
        mesh: mesh of the run.
    """
    n, train = number_of_groups(config), config.train
    if not n:
        return None
    shardings = param_shardings(model.abstract, model.axes, mesh)
    frozen = frozen_paths(model.axes, config)
    trained, at = (split(tree, frozen)[1] for tree in (model.abstract, shardings))
    sizes = jax.tree.map(lambda x, s: math.prod(s.shard_shape(x.shape)), trained, at)
    values = sum(jax.tree.leaves(sizes))
    # Replicas reduce their gradients once, or in every microbatch.
    times = 1 if train.grad_sync == "update" else train.grad_accum_steps
    width = model.runtime.sent_dtype.itemsize
    return GroupTraffic(
        groups=n,
        interval=train.outer_interval,
        apart=values * sent_bytes(train.outer_dtype, n) / train.outer_interval,
        together=times * values * width * 2 * (n - 1) / n,
    )
