"""Gradients and loss of a batch, summed over its microbatches, on any mesh.

There are two ways to reduce gradients between data-parallel devices (`train.grad_sync`;
`step.execution` has resolved "auto" before):

    update      Weights are gathered once and gradients reduced once per update. The scan over
                microbatches exchanges nothing between data-parallel devices. This costs the memory
                of gathered weights (compute dtype) and gathered gradients (float32).
    microbatch  In every microbatch, the partitioner gathers each layer's weights when they are
                used and immediately reduces the layer's gradients: more traffic, least memory.

In both, devices add up gradients in float32 or in the compute dtype, and send them in that dtype or
rounded to the compute dtype (`train.reduce_dtype`). Microbatches are added up in float32.

The order of microbatches is sequential, or given by `pipeline.schedule` if there are pipeline
stages. Auxiliary outputs of layers and loss (`AuxOutputs`) are reduced like the loss.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, PyTree

from jaxforge.aux_outputs import combine, merge
from jaxforge.config.axes import DATA_AXES
from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.kernels.attention_backends import BACKENDS
from jaxforge.model.dropout import MASK_KEYS
from jaxforge.model.linear import is_matrix
from jaxforge.model.transformer import Model, Params, join
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import split
from jaxforge.parallel import collectives
from jaxforge.parallel.mesh import STAGES, token_parallel_size
from jaxforge.parallel.sharding import (
    Axes,
    automatic_axes,
    batch_specs,
    compute_axes,
    constrain,
    group_axes,
    manual_over,
    mesh_axes,
    partition_spec,
)
from jaxforge.step.padded_batch import N_MICROBATCHES
from jaxforge.step.pipelined import pipelined
from jaxforge.step.update_loss import (
    Batch,
    Loss,
    TokenWeights,
    build_training_loss,
    join_weights,
    split_weights,
    update_loss_weights,
)

Accumulate = Callable[..., tuple[Params, Loss]]
"""(params, model state, batch, token weights, other weights) -> gradients (float32) and loss.

