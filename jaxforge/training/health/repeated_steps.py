"""Repetition of steps, and the devices to blame if the results differ.

A jitted step is a function of its state and batch, so on working hardware a second execution gives
the same bits. `train.rerun_bad_steps` repeats bad steps (`attribution`). `train.verify_interval`
repeats every n-th step, because a fault that leaves the loss finite shows nowhere else:

    step n - 1 | step n, not applied | step n, applied | equal? -> step n + 1
                 same state            same state        no    -> exit code 16, nothing is saved

Both executions run the compiled program of all other steps. `Controls.apply` is an argument of it,
so neither memory nor another compilation is needed.
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
from jaxtyping import Array

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.state.train_state import TrainState
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

    Args:
        step: the train step.
        state: the state before the step; donated.
        batch: the batch of the step.
        controls: the controls of the step.
        paused: excludes the first execution from step times.

    Returns:
        State and metrics after the step, and `Exit.MACHINE` if the results differ.

    Raises:
        UserError: the step applies an update that `controls.apply` forbids.
    """
    with paused():
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

    Args:
        step: the train step.
        state: the state; donated.
        batch: the batch of the step.
        controls: the controls of the step.

    Returns:
        The state, unchanged, and the metrics of the step.
    """
    count, guard, counts = jax.tree.map(jnp.copy, (state.step, state.guard, state.counts))
    state, metrics = step(state, batch, controls._replace(apply=False))
    return dataclasses.replace(state, step=count, guard=guard, counts=counts), metrics


def find_fault(first: Metrics, second: Metrics) -> str | None:
    """Compare two executions of a step, and describe the faulty devices if they differ.

    Every device has its own copy of loss and gradient norm, and all processes compare all copies.
    Collective.

    Args:
        first: metrics of one execution.
        second: metrics of the other execution.

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
    if len(changed) < len(table) or len(table) == 1:
        return f"The result changed on {_names(changed)}"
    outliers = outlier_devices()
    if outliers:
        return f"These devices compute another result than the others: {_names(outliers)}"
    return "No device fails the test computation, so the fault is intermittent"


def outlier_devices(devices: Sequence[jax.Device] | None = None) -> list[jax.Device]:
    """Return the devices of all processes whose checksum differs from that of most devices.

    Args:
        devices: devices of all processes; by default all. Collective.
    """
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
        return x / jnp.max(jnp.abs(x))

    result = jax.lax.fori_loop(0, _ROUNDS, product, start)
    return jnp.sum(jax.lax.bitcast_convert_type(result, jnp.uint32), dtype=jnp.uint32)


def _hashes(metrics: Metrics) -> dict[int, list[int]]:
    """Return hashes of the compared metrics for each device of this process, by its id.

    CRC-32 differs for any two values of at most 32 bits.
    """
    hashes: dict[int, list[int]] = {}
    for name in _COMPARED:
        for shard in metrics[name].addressable_shards:
            value = np.asarray(shard.data).tobytes()
            hashes.setdefault(shard.device.id, []).append(zlib.crc32(value))
    return hashes


def _names(devices: Sequence[jax.Device]) -> str:
    return ", ".join(f"{device} of process {device.process_index}" for device in devices)
