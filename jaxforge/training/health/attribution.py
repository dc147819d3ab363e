"""Attribution of bad steps to the hardware or to data and numerics.

A jitted step is a function of its state and batch, so on working hardware a rerun gives the same
result, bit for bit:

    rerun differs -> hardware fault: every device computes the same checksum, and devices with
                     another result than most are named
    rerun matches -> data or numerics: the sequences whose loss is not finite, or largest, are named

Megatron's rerun state machine distinguishes the two in the same way.
"""

import logging
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model, Params
from jaxforge.state.train_state import TrainState
from jaxforge.step.context import spread_sequences
from jaxforge.step.cross_entropy import cross_entropy
from jaxforge.step.logit_tiles import tiles_of
from jaxforge.step.train_step import Controls, Metrics, TrainStep
from jaxforge.step.update_loss import Batch
from jaxforge.training.health.repeated_steps import find_fault, run_unapplied

log = logging.getLogger(__name__)

_NAMED = 8  # most sequences in a message

RowLosses = Callable[[Params, Batch], Float[Array, "m b"]]
"""`(params, batch) -> Σ -log p(label)` of each sequence."""


class Attribution:
    """Examines bad steps whose update was not applied.

    Args:
        row_losses: result of `make_row_losses`.
        name_of: returns a name for the sequence at a position of the data.
    """

    def __init__(self, row_losses: RowLosses, name_of: Callable[[int], str]) -> None:
        self._row_losses, self._name_of = row_losses, name_of

    def examine(
        self,
        step: TrainStep,
        state: TrainState,
        batch: Batch,
        metrics: Metrics,
        controls: Controls,
        first: int,
    ) -> tuple[TrainState, Exit | None]:
        """Rerun a bad step and log its cause.

        Args:
            step: the train step.
            state: the state after the step; donated.
            batch: the batch of the step.
            metrics: the metrics of the step.
            controls: the controls of the step.
            first: data position of the first sequence of the batch.

        Returns:
            The state, unchanged, and `Exit.MACHINE` for a hardware fault.
        """
        number = int(metrics["step"])
        # The state after a bad step equals the state before it, except for the counters.
        state, repeated = run_unapplied(step, state, batch, controls)
        fault = find_fault(metrics, repeated)
        if fault is not None:
            log.error(
                "step %d, rerun from the same state, gave two results: the hardware is faulty. "
                "%s", number, fault,
            )  # fmt: skip
            return state, Exit.MACHINE
        worst = worst_rows(np.asarray(jax.device_get(self._row_losses(state.variables, batch))))
        log.warning(
            "step %d, rerun from the same state, gave the same result: the cause is data or "
            "numerics. Sequences whose loss is %s: %s",
            number, "largest" if np.isfinite(worst[0][1]) else "not finite",
            "; ".join(f"{self._name_of(first + i)} ({loss:.6g} nats)" for i, loss in worst),
        )  # fmt: skip
        return state, None


def make_row_losses(model: Model, config: TrainConfig, mesh: Mesh) -> RowLosses:
    """Return the jitted function that computes the loss of each sequence of a batch."""

    def row_losses(params: Params, batch: Batch) -> Float[Array, "m b"]:
        def microbatch_losses(microbatch: Batch) -> Float[Array, "b"]:
            labels = microbatch["labels"]
            hidden, head = model.head_operands(params, model.forward(params, microbatch)[0])
            each = jnp.eye(labels.shape[0], dtype=bool)
            tiles = tiles_of(config, labels, head, model)
            by_row = cross_entropy(hidden, head, labels, tiles, each).by_dataset
            assert by_row is not None
            return by_row

        return jax.lax.map(microbatch_losses, spread_sequences(model, batch))

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(row_losses, out_shardings=everywhere)


def worst_rows(losses: Float[np.ndarray, "m b"]) -> list[tuple[int, float]]:
    """Return indices within the update and losses of the sequences to inspect.

    These are the losses that are not finite; if there are none, the largest losses.
    """
    flat = losses.reshape(-1)
    bad = np.flatnonzero(~np.isfinite(flat))
    rows = bad if len(bad) else np.argsort(-flat, kind="stable")
    return [(int(i), float(flat[i])) for i in rows[:_NAMED]]
