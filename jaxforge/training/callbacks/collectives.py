"""A check that all devices still exchange data."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit
from jaxforge.step.train_step import CompiledSteps
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)

T = TypeVar("T")


class CollectiveHealth(RunCallback):
    """Every device adds one to a count of its own; every device must see every count at one.

    Each process judges what its own devices see, so one may end while others still wait for it:
    those find no answer at the next check, or the watchdog ends them. Neither the state nor any
    other process can be reached then, so nothing can be saved.

    Args:
        config: the section, for interval and time-out.
        mesh: all devices.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.every, self._mesh = config.nccl_health_check_interval, mesh
        self._seconds, self._devices = config.health_check_timeout_sec, list(mesh.devices.flat)
        self._answer: Array | None = None

    @classmethod
    def of_run(cls, run: RunParts) -> "CollectiveHealth | None":
        """Return the callback if `train.nccl_health_check_interval` is set."""
        interval = run.config.train.nccl_health_check_interval
        return cls(run.config.train, run.mesh) if interval else None

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Compile the check, and connect the devices, which may take minutes."""
        self._counts = _one_each(self._mesh)
        self._sum = _compile_sum(self._mesh, self._counts)
        jax.block_until_ready(self._sum(self._counts))

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log what is wrong, if anything is."""
        self._answer, step = None, context.step
        answer = _in_background(self._missing)
        try:
            missing = answer.result(self._seconds)
        except concurrent.futures.TimeoutError:
            self._say(step, f"no answer within train.health_check_timeout_sec = {self._seconds:g} "
                      f"s; still waiting: {_names(self._waiting())}")  # fmt: skip
            return Exit.UNHEALTHY
        except jax.errors.JaxRuntimeError as error:
            self._say(step, str(error))
            return Exit.UNHEALTHY
        if missing:
            self._say(step, f"wrong contribution from {_names(missing)}")
            return Exit.UNHEALTHY
        return None

    def _missing(self) -> list[jax.Device]:
        """The devices that some device of this process did not hear once. Waits for them all."""
        self._answer = self._sum(self._counts)
        heard = [np.asarray(shard.data)[0] for shard in self._answer.addressable_shards]
        wrong = np.any(np.stack(heard) != 1, axis=0)
        return [device for device, bad in zip(self._devices, wrong, strict=True) if bad]

    def _waiting(self) -> list[jax.Device]:
        """Devices of this process that have no answer."""
        if self._answer is None:
            return jax.local_devices()
        shards = self._answer.addressable_shards
        return [shard.device for shard in shards if not shard.data.is_ready()]

    def _say(self, step: int, what: str) -> None:
        log.error("collective health check of process %d failed at step %d: %s",
                  jax.process_index(), step, what)  # fmt: skip


def _one_each(mesh: Mesh) -> Int[Array, "n n"]:
    """Row i, on device i, counts device i."""
    n = mesh.devices.size
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    rows = np.eye(n, dtype=np.int32)
    return jax.make_array_from_callback((n, n), sharding, lambda index: rows[index])


def _compile_sum(mesh: Mesh, counts: Int[Array, "n n"]) -> Callable[[Array], Array]:
    """The sum of all rows, on each device, as an executable: checks compile nothing."""
    spec = PartitionSpec(mesh.axis_names)

    def add(row: Int[Array, "1 n"]) -> Int[Array, "1 n"]:
        return jax.lax.psum(row, mesh.axis_names)

    summed = jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(summed).lower(counts).compile()


def _in_background(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Runs `function` in a thread that does not keep the process alive: it may never return."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="health check", daemon=True).start()
    return future


def _names(devices: list[jax.Device]) -> str:
    return ", ".join(f"{device} (process {device.process_index})" for device in devices)
