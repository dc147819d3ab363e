"""The train state before the first step: its values, shapes and shardings."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh
from jaxtyping import Array

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.outer import build_outer_optimizer
from jaxforge.optim.trees import split
from jaxforge.parallel.groups import (
    group_view,
    number_of_groups,
    on_mesh_with_groups,
    per_group,
)
from jaxforge.state.train_state import (
    Groups,
    TrainState,
    init_train_state,
    start_average,
    state_shardings,
)


def state_before_steps(
    config: JobConfig,
    model: Model,
    optimizer: optax.GradientTransformation,
    params: Params,
    model_state: Params | None = None,
) -> TrainState:
    """Return the state before the first step for given parameters; may be traced.

    Args:
        config: the config of the run.
        model: the model.
        optimizer: the optimizer.
        params: the parameters.
        model_state: non-trainable state; by default the initial one.
    """
    average = start_average(_averaged(config, model, params), config.train.ema_dtype)
    state = init_train_state(model, params, optimizer, model_state, average)
    n = number_of_groups(config)
    return start_groups(state, build_outer_optimizer(config, model.axes), n) if n else state


def shapes_of_state(
    config: JobConfig, model: Model, optimizer: optax.GradientTransformation
) -> TrainState:
    """Return the shape and dtype of every array of the state, as `ShapeDtypeStruct`."""
    before = functools.partial(state_before_steps, config, model, optimizer)
    return jax.eval_shape(before, model.abstract, model.state.abstract)


def shardings_of_state(
    config: JobConfig,
    model: Model,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | AbstractMesh,
) -> TrainState:
    """Return the `NamedSharding` of every array of the state."""
    shardings = state_shardings(model, optimizer, mesh)
    shardings = dataclasses.replace(shardings, ema=_averaged(config, model, shardings.params))
    if not number_of_groups(config):
        return shardings
    outer = state_shardings(model, build_outer_optimizer(config, model.axes), mesh).opt_state
    apart = group_view(config, mesh)[1]
    shardings, outer = jax.tree.map(
        lambda sharding: on_mesh_with_groups(sharding, apart), (shardings, outer)
    )
    own = Groups(shardings.params, shardings.opt_state, shardings.model_state)
    guard, counts, groups = jax.tree.map(per_group, (shardings.guard, shardings.counts, own))
    return dataclasses.replace(
        shardings, opt_state=outer, guard=guard, counts=counts, groups=groups
    )


def regroup(state: TrainState, outer: optax.GradientTransformation, n: int) -> TrainState:
    """Return a state for another number of groups that train apart; may be traced.

    Groups keep what they have. A new group has the global weights, and the moments of an earlier
    one: new group i has those of group i modulo the earlier number. The counters are to be set
    afterwards, from those of the host.

    Args:
        state: the state of some groups, or of devices that train together.
        outer: the outer optimizer; it starts anew if there were no groups.
        n: number of groups; 0 for devices that train together, with the moments of the first group.
    """
    if state.groups is None:
        return start_groups(state, outer, n)
    own = state.groups
    before = state.counts.samples.low.shape[0]
    if not n:
        opt_state, guard, counts = jax.tree.map(
            lambda leaf: leaf[0], (own.opt_state, state.guard, state.counts)
        )
        return dataclasses.replace(
            state, opt_state=opt_state, guard=guard, counts=counts, groups=None
        )
    in_turn = jnp.arange(n) % before

    def keep(leaf: Array, whole: Array) -> Array:
        is_new = (jnp.arange(n) >= before).reshape(-1, *[1] * whole.ndim)
        return jnp.where(is_new, whole, leaf[in_turn])

    guard, counts, opt_state = jax.tree.map(
        lambda leaf: leaf[in_turn], (state.guard, state.counts, own.opt_state)
    )
    params = jax.tree.map(keep, own.params, state.params)
    model_state = jax.tree.map(keep, own.model_state, state.model_state)
    groups = Groups(params, opt_state, model_state)
    return dataclasses.replace(state, guard=guard, counts=counts, groups=groups)


def start_groups(state: TrainState, outer: optax.GradientTransformation, n: int) -> TrainState:
    """Return the state of `n` groups that go on apart from a state; may be traced.

    Every group has the parameters and the moments of the state. The outer optimizer starts anew.

    Args:
        state: the state before the first step, or one whose counters are set afterwards.
        outer: the outer optimizer.
        n: number of groups.
    """
    own = Groups(state.params, state.opt_state, state.model_state)
    guard, counts, groups = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (n, *leaf.shape)), (state.guard, state.counts, own)
    )
    opt_state = outer.init(state.params)
    return dataclasses.replace(
        state, opt_state=opt_state, guard=guard, counts=counts, groups=groups
    )


def with_shardings(shapes: TrainState, shardings: TrainState) -> TrainState:
    """Return the shape, dtype and sharding of every array of a state."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )


def _averaged(config: JobConfig, model: Model, params: Params) -> Params:
    """Return the parameters that have an average: the trained ones, or none."""
    if not config.train.averages_weights:
        return {}
    return split(params, frozen_paths(model.axes, config))[1]
