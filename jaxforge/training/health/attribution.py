"""Whose fault a bad step is: the machine's, or that of its data and numbers.

A jitted step is a function of its state and batch, so the same step gives the same answer, bit for
bit, on a machine that works. Where it does not, every device is set the same sum, and those that
come to another result than the rest are named. Where it does, the sequences are named that the loss
is not finite for, or largest. (Megatron's rerun state machine tells the two apart in the same way.)
"""

import dataclasses
import logging
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model, Params
from jaxforge.state.train_state import TrainState
from jaxforge.step.context import spread_sequences
from jaxforge.step.cross_entropy import cross_entropy, tiles_of
from jaxforge.step.gradients import Batch
from jaxforge.step.train_step import Controls, Metrics, TrainStep

log = logging.getLogger(__name__)

_NAMED = 8  # sequences, at most
_SIZE, _ROUNDS = 512, 8  # of the products that devices are tried with

RowLosses = Callable[[Params, Batch], Float[Array, "m b"]]
"""(params, batch) -> Σ -log p(label) of each sequence."""


class Attribution:
    """Examines bad steps whose update was not applied.

    Args:
        row_losses: as of `make_row_losses`.
        name_of: names the sequence at a position of the data.
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
        """Says whose fault it is.

        Args:
            step: the train step.
            state: after the step; donated.
            batch: the step's.
            metrics: what the step gave.
            controls: the step's.
            first: position in the data of the batch's first sequence.

        Returns:
            The state, unchanged, and `Exit.MACHINE` if the machine is to blame.
        """
        number = int(metrics["step"])
        state, is_same = run_again(step, state, batch, metrics, controls)
        if not is_same:
            odd = outlier_devices()
            log.error(
                "step %d, run again from the same state, gave another answer: the machine is at "
                "fault; %s", number, _describe(odd),
            )  # fmt: skip
            return state, Exit.MACHINE
        worst = worst_rows(np.asarray(jax.device_get(self._row_losses(state.variables, batch))))
        log.warning(
            "step %d, run again from the same state, gave the same answer: its data or its numbers "
            "are at fault. Sequences whose loss is %s: %s",
            number, "largest" if np.isfinite(worst[0][1]) else "not finite",
            "; ".join(f"{self._name_of(first + i)} ({loss:.6g} nats)" for i, loss in worst),
        )  # fmt: skip
        return state, None


def _describe(odd: Sequence[jax.Device]) -> str:
    if not odd:
        return "no device fails the sum that all were set, so it comes and goes"
    devices = ", ".join(f"{device} of process {device.process_index}" for device in odd)
    return f"these devices come to another result than the others: {devices}"


def run_again(
    step: TrainStep, state: TrainState, batch: Batch, metrics: Metrics, controls: Controls
) -> tuple[TrainState, bool]:
    """Runs a step again whose update was not applied.

    Args:
        step: the train step.
        state: after the step, and so, but for its counts, before it; donated.
        batch: the step's.
        metrics: what the step gave.
        controls: the step's.

    Returns:
        The state, unchanged, and whether the loss and gradient norm are the same bits.
    """
    counts = jax.tree.map(jnp.copy, (state.step, state.guard, state.counts))
    state, again = step(state, batch, controls._replace(apply=False))
    same = all(_bits(metrics[name]) == _bits(again[name]) for name in ("loss", "grad_norm"))
    at, guard, seen = counts
    return dataclasses.replace(state, step=at, guard=guard, counts=seen), same


def make_row_losses(model: Model, config: TrainConfig, mesh: Mesh) -> RowLosses:
    """The jitted loss of each sequence of a batch."""

    def row_losses(params: Params, batch: Batch) -> Float[Array, "m b"]:
        def of_microbatch(microbatch: Batch) -> Float[Array, "b"]:
            labels, head = microbatch["labels"], model.head(params)
            hidden = model.forward(params, microbatch)[0]
            each = jnp.eye(labels.shape[0], dtype=bool)
            tiles = tiles_of(config, labels, head, model)
            by_row = cross_entropy(hidden, head, labels, tiles, each).by_dataset
            assert by_row is not None
            return by_row

        return jax.lax.map(of_microbatch, spread_sequences(model, batch))

    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(row_losses, out_shardings=everywhere)


def worst_rows(losses: Float[np.ndarray, "m b"]) -> list[tuple[int, float]]:
    """Places within the update of the sequences to look at, with their losses.

    Those that are not finite; if there are none, the largest.
    """
    flat = losses.reshape(-1)
    bad = np.flatnonzero(~np.isfinite(flat))
    rows = bad if len(bad) else np.argsort(-flat, kind="stable")
    return [(int(i), float(flat[i])) for i in rows[:_NAMED]]


def outlier_devices(devices: Sequence[jax.Device] | None = None) -> list[jax.Device]:
    """The devices, of all processes, that come to another result than most of them."""
    devices = jax.devices() if devices is None else devices
    own = [device for device in devices if device.process_index == jax.process_index()]
    table = np.array([(device.id, _try(device)) for device in own], np.uint32).reshape(-1, 2)
    results = dict(np.reshape(multihost_utils.process_allgather(table), (-1, 2)).tolist())
    values, counts = np.unique(list(results.values()), return_counts=True)
    usual = int(values[np.argmax(counts)])
    return [device for device in devices if results[device.id] != usual]


def _try(device: jax.Device) -> int:
    mesh = Mesh(np.array([device]), ("alone",))
    with jax.set_mesh(mesh):
        return int(_checksum(jax.device_put(np.uint32(1), NamedSharding(mesh, PartitionSpec()))))


@jax.jit
def _checksum(seed: Array) -> Array:
    """A sum of the bits of a chain of matrix products: one wrong bit anywhere shows."""
    start = jax.random.normal(jax.random.key(seed), (_SIZE, _SIZE), jnp.float32)

    def product(_: int, x: Array) -> Array:
        x = x @ start
        return x / jnp.max(jnp.abs(x))

    result = jax.lax.fori_loop(0, _ROUNDS, product, start)
    return jnp.sum(jax.lax.bitcast_convert_type(result, jnp.uint32), dtype=jnp.uint32)


def _bits(scalar: Array) -> bytes:
    return np.asarray(jax.device_get(scalar)).tobytes()