Both are summed over microbatches. `LossWeights` are passed in two parts (`split_weights`).
"""

Gradients = Callable[[Params, Params, Batch, Array | None], tuple[Params, Loss]]
"""(params, model state, batch, loss scale or None) -> float32 gradients, sharded like parameters,
and the loss. Both are multiplied by the scale."""


def make_gradients(model: Model, config: JobConfig, mesh: Mesh | AbstractMesh) -> Gradients:
    """Return the function that computes the gradients of an update.

    It takes all parameters and returns the gradients of those that are not frozen. Frozen
    parameters are passed to the forward pass like non-trainable state.
    """
    frozen = frozen_paths(model.axes, config)
    if not frozen:
        return _gradients_of_all(model, config, mesh)
    constant = frozen
    if _stage_axes(mesh):  # a stage counts its layers by their differentiated parameters
        trained_parts = {path[0] for path in flatten_dict(model.axes).keys() - frozen}
        constant = frozenset(path for path in frozen if path[0] in trained_parts)
    view, numbers = model.with_frozen(constant).with_layer_numbers()
    gradients = _gradients_of_all(view, config, mesh)

    def gradients_of_trained(
        params: Params, state: Params, batch: Batch, scale: Array | None = None
    ) -> tuple[Params, Loss]:
        if numbers and MASK_KEYS not in batch:
            raise ValueError("lora.dropout needs the keys of step.mask_keys in the batch")
        idle, varied = split(params, constant)
        grads, loss = gradients(varied, join(join(idle, state), numbers), batch, scale)
        return split(grads, frozen)[1], loss

    return gradients_of_trained


def _gradients_of_all(model: Model, config: JobConfig, mesh: Mesh | AbstractMesh) -> Gradients:
    """Return the function that computes the gradients of all parameters of a model."""
    train, stages = config.train, _stage_axes(mesh)
    # Layers of wrappers, from the outside to the inside:
    #
    # "update"      gather weights -> shard_map(data axes [, pp]): scan over microbatches -> reduce
    # "microbatch"  [shard_map(pp):] scan over microbatches; the partitioner reduces inside it
    #
    # A group is a set of devices that share their tokens: the devices of a position on the data
    # axes. With a single group there is nothing to reduce.
    add_up: Accumulate = functools.partial(pipelined if stages else accumulate, model, config)
    if train.grad_sync == "update" and token_parallel_size(mesh) > 1:
        return _reduce_per_update(model, train, mesh, add_up)
    if stages:
        add_up = _in_stages(model, mesh, add_up)

    def gradients(
        params: Params, state: Params, batch: Batch, scale: Array | None = None
    ) -> tuple[Params, Loss]:
        tokens, sum_weights = split_weights(update_loss_weights(batch, train, scale))
        grads, loss = add_up(params, state, batch, tokens, sum_weights)
        # Sharded like the parameters and the optimizer state, which they update.
        return jax.tree.map(lambda g, axes: constrain(g, *axes), grads, model.axes), loss

    return gradients


def _in_stages(model: Model, mesh: Mesh | AbstractMesh, add_up: Accumulate) -> Accumulate:
    """Return the function, run by every pipeline stage on its layers."""
    stages = (STAGES,)
    specs = _specs(model.axes, stages)

    def run(*inputs: Any) -> tuple[Params, Loss]:  # noqa: ANN401
        in_stage = jax.shard_map(
            add_up, in_specs=(specs, _specs(model.state.axes, stages), P(), P(), P()),
            out_specs=(specs, Loss._make((P(), P(stages)))),
            axis_names=_manual_axes(model, stages, mesh), check_vma=_can_check_vma(model, mesh),
        )  # fmt: skip
        return in_stage(*inputs)

    return run


def accumulate(
    model: Model,
    config: JobConfig,
    params: Params,
    state: Params,
    batch: Batch,
    token_weights: TokenWeights,
    other_weights: Sequence[Array | float],
) -> tuple[Params, Loss]:
    """Return gradients (float32) and loss of a batch, summed over its microbatches by a loop.

    Args:
        model: the model.
        config: a validated config.
        params: the parameters.
        state: non-trainable state.
        batch: the batch.
        token_weights: token weights of each microbatch.
        other_weights: other weights of `LossWeights`.
    """
    loss = build_training_loss(config, model)

    def microbatch_loss(params: Params, batch: Batch, tokens: TokenWeights) -> tuple[Array, Loss]:
        weights, variables = join_weights(tokens, other_weights), join(params, state)
        hidden, out = model.forward(variables, batch, weights)
        aux = loss(variables, hidden, batch, weights).with_layer_losses(out.aux)
        return aux.loss, Loss(aux, out.aux._replace(loss_terms={}))

    gradient = jax.grad(microbatch_loss, has_aux=True)

    def body(total: Params, xs: tuple[Batch, TokenWeights]) -> tuple[Params, Loss]:
        grads, loss = gradient(params, *xs)
        return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), total, grads), loss

    # Carry: gradients, summed in float32 even if a microbatch's gradients are in the compute dtype.
    # Stacked output: the loss of each microbatch.
    n = batch.get(N_MICROBATCHES)
    xs = ({name: x for name, x in batch.items() if name != N_MICROBATCHES}, token_weights)
    if n is not None:
        grads, losses = _sum_first(n, body, params, xs)
    elif len(token_weights[0]) == 1:  # no loop, and no zeros to add to
        grads, losses = gradient(params, *jax.tree.map(lambda x: x[0], xs))
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    else:
        grads, losses = jax.lax.scan(body, _zero_grads(params), xs)
        losses = _merge_losses(losses)
    return grads, losses


def _zero_grads(params: Params) -> Params:
    """Return zero gradients, which vary over the same mesh axes as the parameters."""
    return jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)


def _sum_first(
    n: Array,
    body: Callable[[Params, tuple[Batch, TokenWeights]], tuple[Params, Loss]],
    params: Params,
    xs: tuple[Batch, TokenWeights],
) -> tuple[Params, Loss]:
    """Return gradients and loss of the first `n` microbatches, a number known when the step runs.

    The operations and their order are those of the scan over `n` microbatches, so that the results
    are the same bit for bit. Losses are merged as they come and not stacked, starting with zeros:
    0 + x = x, and a `Max` is at least 0.
    """

    def microbatch(i: Array | int) -> tuple[Batch, TokenWeights]:
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), xs)

    def add(i: Array, carry: tuple[Params, Loss]) -> tuple[Params, Loss]:
        total, loss = body(carry[0], microbatch(i))
        return total, merge(carry[1], loss)

    zeros = _zero_grads(params)
    _, loss = jax.eval_shape(body, zeros, microbatch(0))
    varying = collectives.varying_axes((zeros, xs))
    no_loss = jax.tree.map(
        lambda leaf: collectives.varying(jnp.zeros(leaf.shape, leaf.dtype), varying), loss
    )
    return jax.lax.fori_loop(0, n, add, (zeros, no_loss))


def _merge_losses(losses: Loss) -> Loss:
    """Merge stacked losses in their order."""
    # A scan instead of `jnp.sum`: maxima and sums are mixed, and the order of sums is that of the
    # microbatches on every mesh.
    first = jax.tree.map(lambda x: x[0], losses)
    later = jax.tree.map(lambda x: x[1:], losses)
    return jax.lax.scan(lambda total, part: (merge(total, part), None), first, later)[0]


def _can_check_vma(model: Model, mesh: Mesh | AbstractMesh) -> bool:
    """Return whether `shard_map` can check the mesh axes over which results vary."""
    # Some functions do not declare over which axes their results vary: Pallas kernels, all-to-alls
    # of experts, and sparse attention (`sharding.run_on_shares`).
    c = model.config
    kernels = [BACKENDS[name] for name in model.runtime.attention_kernels]
    is_opaque = any(kernel.is_opaque for kernel in kernels) or mesh.shape["cp"] > 1
    return not (is_opaque or c.is_moe or c.latent_attention.has_indexer)


def _manual_axes(model: Model, names: tuple[str, ...], mesh: Mesh | AbstractMesh) -> set[str]:
    """Return the axes that a `shard_map` makes manual: the partitioner handles the others."""
    named = manual_over(names, mesh) if model.runtime.wholly_manual else set(names)
    return named & automatic_axes()


def _stage_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axis of pipeline stages, or nothing without stages."""
    return (STAGES,) if mesh.shape[STAGES] > 1 else ()


