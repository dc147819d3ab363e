"""One update as one executable: gradients over microbatches, guard, optimizer.

Gradients are reduced between data-parallel devices in one of two ways (`train.grad_sync`):

    update      weights are gathered once, gradients reduced once, around the scan over microbatches;
                the scan itself exchanges nothing between data-parallel devices. Costs the memory of
                full weights (compute dtype) and full gradients (float32).
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
from jaxforge.parallel.sharding import Axes, batch_sharding, param_shardings, partition_spec
from jaxforge.training.guard import select
from jaxforge.training.loss import LossSum, cross_entropy, token_scales, valid_tokens
from jaxforge.training.state import TrainState, state_shardings

Batch = dict[str, Int[Array, "m b s"]]
"""`input_ids`, `labels` and, when packed, `doc_ids`: [microbatches, sequences, tokens]."""

Metrics = dict[str, Array]


class Controls(NamedTuple):
    """What the host decides step by step, as traced scalars: changing them compiles nothing.

    Attributes:
        lr_scale: factor on the learning rate.
    """

    lr_scale: Float[Array, ""] | float = 1.0


TrainStep = Callable[[TrainState, Batch, Controls], tuple[TrainState, Metrics]]


def make_train_step(
    model: Model, optimizer: optax.GradientTransformationExtraArgs, config: JobConfig, mesh: Mesh
) -> TrainStep:
    """The jitted step `(state, batch, controls) -> (state, metrics)`; the state is donated."""
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
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr(updates_made(new.opt_state)) * controls.lr_scale,
            "skipped": new.guard.total,
            "consecutive": new.guard.consecutive,
        }
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
        weights = valid_tokens(batch["labels"])
        n_positions = batch["labels"].size
        grads, loss = accumulate(model, config, params, batch, weights, n_positions)
        return jax.lax.with_sharding_constraint(grads, shardings), loss

    return gradients


def accumulate(
    model: Model,
    config: TrainConfig,
    params: Params,
    batch: Batch,
    weights: Float[Array, "m"],
    n_positions: int,
) -> tuple[Params, Float[Array, ""]]:
    """Gradients and loss of an update, summed over its microbatches by a scan.

    Args:
        model: the model.
        config: the `[train]` section.
        params: parameters, whole or as the partitioner splits them.
        batch: this device group's share of the batch.
        weights: valid tokens of each microbatch over all device groups.
        n_positions: positions of the whole update over all device groups, valid or not.

    Returns:
        This device group's share of the gradients (float32) and of the loss.
    """
    z_scale = config.z_loss_weight / n_positions

    def microbatch_loss(params: Params, microbatch: Batch, scale: Array) -> Array:
        loss = loss_sum(model, config, params, microbatch)
        return scale * loss.total + z_scale * loss.square_lse

    def body(carry: tuple[Params, Array], xs: tuple[Batch, Array]) -> tuple[Any, None]:
        loss, grads = jax.value_and_grad(microbatch_loss)(params, *xs)
        total, total_loss = carry
        total = jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, grads)
        return (total, total_loss + loss), None

    # Zeros made from what they will add up, so that they vary over the same mesh axes.
    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    start = (zeros, jnp.zeros_like(batch["labels"][0, 0, 0], jnp.float32))
    return jax.lax.scan(body, start, (batch, token_scales(weights, config.loss_norm)))[0]


def loss_sum(model: Model, config: TrainConfig, params: Params, microbatch: Batch) -> LossSum:
    """Loss sums of one microbatch [batch, seq]."""
    hidden = model.hidden(params, microbatch["input_ids"], microbatch.get("doc_ids"))
    return cross_entropy(hidden, model.head(params), microbatch["labels"], config)


def _reduced_once(
    model: Model, config: TrainConfig, mesh: Mesh
) -> Callable[[Params, Batch], tuple[Params, Array]]:
    """`grad_sync = "update"`: the data axes are taken from the partitioner, tp stays with it."""
    specs = jax.tree.map(_data_spec, model.axes, is_leaf=lambda node: isinstance(node, tuple))
    groups = data_parallel_size(mesh)

    def local(params: Params, batch: Batch) -> tuple[Params, Array]:
        params = jax.tree.map(functools.partial(_gather, dtype=model.dtype), params, model.axes)
        weights = jax.lax.psum(valid_tokens(batch["labels"]), DATA_AXES)
        n_positions = batch["labels"].size * groups
        grads, loss = accumulate(model, config, params, batch, weights, n_positions)
        return jax.tree.map(_reduce, grads, specs), jax.lax.psum(loss, DATA_AXES)

    return jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(specs, P(None, DATA_AXES)),
        out_specs=(specs, P()),
        axis_names=set(DATA_AXES),
    )


def _data_spec(axes: Axes) -> P:
    """The data axes of a parameter's sharding; the others stay with the partitioner."""
    return P(*(part if part in DATA_AXES else None for part in partition_spec(axes)))


def _gather(param: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """The whole of a parameter that is split over data axes; matrices travel in `dtype`."""
    if is_matrix(axes):
        param = param.astype(dtype)
    spec = _data_spec(axes)
    for dimension, axis in enumerate(spec):
        if axis is not None:
            param = jax.lax.all_gather(param, axis, axis=dimension, tiled=True)
    # Each group differentiates its own copy; the sum over groups is `_reduce`'s business.
    return jax.lax.pcast(param, _axes_without(spec), to="varying")


def _reduce(grad: Array, spec: P) -> Array:
    """Sum over device groups, each keeping its share. In float32, whatever the compute dtype."""
    for dimension, axis in enumerate(spec):
        if axis is not None:
            grad = jax.lax.psum_scatter(grad, axis, scatter_dimension=dimension, tiled=True)
    return jax.lax.psum(grad, _axes_without(spec))


def _axes_without(spec: P) -> tuple[str, ...]:
    return tuple(axis for axis in DATA_AXES if axis not in tuple(spec))


def example_batch(config: JobConfig, mesh: Mesh, *, packed: bool) -> Batch:
    """The shape and sharding of a batch, for compiling ahead."""
    rows = config.train.microbatch_size(data_parallel_size(mesh))
    shape = (config.train.grad_accum_steps, rows, config.train.seq_len)
    leaf = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch_sharding(mesh))
    names = ("input_ids", "labels", "doc_ids") if packed else ("input_ids", "labels")
    return dict.fromkeys(names, leaf)
