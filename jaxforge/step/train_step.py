"""One update as one executable: gradients over microbatches, guard, optimizer."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import metric_value
from jaxforge.config.job import JobConfig
from jaxforge.config.model import LAYERS
from jaxforge.config.points import MAX_LOGITS
from jaxforge.config.train import EIGHT_BIT, TrainConfig
from jaxforge.kernels.masking import padding_of
from jaxforge.model.moe import expert_counts
from jaxforge.model.qk_clip import check_mixers, clip_logits
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.ema import build_average
from jaxforge.optim.freezing import frozen_paths, keep_frozen
from jaxforge.optim.moments import is_updated_in_place
from jaxforge.optim.optimizer import global_norm, learning_rate, updates_made
from jaxforge.optim.rounding import build_apply
from jaxforge.optim.trees import join, split
from jaxforge.parallel.sharding import constrain
from jaxforge.parallel.stages import Stack
from jaxforge.state.train_state import Counts, TrainState
from jaxforge.step.collect import StepOutputs, collect_metrics
from jaxforge.step.context import spread_sequences
from jaxforge.step.cross_entropy import valid_tokens, valid_tokens_by_dataset
from jaxforge.step.gradients import (
    Batch,
    Gradients,
    Loss,
    unscale,
    with_dataset_mask,
)
from jaxforge.step.guard import Guard, select
from jaxforge.step.losses import DATASET_NLL
from jaxforge.step.mask_keys import with_mask_keys
from jaxforge.step.mtp import with_further_tokens
from jaxforge.step.padded_batch import microbatch_count

Metrics = dict[str, Any]
"""Results of a step, on the device; `training.result.StepResult` is a typed view.