def _specs(axes: PyTree, manual: tuple[str, ...], *, grouped: bool = False) -> PyTree:
    """Return the PartitionSpecs of weights over some mesh axes.

    Args:
        axes: logical axes of the weights.
        manual: the mesh axes.
        grouped: whether arrays have a leading dimension over the groups of data-parallel devices
            that have the same weight.
    """

    def spec(axes: Axes) -> P:
        names = (tuple(n for n in mesh_axes(a) if n in manual) or None for a in compute_axes(axes))
        return P(*((group_axes(axes),) if grouped else ()), *names)

    return _by_axes(spec, axes)


def _by_axes(spec: Callable[[Axes], P | Axes], axes: PyTree) -> PyTree:
    return jax.tree.map(spec, axes, is_leaf=lambda node: isinstance(node, tuple))


def _reduce_per_update(
    model: Model, config: TrainConfig, mesh: Mesh | AbstractMesh, add_up: Accumulate
) -> Gradients:
    """Return the gradients for `grad_sync = "update"`.

    Device groups do not communicate while they accumulate. The data axes are manual; the
    partitioner handles tp (`_manual_axes`).
    """
    stages = _stage_axes(mesh)
    manual = (*DATA_AXES, *stages)
    reduce = _reduction(model, mesh)

    def gradients(
        params: Params, state: Params, batch: Batch, scale: Array | None = None
    ) -> tuple[Params, Loss]:
        tokens, sum_weights = split_weights(update_loss_weights(batch, config, scale))

        def in_group(*inputs: Any) -> tuple[Params, Loss]:  # noqa: ANN401
            sums = add_up(*_vary_over_groups(model, *inputs), sum_weights)
            return jax.tree.map(lambda x: x[None], sums)  # an entry per group

        groups = jax.shard_map(
            in_group,
            in_specs=(
                _specs(model.axes, manual),
                _specs(model.state.axes, manual),
                batch_specs(batch),
                P(),
            ),
            out_specs=(
                _specs(model.axes, manual, grouped=True),
                Loss._make((P(DATA_AXES), P(DATA_AXES, stages))),
            ),
            axis_names=_manual_axes(model, manual, mesh),
            check_vma=_can_check_vma(model, mesh),
        )
        # 1. Gather weights. This is outside of `groups`: a collective over data axes inside a
        # partly manual `shard_map` would make the partitioner gather the tp shards first
        # (docs/upstream.md).
        gather = functools.partial(_gather, dtype=model.dtype)
        params = jax.tree.map(gather, params, model.axes)
        state = jax.tree.map(gather, state, model.state.axes)
        # 2. Accumulate in each group: results [groups, ...].
        grads, losses = groups(params, state, batch, tokens)
        # 3. Reduce over groups. Losses are small and left to the partitioner.
        add, largest = (functools.partial(function, axis=0) for function in (jnp.sum, jnp.max))
        return reduce(grads), combine(add, largest, losses)

    return gradients


