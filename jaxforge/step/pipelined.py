"""Gradients and loss of a batch with pipeline stages."""

import functools
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxforge.aux_outputs import AuxOutputs, LossTerms
from jaxforge.config.job import JobConfig
from jaxforge.config.model import LAYERS
from jaxforge.model import remat
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.layer_scan import LayerInputs, join_periods, row_of_layer, split_periods
from jaxforge.model.plan import LayerKind
from jaxforge.model.transformer import Model, Params, join
from jaxforge.parallel import collectives
from jaxforge.parallel.pipeline import spmd
from jaxforge.parallel.pipeline.schedule import SCHEDULES, tick_arrays
from jaxforge.parallel.stages import split_layers
from jaxforge.step.update_loss import Batch, Loss, TokenWeights, build_training_loss, join_weights

Microbatch = tuple[Batch, TokenWeights]
LayerResult = tuple[tuple[Array, LossTerms], AuxOutputs]
"""The output of a layer with its loss terms, and its other auxiliary outputs."""


def pipelined(
    model: Model,
    config: JobConfig,
    params: Params,
    state: Params,
    batch: Batch,
    token_weights: TokenWeights,
    other_weights: Sequence[Array | float],
) -> tuple[Params, Loss]:
    """Return gradients (float32) and loss of a batch, as the pipeline schedule computes them.

    Must be called in `shard_map`, manual over `pp`.

    Args:
        model: the model.
        config: a validated config.
        params: parameters of this stage.
        state: non-trainable state of this stage.
        batch: the batch.
        token_weights: token weights of each microbatch.
        other_weights: other weights of `LossWeights`.
    """
    d = config.distributed
    schedule = SCHEDULES[d.pp_schedule](d.pp, config.train.grad_accum_steps, d.chunks)
    stacks, other_params = split_layers(params)
    layer_state, other_state = split_layers(state)
    functions = _StageModel(model, config, other_state, other_weights).functions(d.pp)
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
    loss = Loss(carry.loss_aux.with_layer_losses(summed), layers._replace(loss_terms={}))
    return {**carry.outer, **layer_grads}, loss


class _StageModel:
    """The model as functions of a pipeline stage.

    Args:
        model: the model.
        config: a validated config.
        state: non-trainable state outside of the layers.
        other_weights: other weights of `LossWeights`.
    """

    def __init__(
        self,
        model: Model,
        config: JobConfig,
        state: Params,
        other_weights: Sequence[Array | float],
    ) -> None:
        self._model, self._state, self._other_weights = model, state, other_weights
        self._loss = build_training_loss(config, model)
        self._period = model.plan.stage_period(model.stack)
        self._remat = remat.stage_remat(model.runtime.save)
        self._layers = {
            stack: remat.block(self._remat.save, functools.partial(self._run_layer, stack))
            for stack in model.config.stacks
        }

    def functions(self, stages: int) -> spmd.StageFunctions:
        """Return the functions, with the kinds and the locations of the layers of all stages."""
        plan, stack, period = self._model.plan, self._model.stack, self._period
        rows = plan.kinds_by_row(stack), stack.rows() >= 0, None if period else stack.locations()
        kinds, is_layer, locations = jax.tree.map(lambda column: column.reshape(stages, -1), rows)
        branches = tuple(spmd.Branch((name,), layer) for name, layer in self._layers.items())
        if len(period) > 1:
            kinds = jax.tree.map(lambda rows: rows.reshape(stages, -1, len(period)), kinds)
            is_layer = is_layer[:, :: len(period)]  # no row of such stages is empty
            branches = (spmd.Branch(tuple(self._layers), self._run_period),)
        return spmd.StageFunctions(
            self._embed, self._context, branches, self._head_and_loss, kinds, is_layer, locations,
            self._remat.saves_residuals,
        )  # fmt: skip

    def _embed(self, params: Params, microbatch: Microbatch) -> Array:
        return self._model.embed(join(params, self._state), microbatch[0])

    def _context(self, x: Array, microbatch: Microbatch) -> Context:
        batch, tokens = microbatch
        weights = join_weights(tokens, self._other_weights)
        return self._model.batch_context(x, batch, loss_weights=weights)

    def _run_layer(
        self, stack: str, kind: LayerKind, rows: Params, x: Array, inputs: tuple[Context, Params]
    ) -> LayerResult:
        (context, states), model = inputs, self._model
        block = model.block(stack, join(rows[stack], states.get(stack, {})), context)
        y, out = block(x, context, settings=LayerSettings(kind, model.plan, model.runtime))
        return (y, out.aux.loss_terms), out.aux._replace(loss_terms={})

    def _run_period(
        self, kinds: LayerKind, rows: Params, x: Array, inputs: tuple[Context, Params]
    ) -> LayerResult:
        """Run the layers of a period; arrays have a dimension of them."""
        context, states = inputs
        outs, used = [], Counter[str]()
        for i, stack in enumerate(self._period):
            params, state = row_of_layer(LayerInputs(rows, {stack: {}, **states}), stack, used)
            kind = jax.tree.map(lambda leaf, i=i: leaf[i], kinds)
            inputs = context, {stack: state}
            (x, terms), aux = self._layers[stack](kind, {stack: params}, x, inputs)
            outs.append((terms, aux))
        terms, aux = jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)
        return (x, terms), aux

    def _head_and_loss(self, params: Params, x: Array, microbatch: Microbatch) -> AuxOutputs:
        (batch, tokens), variables = microbatch, join(params, self._state)
        hidden = self._model.final_norm(variables, x)
        return self._loss(variables, hidden, batch, join_weights(tokens, self._other_weights))


def _axes_by_period(axes: Params, period: Sequence[str]) -> Params:
    """Return the logical axes of parameters after `split_periods`."""
    if len(period) < 2:
        return axes
    stacks, unstacked = split_layers(axes)
    split = jax.tree.map(
        lambda names: (names[0], None, *names[1:]),
        stacks,
        is_leaf=lambda node: isinstance(node, tuple),
    )
    return {**unstacked, **split}
