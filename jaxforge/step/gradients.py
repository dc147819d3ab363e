"""Gradients and loss of a batch, summed over its microbatches, on any mesh.

There are two ways to reduce gradients between data-parallel devices (`train.grad_sync`;
`step.grad_sync` has resolved "auto" before):

    update      Weights are gathered once and gradients reduced once per update. The scan over
                microbatches exchanges nothing between data-parallel devices. This costs the memory
                of gathered weights (compute dtype) and gathered gradients (float32).
    microbatch  In every microbatch, the partitioner gathers each layer's weights when they are
                used and immediately reduces the layer's gradients: more traffic, least memory.

In both, devices add up gradients in float32 or in the compute dtype (`train.reduce_dtype`), and
microbatches are added up in float32.

The order of microbatches is sequential, or given by `pipeline.schedule` if there are pipeline
stages. Auxiliary outputs of layers and loss (`AuxOutputs`) are reduced like the loss.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PyTree, Shaped

from jaxforge.aux_outputs import AuxOutputs, LossTerms, LossWeights, combine, merge
from jaxforge.config.axes import DATA_AXES
from jaxforge.config.job import JobConfig
from jaxforge.config.model import LAYERS
from jaxforge.config.train import TrainConfig
from jaxforge.kernels.attention_backends import BACKENDS
from jaxforge.kernels.masking import padding_of
from jaxforge.model import remat
from jaxforge.model.dropout import MASK_KEYS
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.layer_scan import LayerInputs, join_periods, row_of_layer, split_periods
from jaxforge.model.linear import is_matrix
from jaxforge.model.plan import LayerKind
from jaxforge.model.transformer import Model, Params, join
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import split
from jaxforge.parallel import collectives
from jaxforge.parallel.mesh import STAGES, token_parallel_size
from jaxforge.parallel.pipeline import spmd
from jaxforge.parallel.pipeline.schedule import SCHEDULES
from jaxforge.parallel.pipeline.tick_arrays import tick_arrays
from jaxforge.parallel.sharding import (
    Axes,
    batch_specs,
    compute_axes,
    data_axes,
    group_axes,
    manual_over,
    mesh_axes,
    param_shardings,
    partition_spec,
)
from jaxforge.parallel.stages import split_layers
from jaxforge.step.cross_entropy import token_weights, valid_tokens
from jaxforge.step.losses import MicrobatchLoss
from jaxforge.step.mtp import further_weights, with_mtp_loss
from jaxforge.step.objectives import build_objective
from jaxforge.step.padded_batch import N_MICROBATCHES, microbatch_count, reciprocal

Batch = dict[str, Shaped[Array, "m b ..."]]
"""`input_ids`, `labels` and, when packed, `segment_ids`: [microbatches, sequences, tokens].

If rows may be padded, `is_padding` is nonzero for padding tokens, which are ignored. A mixture has
`dataset_idx` [microbatches, sequences], or instead `dataset_mask`. Model and loss receive all other
fields of the data as well, one microbatch at a time. A padded batch has `n_microbatches`
(`step.padded_batch`).
"""


class Loss(NamedTuple):
    """Loss of an update, or of a part of it.

    Attributes:
        aux: loss terms, including those of layers; metrics and statistics of the loss.
        layers: metrics and statistics of the layers, by row of stacked parameters.
    """

    aux: AuxOutputs
    layers: AuxOutputs

    @property
    def value(self) -> Float[Array, ""]:
        """The value that training minimises."""
        return self.aux.loss

    @property
    def statistics(self) -> PyTree:
        """The statistics that update non-trainable state."""
        return {**self.aux.statistics, LAYERS: self.layers.statistics}


Accumulate = Callable[..., tuple[Params, Loss]]
"""(params, model state, batch, token weights, other weights) -> gradients (float32) and loss.

