"""One update as one executable: gradients over microbatches, guard, optimizer.

Gradients are reduced between data-parallel devices in one of two ways (`train.grad_sync`):

    update      weights are gathered once and gradients reduced once, around the scan over
                microbatches, which itself exchanges nothing between data-parallel devices. Costs
                the memory of whole weights (compute dtype) and whole gradients (float32).
    microbatch  the partitioner gathers each layer's weights as they are needed and reduces its
                gradients at once, in every microbatch: more traffic, least memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PyTree

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.model.linear import is_matrix
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.optimizer import global_norm, learning_rate, updates_made
from jaxforge.parallel.mesh import DATA_AXES, data_parallel_size
from jaxforge.parallel.sharding import (
    Axes,
    constrain,
    param_shardings,
    partition_spec,
    without_data,
)
from jaxforge.training.guard import select
from jaxforge.training.loss import (
    LossSum,
    Scales,
    Tiling,
    cross_entropy,
    tiling,
    token_scales,
    valid_tokens,
    weighted_loss,
)
from jaxforge.training.state import TrainState, state_shardings

Batch = dict[str, Int[Array, "m b s"]]
"""`input_ids`, `labels` and, when packed, `doc_ids`: [microbatches, sequences, tokens]."""

Metrics = dict[str, Any]
"""Scalars on the device; the pytree `gradients` where asked for."""


class Controls(NamedTuple):
    """What the host decides step by step, as traced scalars: changing them compiles nothing.

    Attributes:
        lr_scale: factor on the learning rate.
    """

    lr_scale: Float[Array, ""] | float = 1.0


TrainStep = Callable[[TrainState, Batch, Controls], tuple[TrainState, Metrics]]


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformationExtraArgs,
    config: JobConfig,
    mesh: Mesh,
    *,
    keep_gradients: bool = False,
) -> jax.stages.Wrapped:
    """The jitted step `(state, batch, controls) -> (state, metrics)`; the state is donated.

    `keep_gradients` adds them, before clipping, to the metrics.
    """
    gradients = make_gradients(model, config.train, mesh)
    lr = learning_rate(config)
    limit = config.train.nan_consecutive_max

    def train_step(
        state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, Metrics]:
        grads, loss = gradients(state.params, batch)
        grad_norm = global_norm(grads)
        good, guard = state.guard.judge(loss, grad_norm)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, lr_scale=controls.lr_scale
        )
        params = optax.apply_updates(state.params, updates)
        params, opt_state = select(good, (params, opt_state), (state.params, state.opt_state))
        new = TrainState(state.step + 1, params, opt_state, guard)
        new = select(~state.guard.halted(limit), new, state)
        metrics: Metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr(updates_made(new.opt_state)) * controls.lr_scale,
            "skipped": new.guard.total,
            "consecutive": new.guard.consecutive,
        }
        if keep_gradients:
            metrics["gradients"] = grads
        return new, metrics

    shardings = state_shardings(model, optimizer, mesh)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def make_gradients(
    model: Model, config: TrainConfig, mesh: Mesh
) -> Callable[[Params, Batch], tuple[Params, Array]]:
    """(params, batch) -> float32 gradients laid out like the parameters, and the loss."""
    if config.grad_sync == "update" and data_parallel_size(mesh) > 1:
        return _reduced_once(model, config, mesh)
    shardings = param_shardings(model.abstract, model.axes, mesh)

    def gradients(params: Params, batch: Batch) -> tuple[Params, Array]:
        grads, loss = accumulate(model, config, params, batch, _scales(batch, config))
        return jax.lax.with_sharding_constraint(grads, shardings), loss

    return gradients


def accumulate(
    model: Model, config: TrainConfig, params: Params, batch: Batch, scales: Scales
) -> tuple[Params, Float[Array, ""]]:
    """Gradients (float32) and loss of a batch, summed over its microbatches by a scan."""

    def microbatch_loss(params: Params, microbatch: Batch, token_scale: Array) -> Array:
        hidden, head, labels, tiles = _before_loss(model, config, params, microbatch)
        return weighted_loss(tiles, hidden, head, labels, Scales(token_scale, scales.position))

    def of_microbatch(xs: tuple[Batch, Array]) -> tuple[Params, Array]:
        loss, grads = jax.value_and_grad(microbatch_loss)(params, *xs)
        return jax.tree.map(lambda g: g.astype(jnp.float32), grads), loss

    def body(total: tuple[Params, Array], xs: tuple[Batch, Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, of_microbatch(xs)), None

    xs = (batch, scales.token)
    if scales.token.shape[0] == 1:
        return of_microbatch(jax.tree.map(lambda x: x[0], xs))
    # Zeros made from what they will add up, so that they vary over the same mesh axes.
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    start = (zeros, jnp.zeros_like(batch["labels"][0, 0, 0], jnp.float32))
    return jax.lax.scan(body, start, xs)[0]


def loss_sum(model: Model, config: TrainConfig, params: Params, microbatch: Batch) -> LossSum:
    """Loss sums of one microbatch [batch, seq]."""
    return cross_entropy(*_before_loss(model, config, params, microbatch))


def _before_loss(
    model: Model, config: TrainConfig, params: Params, microbatch: Batch
) -> tuple[Array, Array, Array, Tiling]:
    hidden = model.hidden(params, microbatch["input_ids"], microbatch.get("doc_ids"))
    labels, head = microbatch["labels"], model.head(params)
    batch, length = labels.shape
    return hidden, head, labels, tiling(config, batch, length, head.shape[0], model.how.tile)


def _scales(batch: Batch, config: TrainConfig) -> Scales:
    labels = batch["labels"]
    return Scales(
        token_scales(valid_tokens(labels), config.loss_norm), config.z_loss_weight / labels.size
    )


def _reduced_once(
    model: Model, config: TrainConfig, mesh: Mesh
) -> Callable[[Params, Batch], tuple[Params, Array]]:
    """`grad_sync = "update"`: device groups do not communicate while they accumulate.

    The data axes are taken from the partitioner; tp stays with it.
    """
    reduce = _reduction(model.axes, mesh)

    def gradients(params: Params, batch: Batch) -> tuple[Params, Array]:
        scales = _scales(batch, config)

        def of_group(params: Params, batch: Batch, token_scales: Array) -> tuple[Params, Array]:
            # Each group differentiates its own copy; the sum over groups comes afterwards.
            params, token_scales = jax.lax.pcast((params, token_scales), DATA_AXES, to="varying")
            own = Scales(token_scales, scales.position)
            return jax.tree.map(lambda x: x[None], accumulate(model, config, params, batch, own))

        groups = jax.shard_map(
            of_group,
            mesh=mesh,
            in_specs=(P(), P(None, DATA_AXES), P()),
            out_specs=P(DATA_AXES),
            axis_names=set(DATA_AXES),
        )
        whole = jax.tree.map(functools.partial(_gather, dtype=model.dtype), params, model.axes)
        grads, losses = groups(whole, batch, scales.token)
        return reduce(grads), jnp.sum(losses)

    return gradients


def _gather(param: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """A parameter whole over the data axes, still split over tp; matrices travel in `dtype`."""
    if is_matrix(axes):
        param = param.astype(dtype)
    return constrain(param, *without_data(axes))


def _reduction(axes: PyTree, mesh: Mesh) -> Callable[[Params], Params]:
    """Sums gradients [group, ...] over groups; each device keeps its share of the sum.

    Manual over every axis: left to the partitioner, the tp shards would be gathered first.
    """

    def one(grad: Array, axes: Axes) -> Array:
        grad = grad[0]
        for dimension, axis in enumerate(partition_spec(axes)):
            if axis in DATA_AXES:
                grad = jax.lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
        unsplit = tuple(axis for axis in DATA_AXES if axis not in tuple(partition_spec(axes)))
        return jax.lax.psum(grad, unsplit)

    def specs(spec_of: Callable[[Axes], P]) -> PyTree:
        return jax.tree.map(spec_of, axes, is_leaf=lambda node: isinstance(node, tuple))

    return jax.shard_map(
        lambda grads: jax.tree.map(one, grads, axes),
        mesh=mesh,
        in_specs=(specs(lambda axes: P(DATA_AXES, *partition_spec(without_data(axes)))),),
        out_specs=specs(partition_spec),
    )
