"""One update as one executable: gradients over microbatches, guard, optimizer."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model
from jaxforge.optim.optimizer import global_norm, learning_rate, updates_made
from jaxforge.training.collect import Step, check_collect, collected
from jaxforge.training.gradients import Batch, make_gradients
from jaxforge.training.guard import select
from jaxforge.training.state import TrainState, state_shardings

Metrics = dict[str, Any]
"""What a step returns, on the device; `training.result.StepResult` is a typed view of it."""


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
    collect: Iterable[str] = (),
) -> jax.stages.Wrapped:
    """The jitted step `(state, batch, controls) -> (state, metrics)`; the state is donated.

    Args:
        model: the model.
        optimizer: what `build_optimizer` made.
        config: a validated config.
        mesh: where the state lies.
        collect: more for the metrics to hold, among `training.collect.COLLECTED`.

    Raises:
        UserError: there is no such thing to collect.
    """
    wanted = check_collect(collect)
    gradients = make_gradients(model, config, mesh)
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
        goes_on = ~state.guard.halted(limit)
        new = select(goes_on, new, state)
        metrics: Metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": lr(updates_made(new.opt_state)) * controls.lr_scale,
            "skipped": new.guard.total,
            "consecutive": new.guard.consecutive,
        }
        parts = Step(grads, updates, good & goes_on, new.params, model.stack)
        return new, metrics | collected(wanted, parts)

    shardings = state_shardings(model, optimizer, mesh)
    return jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None))
