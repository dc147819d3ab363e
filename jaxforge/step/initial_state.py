"""The train state before the first step: its values, shapes and shardings."""

import dataclasses
import functools

import jax
import optax
from jax.sharding import AbstractMesh, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import split
from jaxforge.state.train_state import (
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
    return init_train_state(model, params, optimizer, model_state, average)


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
    return dataclasses.replace(shardings, ema=_averaged(config, model, shardings.params))


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