Both are summed over microbatches. `LossWeights` are passed in two parts (`split_weights`).
"""

TokenWeights = tuple[Array, tuple[Array, ...]]
"""`token` and `further` of `LossWeights`, for each microbatch or for one."""


Gradients = Callable[[Params, Params, Batch, Array | None], tuple[Params, Loss]]
"""(params, model state, batch, loss scale or None) -> float32 gradients, sharded like parameters,
and the loss. Both are multiplied by the scale."""


def make_gradients(model: Model, config: JobConfig, mesh: Mesh) -> Gradients:
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
        idle, others = split(params, constant)
        grads, loss = gradients(others, join(join(idle, state), numbers), batch, scale)
        return split(grads, frozen)[1], loss

    return gradients_of_trained


def _gradients_of_all(model: Model, config: JobConfig, mesh: Mesh) -> Gradients:
    """Return the function that computes the gradients of all parameters of a model."""
    train, stages = config.train, _stage_axes(mesh)
    # Layers of wrappers, from the outside to the inside:
    #
    # "update"      gather weights -> shard_map(data axes [, pp]): scan over microbatches -> reduce
    # "microbatch"  [shard_map(pp):] scan over microbatches; the partitioner reduces inside it
    #
    # A group is a set of devices that share their tokens: the devices of a position on the data
    # axes. With a single group there is nothing to reduce.
    by_group = train.grad_sync == "update" and token_parallel_size(mesh) > 1
    add_up = functools.partial(pipelined if stages else accumulate, model, config, by_group)
    if by_group:
        return _reduce_per_update(model, train, mesh, add_up)
    if stages:
        specs = _specs(model.axes, stages)
        add_up = jax.shard_map(
            add_up, mesh=mesh, in_specs=(specs, _specs(model.state.axes, stages), P(), P(), P()),
            out_specs=(specs, Loss._make((P(), P(stages)))),
            axis_names=_manual_axes(model, stages, mesh), check_vma=_can_check_vma(model, mesh),
        )  # fmt: skip
    shardings = param_shardings(model.abstract, model.axes, mesh)

    def gradients(
        params: Params, state: Params, batch: Batch, scale: Array | None = None
    ) -> tuple[Params, Loss]:
        tokens, others = split_weights(update_loss_weights(batch, train, scale))
        grads, loss = add_up(params, state, batch, tokens, others)
        # Sharded like the parameters and the optimizer state, which they update.
        return jax.lax.with_sharding_constraint(grads, shardings), loss

    return gradients


def with_dataset_mask(batch: Batch, n_datasets: int) -> Batch:
    """Replace `dataset_idx` of a batch by `dataset_mask` [m, b, datasets], one-hot."""
    if not n_datasets:
        return batch
    others = {name: leaf for name, leaf in batch.items() if name != "dataset_idx"}
    return {**others, "dataset_mask": batch["dataset_idx"][..., None] == jnp.arange(n_datasets)}


def accumulate(
    model: Model,
    config: JobConfig,
    by_group: bool,
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
        by_group: whether this runs in `shard_map`, manual over the data axes
            (`_reduce_per_update`).
        params: the parameters.
        state: non-trainable state.
        batch: the batch.
        token_weights: token weights of each microbatch.
        other_weights: other weights of `LossWeights`.
    """
    loss = _build_training_loss(config, model)
    if by_group:
        params, state, token_weights = _vary_over_groups(model, params, state, token_weights)

    def microbatch_loss(params: Params, batch: Batch, tokens: TokenWeights) -> tuple[Array, Loss]:
        weights, variables = _join_weights(tokens, other_weights), join(params, state)
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
    return _add_group_dimension(grads, losses) if by_group else (grads, losses)


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


def _vary_over_groups(
    model: Model, params: Params, state: Params, weights: TokenWeights
) -> tuple[Params, Params, TokenWeights]:
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
    return params, state, jax.tree.map(lambda w: jax.lax.pcast(w, DATA_AXES, to="varying"), weights)


def _add_group_dimension(grads: Params, loss: Loss) -> tuple[Params, Loss]:
    """Add a leading dimension with one entry per device group."""
    return jax.tree.map(lambda x: x[None], (grads, loss))


