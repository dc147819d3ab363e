"""One update as one executable: gradients over microbatches, guard, optimizer."""

from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.aux_outputs import metric_value
from jaxforge.config.eval import MAX_LOGITS
from jaxforge.config.job import JobConfig
from jaxforge.config.model import LAYERS
from jaxforge.config.train import EIGHT_BIT, TrainConfig
from jaxforge.kernels.masking import padding_of
from jaxforge.model.moe import expert_counts
from jaxforge.model.qk_clip import check_mixers, clip_logits
from jaxforge.model.transformer import Model, Params
from jaxforge.optim.chain import global_norm, updates_made
from jaxforge.optim.ema import build_average
from jaxforge.optim.freezing import frozen_paths, keep_frozen
from jaxforge.optim.moments import is_updated_in_place
from jaxforge.optim.rounding import build_apply
from jaxforge.optim.schedule import learning_rate
from jaxforge.optim.trees import join, split
from jaxforge.parallel.sharding import constrain
from jaxforge.parallel.stages import Stack
from jaxforge.state.train_state import Counts, TrainState
from jaxforge.step.collect import StepOutputs, collect_metrics
from jaxforge.step.context import spread_sequences
from jaxforge.step.gradients import Gradients
from jaxforge.step.guard import Guard, select
from jaxforge.step.losses import DATASET_NLL
from jaxforge.step.mask_keys import with_mask_keys
from jaxforge.step.mtp import with_further_tokens
from jaxforge.step.padded_batch import microbatch_count
from jaxforge.step.token_weights import valid_tokens, valid_tokens_by_dataset
from jaxforge.step.update_loss import Batch, Loss, unscale, with_dataset_mask

Metrics = dict[str, Any]
"""Results of a step, on the device; `training.own_loop.StepResult` is a typed view.

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
    collect: Collection[str] = (),
) -> TrainStep:
    """Return the step, to be traced.

    Args:
        config: a validated config.
        model: the model.
        optimizer: the optimizer.
        gradients: computes gradients and loss.
        collect: metrics to compute, as `step.collect.check_collect` returns them.
    """
    lr, guard = learning_rate(config), Guard(config.train)
    update, limit = _build_update(config, model, optimizer), config.optimizer.qk_clip
    is_selected = is_updated_in_place if _is_in_place(config.train) else None

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
        updated, updates = update(state, grads, loss, controls.lr_scale, applied)
        updated = select(good, updated, _Updated.of(state), is_selected)
        counts = _next_counts(state.counts, batch, n_valid, good, config.train)
        new = TrainState(step=state.step + 1, guard=verdict, counts=counts, **updated._asdict())
        new = select(is_running, new, state, is_selected)
        loss = _nan_without_labels(loss, n_valid)
        # The logged rate is that of the next update, by the count after this one.
        lr_scale = controls.lr_scale if controls.next_lr_scale is None else controls.next_lr_scale
        metrics = _base_metrics(new, loss, grad_norm, n_valid) | {
            "lr": lr(updates_made(new.opt_state)) * lr_scale,
            "applied": applied,
        }
        metrics |= _dataset_metrics(loss, batch) | _aux_metrics(loss, model.stack)
        metrics |= {} if limit is None else _logit_metrics(loss, limit)
        parts = StepOutputs(grads, updates, applied, new.params, model.stack, config.model.stacks)
        return new, metrics | collect_metrics(collect, parts)

    return train_step


class _Updated(NamedTuple):
    """Fields of `TrainState` that only an applied update changes."""

    params: Params
    opt_state: PyTree
    model_state: Params
    ema: Params

    @classmethod
    def of(cls, state: TrainState) -> "_Updated":
        """Return the fields of a state."""
        return cls(*(getattr(state, field) for field in cls._fields))


def _build_update(
    config: JobConfig, model: Model, optimizer: optax.GradientTransformationExtraArgs
) -> Callable[..., tuple[_Updated, Params]]:
    """Return (state, gradients, loss, lr_scale, applied) -> new values, optimizer's updates.

    The caller decides whether to use the new values.
    """
    frozen, limit = frozen_paths(model.axes, config), config.optimizer.qk_clip
    if limit is not None:
        check_mixers(config.model, frozen)
    add, average = build_apply(config.train), build_average(config.train, frozen)
    in_place = _is_in_place(config.train)

    def update(
        state: TrainState, grads: Params, loss: Loss, lr_scale: Array | float, applied: Array
    ) -> tuple[_Updated, Params]:
        extra: dict[str, Any] = {"applied": applied} if in_place else {}
        if config.skips_idle_experts:
            extra["reached"] = {
                stack: expert_counts(loss.statistics[LAYERS], model.stack, stack) > 0
                for stack in config.model.moe_stacks
            }
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, lr_scale=lr_scale, **extra
        )
        idle, trained = split(state.params, frozen)
        trained, opt_state = add(trained, updates, opt_state, state.step)
        params = join(trained, idle)
        # Non-trainable state follows the statistics of the forward pass, not a gradient.
        progress = state.step / config.train.max_steps
        model_state = model.next_state(state.model_state, loss.statistics, progress)
        params = model.next_params(params, model_state, progress)
        if limit is not None:
            params = clip_logits(config.model, params, _max_logits(loss), model.stack, limit)
        params = keep_frozen(params, state.params, frozen)
        ema = average(state.ema, params, updates_made(opt_state))
        return _Updated(params, opt_state, model_state, ema), updates

    return update


def _is_in_place(train: TrainConfig) -> bool:
    """Return whether moments keep their old values themselves after a bad step.

    8-bit and offloaded moments do so, given `applied`. Selecting between old and new in the step
    would keep both in memory.
    """
    return train.opt_state_dtype == EIGHT_BIT or "optimizer" in train.offload


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
    scalars = {name: metric_value(m) for name, m in loss.aux.metrics.items() if name != DATASET_NLL}
    aux = {
        name: constrain(value, *[None] * value.ndim) for name, value in (scalars | by_layer).items()
    }
    losses = loss.aux.loss_terms if len(loss.aux.loss_terms) > 1 else {}
    return {name: group for name, group in (("losses", losses), ("side", aux)) if group}


def _logit_metrics(loss: Loss, limit: float) -> Metrics:
    """Return the largest attention logit, and the number of heads that QK-Clip scales down."""
    largest = _max_logits(loss)
    clipped = jnp.sum(largest > limit, dtype=jnp.int32)
    return {"logits": {"max_logit": jnp.max(largest), "clipped_heads": clipped}}


def _max_logits(loss: Loss) -> Float[Array, "rows heads"]:
    """Return the largest attention logit of each head, by row of the stacked layers."""
    logits: Array = loss.statistics[LAYERS][MAX_LOGITS].value
    return logits


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