For a mixture they include `dataset_nll` and `dataset_tokens` [datasets]: Σ -log p over valid
labels, and the number of valid labels.
"""


class Controls(NamedTuple):
    """Per-step decisions of the host, as traced scalars: changes do not recompile the step.

    Attributes:
        lr_scale: factor on the learning rate.
        apply: whether the update may be applied.
        next_lr_scale: factor on the learning rate of the next update, which is logged; None:
            `lr_scale`.
    """

    lr_scale: Float[Array, ""] | float = 1.0
    apply: Bool[Array, ""] | bool = True
    next_lr_scale: Float[Array, ""] | float | None = None


TrainStep = Callable[[TrainState, Batch, Controls], tuple[TrainState, Metrics]]


class CompiledSteps:
    """The compiled train step for each size of batch, by the number of its microbatches.

    Args:
        by_size: compiled steps by the number of microbatches.
        paddings: compiled `step.padded_batch.pad_batch` by the number of microbatches, for which
            the step of the largest batch runs all sizes; empty if each size has its own step.
        add_fields: adds the fields of a frozen model to a batch, given the variables of the state
            (`training.frozen`); None without such a model.

    Attributes:
        largest: the step for the largest batch.
    """

    def __init__(
        self,
        by_size: Mapping[int, jax.stages.Compiled],
        paddings: Mapping[int, jax.stages.Compiled] = MappingProxyType({}),
        add_fields: Callable[[Params, Batch], Batch] | None = None,
    ) -> None:
        self._by_size, self._paddings, self._add_fields = by_size, paddings, add_fields
        self.largest = by_size[max(by_size)]

    def __getitem__(self, microbatches: int) -> TrainStep:
        """Return the step for batches of this many microbatches."""
        step = self._step(microbatches)
        if self._add_fields is None:
            return step
        add = self._add_fields
        return lambda state, batch, controls: step(state, add(state.variables, batch), controls)

    def _step(self, microbatches: int) -> TrainStep:
        if not self._paddings:
            return self._by_size[microbatches]
        pad, step = self._paddings[microbatches], self.largest
        return lambda state, batch, controls: step(state, pad(batch), controls)


def make_train_step(
    config: JobConfig,
    model: Model,
    optimizer: optax.GradientTransformationExtraArgs,
    gradients: Gradients,
    shardings: TrainState,
    collect: Collection[str] = (),
) -> jax.stages.Wrapped:
    """Return the jitted step `(state, batch, controls) -> (state, metrics)`. It donates the state.

    Args:
        config: a validated config.
        model: the model.
        optimizer: the optimizer.
        gradients: computes gradients and loss.
        shardings: `NamedSharding` of every array of the state.
        collect: metrics to compute, as `step.collect.check_collect` returns them.
    """
    lr, frozen = learning_rate(config), frozen_paths(model.axes, config)
    if (limit := config.optimizer.qk_clip) is not None:
        check_mixers(config.model, frozen)
    guard, add = Guard(config.train), build_apply(config.train)
    average = build_average(config.train, frozen)
    # 8-bit and offloaded moments keep their old values themselves after a bad step, given
    # `applied`. Selecting between old and new here would keep both in memory.
    in_place = config.train.opt_state_dtype == EIGHT_BIT or "optimizer" in config.train.offload
    is_selected = is_updated_in_place if in_place else None

    # One program computes, in this order:
    #
    #   gradients and loss -> guard -> optimizer -> average of the parameters
    #   -> selection of new or old values -> metrics
    #
    # The host decides nothing in between. It may launch the next step before it has read this
    # step's metrics, because bad steps are rejected on the device.
    def train_step(
        state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, Metrics]:
        next_lr_scale = controls.next_lr_scale
        if next_lr_scale is None:
            next_lr_scale = controls.lr_scale
        batch = with_dataset_mask(batch, len(config.data.datasets))
        batch = with_mask_keys(batch, config, state.step)
        batch = spread_sequences(model, with_further_tokens(batch, config.model))
        scale = guard.loss_scale(state.guard)
        grads, loss = gradients(state.params, state.model_state, batch, scale)
        grads, loss = unscale(grads, loss, scale)
        grad_norm = global_norm(grads)
        n_valid = jnp.sum(valid_tokens(batch["labels"]))
        # Without valid labels the gradient is 0, but decay and moments would change the weights.
        apply = controls.apply & (n_valid > 0)
        good, verdict = guard.judge(state.guard, loss.value, grad_norm, apply)
        # Two selections follow. A bad step keeps parameters and optimizer state, but advances the
        # counters. After the guard has halted the run, the counters do not change either.
        is_running = ~guard.is_halted(state.guard)
        applied = good & is_running
        extra: dict[str, Any] = {"applied": applied} if in_place else {}
        if config.skips_idle_experts:
            extra["reached"] = {
                stack: expert_counts(loss.statistics[LAYERS], model.stack, stack) > 0
                for stack in config.model.moe_stacks
            }
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, lr_scale=controls.lr_scale, **extra
        )
        idle, trained = split(state.params, frozen)
        trained, opt_state = add(trained, updates, opt_state, state.step)
        params = join(trained, idle)
        # Non-trainable state follows the statistics of the forward pass, not a gradient.
        progress = state.step / config.train.max_steps
        model_state = model.next_state(state.model_state, loss.statistics, progress)
        params = model.next_params(params, model_state, progress)
        if limit is not None:
            largest = loss.statistics[LAYERS][MAX_LOGITS].value
            params = clip_logits(config.model, params, largest, model.stack, limit)
        params = keep_frozen(params, state.params, frozen)
        ema = average(state.ema, params, updates_made(opt_state))
        params, opt_state, model_state, ema = select(
            good,
            (params, opt_state, model_state, ema),
            (state.params, state.opt_state, state.model_state, state.ema),
            is_selected,
        )
        counts = _next_counts(state.counts, batch, n_valid, good, config.train)
        new = TrainState(state.step + 1, params, opt_state, verdict, counts, model_state, ema)
        new = select(is_running, new, state, is_selected)
        loss = _nan_without_labels(loss, n_valid)
        # The logged rate is that of the next update, by the count after this one.
        metrics = _base_metrics(new, loss, grad_norm, n_valid) | {
            "lr": lr(updates_made(new.opt_state)) * next_lr_scale,
            "applied": applied,
        }
        metrics |= _dataset_metrics(loss, batch) | _aux_metrics(loss, model.stack)
        if limit is not None:
            clipped = jnp.sum(largest > limit, dtype=jnp.int32)
            metrics["logits"] = {"max_logit": jnp.max(largest), "clipped_heads": clipped}
        parts = StepOutputs(grads, updates, applied, new.params, model.stack, config.model.stacks)
        return new, metrics | collect_metrics(collect, parts)

    # The state is donated: the new state reuses its buffers, so memory holds one state.
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))


def _nan_without_labels(loss: Loss, n_valid: Int[Array, ""]) -> Loss:
    """Replace the loss terms of a batch without valid labels by NaN, the mean of no values."""
    terms = {name: jnp.where(n_valid > 0, x, jnp.nan) for name, x in loss.aux.loss_terms.items()}
    return loss._replace(aux=loss.aux._replace(loss_terms=terms))


def _base_metrics(
    new: TrainState, loss: Loss, grad_norm: Float[Array, ""], n_valid: Int[Array, ""]
) -> Metrics:
    """Return the metrics of the loss, the gradient and the guard."""
    guard = new.guard
    metrics: Metrics = {
        "loss": loss.value,
        "grad_norm": grad_norm,
        "step": new.step,
        "counts": new.counts,
        "skipped": guard.total,
        "consecutive": guard.consecutive,
        "nonfinite": guard.nonfinite,
        "spikes": guard.spikes,
        "valid_tokens": n_valid,
    }
    return metrics if guard.loss_scale is None else metrics | {"loss_scale": guard.loss_scale}


def _dataset_metrics(loss: Loss, batch: Batch) -> Metrics:
    """Return the loss of each dataset of a mixture."""
    if "dataset_mask" not in batch:
        return {}
    tokens = valid_tokens_by_dataset(batch["labels"], batch["dataset_mask"])
    # Replicated, because every host reads the values.
    nll = metric_value(loss.aux.metrics[DATASET_NLL])
    return {DATASET_NLL: constrain(nll, None), "dataset_tokens": constrain(tokens, None)}


def _aux_metrics(loss: Loss, stack: Stack) -> Metrics:
    """Return `losses`, the terms of a loss of several, and `side`, all other named metrics.

    Metrics of layers are arrays [layers].
    """
    by_layer = {name: stack.unstack(metric_value(m)) for name, m in loss.layers.metrics.items()}
    others = {name: metric_value(m) for name, m in loss.aux.metrics.items() if name != DATASET_NLL}
    aux = {
        name: constrain(value, *[None] * value.ndim) for name, value in (others | by_layer).items()
    }
    losses = loss.aux.loss_terms if len(loss.aux.loss_terms) > 1 else {}
    return {name: group for name, group in (("losses", losses), ("side", aux)) if group}


def _next_counts(
    counts: Counts,
    batch: Batch,
    n_valid: Int[Array, ""],
    applied: Bool[Array, ""],
    config: TrainConfig,
) -> Counts:
    """Return the counts after one attempted step on a batch [microbatches, sequences, tokens]."""
    largest, rows, length = batch["labels"].shape
    microbatches, is_padding = microbatch_count(batch), padding_of(batch)
    samples = microbatches * rows
    if isinstance(samples, int):
        samples = config.update_sequences(samples)
    padding: int | Array = 0
    if is_padding is not None:
        padding = jnp.sum(is_padding, dtype=jnp.int32) - (largest * rows - samples) * length
    return Counts(
        samples=counts.samples.plus(samples),
        tokens=counts.tokens.plus(jnp.where(applied, samples * length, 0)),
        valid_tokens=counts.valid_tokens.plus(jnp.where(applied, n_valid, 0)),
        padding=counts.padding.plus(jnp.where(applied, padding, 0)),
    )