def _merge_losses(losses: Loss) -> Loss:
    """Merge stacked losses in their order."""
    # A scan instead of `jnp.sum`: maxima and sums are mixed, and the order of sums is that of the
    # microbatches on every mesh.
    first = jax.tree.map(lambda x: x[0], losses)
    others = jax.tree.map(lambda x: x[1:], losses)
    return jax.lax.scan(lambda total, part: (merge(total, part), None), first, others)[0]


def pipelined(
    model: Model,
    config: JobConfig,
    by_group: bool,
    params: Params,
    state: Params,
    batch: Batch,
    token_weights: TokenWeights,
    other_weights: Sequence[Array | float],
) -> tuple[Params, Loss]:
    """Return the results of `accumulate` with pipeline stages.

    Must be called in `shard_map`, manual over `pp`.
    """
    d = config.distributed
    schedule = SCHEDULES[d.pp_schedule](d.pp, config.train.grad_accum_steps, d.chunks)
    if by_group:
        params, state, token_weights = _vary_over_groups(model, params, state, token_weights)
    stacks, other_params = split_layers(params)
    layer_state, other_state = split_layers(state)
    functions = _stage_functions(model, config, other_state, other_weights)
    # Layers that repeat in all stages are one row of the program of a stage.
    period = model.plan.stage_period(model.stack)
    repeats = model.stack.per_chunk * d.chunks // max(1, len(period))
    stacks, layer_state = split_periods(period, repeats, (stacks, layer_state))
    params = {**other_params, **stacks}
    stage = spmd.Stage(schedule, functions, params, layer_state, (batch, token_weights))
    # One scan over the ticks of each phase of the schedule. Every stage runs the same program; its
    # row of the table selects the microbatch and the operation of a tick.
    carry = stage.initial_carry(_axes_by_period(model.axes, period))
    for phase, rows in zip(schedule.phases(), tick_arrays(schedule), strict=True):
        carry, _ = jax.lax.scan(functools.partial(stage.tick, phase, rows), carry, rows)
    layers, layer_grads = join_periods(period, (carry.layer_aux, carry.layers))
    # Loss terms of layers are per stage; their sum over stages belongs to the loss. Metrics and
    # statistics stay with their rows.
    summed = layers._replace(
        loss_terms=jax.tree.map(lambda x: collectives.psum(x, LAYERS), layers.loss_terms)
    )
    losses = Loss(carry.loss_aux.with_layer_losses(summed), layers._replace(loss_terms={}))
    grads = {**carry.outer, **layer_grads}
    return _add_group_dimension(grads, losses) if by_group else (grads, losses)


