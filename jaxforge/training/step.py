"""One update as one executable: gradients over microbatches, guard, optimizer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model
from jaxforge.optim.optimizer import global_norm, learning_rate, updates_made
from jaxforge.parallel.sharding import constrain
from jaxforge.training.gradients import Batch, make_gradients, with_members
from jaxforge.training.guard import select
from jaxforge.training.loss import valid_tokens, valid_tokens_by_dataset
from jaxforge.training.state import TrainState, state_shardings

Metrics = dict[str, Any]
"""Scalars on the device.

Of a mixture, also `dataset_nats` and `dataset_tokens` [datasets]: Σ -log p over the labels that
count, and how many. Where asked for, the pytree `gradients`.
"""


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
    gradients = make_gradients(model, config, mesh)
    lr = learning_rate(config)
    limit = config.train.nan_consecutive_max

    def train_step(
        state: TrainState, batch: Batch, controls: Controls
    ) -> tuple[TrainState, Metrics]:
        batch = with_members(batch, len(config.data.datasets))
        grads, loss = gradients(state.params, batch)
        grad_norm = global_norm(grads)
        good, guard = state.guard.judge(loss.value, grad_norm)
        updates, opt_state = optimizer.update(
            grads, state.opt_state, state.params, lr_scale=controls.lr_scale
        )
        params = optax.apply_updates(state.params, updates)
        params, opt_state = select(good, (params, opt_state), (state.params, state.opt_state))
        new = TrainState(state.step + 1, params, opt_state, guard)
        new = select(~state.guard.halted(limit), new, state)
        metrics: Metrics = {
            "loss": loss.value,
            "grad_norm": grad_norm,
            "lr": lr(updates_made(new.opt_state)) * controls.lr_scale,
            "skipped": new.guard.total,
            "consecutive": new.guard.consecutive,
            "valid_tokens": jnp.sum(valid_tokens(batch["labels"])),
        }
        if loss.nats is not None:
            metrics |= {
                "dataset_nats": constrain(loss.nats, None),  # whole, for every host to read
                "dataset_tokens": constrain(
                    valid_tokens_by_dataset(batch["labels"], batch["members"]), None
                ),
            }
        if keep_gradients:
            metrics["gradients"] = grads
        return new, metrics

    shardings = state_shardings(model, optimizer, mesh)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
