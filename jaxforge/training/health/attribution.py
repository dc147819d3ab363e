"""Attribution of bad steps to the hardware or to data and numerics.

A jitted step is a function of its state and batch, so on working hardware a rerun gives the same
result, bit for bit:

    rerun differs -> hardware fault: every device computes the same checksum, and devices with
                     another result than most are named
    rerun matches -> data or numerics: the sequences whose loss is not finite, or largest, are named

Megatron's rerun state machine distinguishes the two in the same way.
"""

import dataclasses
import logging
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.model.transformer import Model, Params
from jaxforge.state.train_state import TrainState
from jaxforge.step.context import spread_sequences
from jaxforge.step.cross_entropy import cross_entropy
from jaxforge.step.logit_tiles import tiles_of
from jaxforge.step.train_step import Controls, Metrics, TrainStep
from jaxforge.step.update_loss import Batch

log = logging.getLogger(__name__)

_COMPARED = ("loss", "grad_norm")
_SIZE, _ROUNDS = 512, 8  # matrix products of the checksum of a device


def run_twice(
    step: TrainStep,
    state: TrainState,
    batch: Batch,
    controls: Controls,
    paused: Callable[[], AbstractContextManager[None]],
) -> tuple[TrainState, Metrics, Exit | None]:
    """Execute a step twice, and compare loss and gradient norm bit for bit. Collective.

    Returns:
        State and metrics after the step, and `Exit.MACHINE` if the results differ.

    Raises:
        UserError: the step applies an update that `controls.apply` forbids.
    """
    with paused():
        # The step donates its state, so the first execution must hand it back unchanged.
        state, first = run_unapplied(step, state, batch, controls)
        jax.block_until_ready(state)
    if bool(first.get("applied", False)):
        raise UserError(
            "train.verify_interval executes a step twice, but this step applies its update even if "
            "controls.apply is False. Let your step respect controls.apply, or remove "
            "train.verify_interval"
        )
    state, metrics = step(state, batch, controls)
    fault = find_fault(first, metrics)
    if fault is None:
        return state, metrics, None
    log.error(
        "step %d, executed twice from the same state, gave two results: the hardware is faulty. %s",
        int(metrics["step"]), fault,
    )  # fmt: skip
    return state, metrics, Exit.MACHINE


def run_unapplied(
    step: TrainStep, state: TrainState, batch: Batch, controls: Controls
) -> tuple[TrainState, Metrics]:
    """Execute a step without applying its update.

    Such a step changes only the counters, which are saved and restored.

    Returns:
        The state, unchanged, and the metrics of the step.
    """
    # Copies, because the step donates the originals.
    count, guard, counts = jax.tree.map(jnp.copy, (state.step, state.guard, state.counts))
    state, metrics = step(state, batch, controls._replace(apply=False))
    return dataclasses.replace(state, step=count, guard=guard, counts=counts), metrics


def find_fault(first: Metrics, second: Metrics) -> str | None:
    """Compare two executions of a step, and describe the faulty devices if they differ.

    Every device has its own copy of loss and gradient norm, and all processes compare all copies.
    Collective.

    Returns:
        A sentence that names devices; None if the results are equal on every device.
    """
    before, after = _hashes(first), _hashes(second)
    local = np.array([(device, *before[device], *after[device]) for device in before], np.uint32)
    table = np.reshape(multihost_utils.process_allgather(local), (-1, local.shape[1]))
    middle = 1 + len(_COMPARED)
    differs = np.any(table[:, 1:middle] != table[:, middle:], axis=1)
    by_id = {device.id: device for device in jax.devices()}
    changed = [by_id[int(device)] for device in table[differs, 0]]
    if not changed:
        return None
    # If all devices changed, a collective has spread the fault: each computes alone now.
    if len(changed) < len(table) or len(table) == 1:
        return f"The result changed on {_names(changed)}"
    outliers = outlier_devices()
    if outliers:
        return f"These devices compute another result than the others: {_names(outliers)}"
    return "No device fails the test computation, so the fault is intermittent"


def outlier_devices(devices: Sequence[jax.Device] | None = None) -> list[jax.Device]:
    """Return the devices of all processes whose checksum differs from that of most devices."""
    devices = jax.devices() if devices is None else devices
    local = [device for device in devices if device.process_index == jax.process_index()]
    table = np.array([(device.id, device_checksum(device)) for device in local], np.uint32)
    table = table.reshape(-1, 2)
    results = dict(np.reshape(multihost_utils.process_allgather(table), (-1, 2)).tolist())
    values, counts = np.unique(list(results.values()), return_counts=True)
    usual = int(values[np.argmax(counts)])
    return [device for device in devices if results[device.id] != usual]


def device_checksum(device: jax.Device) -> int:
    """Return the checksum that a device computes."""
    mesh = Mesh(np.array([device]), ("alone",))
    with jax.set_mesh(mesh):
        return int(_checksum(jax.device_put(np.uint32(1), NamedSharding(mesh, PartitionSpec()))))


@jax.jit
def _checksum(seed: Array) -> Array:
    """Return the sum of the bits of a chain of matrix products; one wrong bit changes it."""
    start = jax.random.normal(jax.random.key(seed), (_SIZE, _SIZE), jnp.float32)

    def product(_: int, x: Array) -> Array:
        x = x @ start
        # Rescaled in each round, or a chain of products would overflow.
        return x / jnp.max(jnp.abs(x))

    result = jax.lax.fori_loop(0, _ROUNDS, product, start)
    return jnp.sum(jax.lax.bitcast_convert_type(result, jnp.uint32), dtype=jnp.uint32)


def _hashes(metrics: Metrics) -> dict[int, list[int]]:
    """Return hashes of the compared metrics for each device of this process, by its id.

    CRC-32 differs for any two values of at most 32 bits.
    """
    # {device id: [hash of the loss, hash of the gradient norm]}
    hashes: dict[int, list[int]] = {}
    for name in _COMPARED:
        for shard in metrics[name].addressable_shards:
            value = np.asarray(shard.data).tobytes()
            hashes.setdefault(shard.device.id, []).append(zlib.crc32(value))
    return hashes


def _names(devices: Sequence[jax.Device]) -> str:
    return ", ".join(f"{device} of process {device.process_index}" for device in devices)


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
            hidden, head = model.forward(params, microbatch)[0], model.head(params)
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