def _stage_functions(
    model: Model, config: JobConfig, state: Params, other_weights: Sequence[Array | float]
) -> spmd.StageFunctions:
    """Split the model into the functions of a pipeline stage.

    A microbatch of a stage is a pair: batch, token weights.

    Args:
        model: the model.
        config: a validated config.
        state: non-trainable state outside of the layers.
        other_weights: other weights of `LossWeights`.
    """
    saves = remat.stage_remat(model.runtime.save)
    loss_function = _build_training_loss(config, model)

    def embed(params: Params, microbatch: tuple[Batch, TokenWeights]) -> Array:
        return model.embed(join(params, state), microbatch[0])

    def context(x: Array, microbatch: tuple[Batch, TokenWeights]) -> Context:
        batch, tokens = microbatch
        weights = _join_weights(tokens, other_weights)
        return model.batch_context(x, batch, loss_weights=weights)

    def layer(
        stack: str, kind: LayerKind, layer: Params, x: Array, inputs: tuple[Context, Params]
    ) -> tuple[tuple[Array, LossTerms], AuxOutputs]:
        context, layer_state = inputs
        block = model.block(stack, join(layer, layer_state), context)
        y, out = block(x, context, settings=LayerSettings(kind, model.plan, model.runtime))
        return (y, out.aux.loss_terms), out.aux._replace(loss_terms={})

    period = model.plan.stage_period(model.stack)
    layers = {
        stack: remat.block(saves.save, functools.partial(layer, stack))
        for stack in model.config.stacks
    }

    def run_layer(
        stack: str, kind: LayerKind, rows: Params, x: Array, inputs: tuple[Context, Params]
    ) -> tuple[tuple[Array, LossTerms], AuxOutputs]:
        context, states = inputs
        return layers[stack](kind, rows[stack], x, (context, states.get(stack, {})))

    def run_period(
        kinds: LayerKind, rows: Params, x: Array, inputs: tuple[Context, Params]
    ) -> tuple[tuple[Array, LossTerms], AuxOutputs]:
        """Run the layers of a period; arrays have a dimension of them."""
        context, states = inputs
        outs, used = [], Counter[str]()
        for i, stack in enumerate(period):
            params, state = row_of_layer(LayerInputs(rows, {stack: {}, **states}), stack, used)
            kind = jax.tree.map(lambda leaf, i=i: leaf[i], kinds)
            (x, terms), aux = layers[stack](kind, params, x, (context, state))
            outs.append((terms, aux))
        terms, aux = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
        return (x, terms), aux

    def loss(params: Params, x: Array, microbatch: tuple[Batch, TokenWeights]) -> AuxOutputs:
        (batch, tokens), variables = microbatch, join(params, state)
        hidden = model.final_norm(variables, x)
        return loss_function(variables, hidden, batch, _join_weights(tokens, other_weights))

    locations = None if period else model.stack.locations()
    rows = model.plan.kinds_by_row(model.stack), model.stack.rows() >= 0, locations
    stages = config.distributed.pp
    kinds, is_layer, locations = jax.tree.map(lambda column: column.reshape(stages, -1), rows)
    branches = tuple(
        spmd.Branch((stack,), functools.partial(run_layer, stack)) for stack in model.config.stacks
    )
    if len(period) > 1:
        kinds = jax.tree.map(lambda rows: rows.reshape(stages, -1, len(period)), kinds)
        is_layer = is_layer[:, :: len(period)]  # no row of such stages is empty
        branches = (spmd.Branch(tuple(model.config.stacks), run_period),)
    return spmd.StageFunctions(
        embed, context, branches, loss, kinds, is_layer, locations, saves.saves_residuals
    )


def _axes_by_period(axes: Params, period: Sequence[str]) -> Params:
    """Return the logical axes of parameters after `split_periods`."""
    if len(period) < 2:
        return axes
    stacks, others = split_layers(axes)
    return {**others, **_by_axes(lambda a: (a[0], None, *a[1:]), stacks)}


def _can_check_vma(model: Model, mesh: Mesh) -> bool:
    """Return whether `shard_map` can check the mesh axes over which results vary."""
    # Pallas kernels and all-to-alls of experts do not declare over which axes their results vary.
    is_opaque = BACKENDS[model.runtime.attention].is_opaque or mesh.shape["cp"] > 1
    return not (is_opaque or model.config.is_moe)


def _manual_axes(model: Model, names: tuple[str, ...], mesh: Mesh) -> set[str]:
    """Return the manual axes of a `shard_map`: the partitioner handles the others."""
    return manual_over(names, mesh) if model.runtime.wholly_manual else set(names)


def _stage_axes(mesh: Mesh) -> tuple[str, ...]:
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


def update_loss_weights(
    batch: Batch, config: TrainConfig, scale: Array | None = None
) -> LossWeights:
    """Return the loss weights of an update; `token` and `further` have one entry per microbatch.

    A loss scale multiplies the weights, and so every value of a backward pass, including that of a
    loss with its own gradient.
    """
    labels, is_padding = batch["labels"], padding_of(batch)
    largest, rows, length = labels.shape
    microbatches = microbatch_count(batch)
    # All weights are functions of labels and padding, known before the first microbatch: gradients
    # need no division by a token count that only the last microbatch would complete.
    if is_padding is None:
        position = reciprocal(microbatches, largest, rows * length)
        sequence = reciprocal(microbatches, largest, rows)
    else:
        position = 1 / jnp.maximum(1, jnp.sum(~is_padding))
        sequence = 1 / jnp.maximum(1, jnp.sum(jnp.any(~is_padding, axis=-1)))
    weights = LossWeights(
        token=token_weights(valid_tokens(labels), config.loss_norm, microbatches),
        position=position,
        sequence=sequence,
        further=further_weights(batch, config.loss_norm, microbatches),
    )
    return weights if scale is None else jax.tree.map(lambda weight: weight * scale, weights)