def _vary_over_groups(
    model: Model, params: Params, state: Params, batch: Batch, weights: TokenWeights
) -> tuple[Params, Params, Batch, TokenWeights]:
    """Let each group of devices differentiate its own copy; gradients are summed afterwards."""

    # Without `pcast`, autodiff would insert a psum for every use of a replicated weight, inside the
    # scan over microbatches. A varying copy has a varying gradient, which is reduced once at the
    # end.
    # Frozen parameters in the state also vary: the explicit backward passes of products return a
    # varying gradient for each operand, whether it is used or not.
    def vary(array: Array, axes: Axes) -> Array:
        return jax.lax.pcast(array, group_axes(axes), to="varying")

    params = jax.tree.map(vary, params, model.axes)
    state = jax.tree.map(vary, state, model.state.axes)
    weights = jax.tree.map(lambda w: jax.lax.pcast(w, DATA_AXES, to="varying"), weights)
    return params, state, batch, weights


def _gather(param: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """Gather a parameter over the data axes but not over tp; matrices are sent in `dtype`."""
    if is_matrix(axes):
        param = param.astype(dtype)  # before the gather: half the traffic in bf16
    return collectives.all_gather_weight(param, axes)


def _reduction(model: Model, mesh: Mesh | AbstractMesh) -> Callable[[Params], Params]:
    """Return the function that sums gradients [group, ...] and leaves each device its shard.

    Matrices are sent and added up as `train.reduce_dtype` says; the result is float32.
    """
    runtime = model.runtime

    def reduce_gradient(grad: Array, axes: Axes) -> Array:
        grad, sums = grad[0], grad.dtype
        if is_matrix(axes):
            grad, sums = grad.astype(runtime.sent_dtype), runtime.reduce_dtype
        return collectives.reduce_gradient(grad, axes, sums).astype(jnp.float32)

    def reduce(grads: Params) -> Params:
        # Manual over every mesh axis: the partitioner would gather the tp shards first.
        in_group = jax.shard_map(
            lambda grads: jax.tree.map(reduce_gradient, grads, model.axes),
            in_specs=(_specs(model.axes, mesh.axis_names, grouped=True),),
            out_specs=_by_axes(partition_spec, model.axes),
            axis_names=automatic_axes(),
        )
        return in_group(grads)

    return reduce