def split_weights(weights: LossWeights) -> tuple[TokenWeights, tuple[Array | float, ...]]:
    """Split the weights of an update into those of each microbatch and the others."""
    return (weights.token, weights.further), (weights.position, weights.sequence)


def _join_weights(tokens: TokenWeights, others: Sequence[Array | float]) -> LossWeights:
    """Undo `split_weights` for a microbatch."""
    (token, further), (position, sequence) = tokens, others
    return LossWeights(token, position, sequence, further)


def _build_training_loss(config: JobConfig, model: Model) -> MicrobatchLoss:
    """Return the loss of `train.objective` with the term of multi-token prediction."""
    return with_mtp_loss(config.train, model, build_objective(config, model))


def unscale(grads: Params, loss: Loss, scale: Array | None) -> tuple[Params, Loss]:
    """Divide gradients and loss by the loss scale."""
    if scale is None:
        return grads, loss
    terms = {name: term / scale for name, term in loss.aux.loss_terms.items()}
    aux = loss.aux._replace(loss_terms=terms)
    return jax.tree.map(lambda grad: grad / scale, grads), loss._replace(aux=aux)


def _reduce_per_update(
    model: Model, config: TrainConfig, mesh: Mesh, add_up: Accumulate
) -> Gradients:
    """Return the gradients for `grad_sync = "update"`.

    Device groups do not communicate while they accumulate. The data axes are manual; the
    partitioner handles tp (`_manual_axes`).
    """
    stages = _stage_axes(mesh)
    manual = (*DATA_AXES, *stages)
    reduce = _reduction(model.axes, mesh, model.runtime.reduce_dtype)

    def gradients(
        params: Params, state: Params, batch: Batch, scale: Array | None = None
    ) -> tuple[Params, Loss]:
        tokens, others = split_weights(update_loss_weights(batch, config, scale))
        groups = jax.shard_map(
            functools.partial(add_up, other_weights=others),
            mesh=mesh,
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


def _gather(param: Array, axes: Axes, dtype: jnp.dtype) -> Array:
    """Gather a parameter over the data axes but not over tp; matrices are sent in `dtype`."""
    if is_matrix(axes):
        param = param.astype(dtype)  # before the gather: half the traffic in bf16
    return collectives.all_gather_weight(param, axes)


def _reduction(axes: PyTree, mesh: Mesh, dtype: jnp.dtype) -> Callable[[Params], Params]:
    """Return the function that sums gradients [group, ...] and leaves each device its shard.

    Matrices are added up in `dtype`; the result is float32.
    """

    def reduce_gradient(grad: Array, axes: Axes) -> Array:
        grad, groups = grad[0], group_axes(axes)
        if is_matrix(axes):
            grad = grad.astype(dtype)
        for dimension, axis in enumerate(axes):
            # FSDP axes: a reduce-scatter, after which the device holds its shard of the sum. The
            # other group axes (replicas) are summed by the psum below.
            if scattered := tuple(name for name in data_axes(axis) if name in groups):
                grad = collectives.psum_scatter(grad, scattered, dimension)
                groups = tuple(name for name in groups if name not in scattered)
        return jax.lax.psum(grad, groups).astype(jnp.float32)

    # Manual over every mesh axis: the partitioner would gather the tp shards first.
    return jax.shard_map(
        lambda grads: jax.tree.map(reduce_gradient, grads, axes),
        mesh=mesh,
        in_specs=(_specs(axes, mesh.axis_names, grouped=True),),
        out_specs=_by_axes(partition_spec, axes),
    )
