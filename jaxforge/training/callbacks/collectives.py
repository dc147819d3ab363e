"""Health check of collectives: all devices still exchange data."""

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)

T = TypeVar("T")


class CollectiveHealth(RunCallback):
    """Sums a one-hot row from every device; every device must get a vector of ones.

        device 0   1 0 0          psum        1 1 1
        device 1   0 1 0          ---->       1 1 1
        device 2   0 0 1                      1 1 1

    Each process judges the results of its own devices, so one process may end while others still
    wait for it. The others get no answer at their next check, or the watchdog ends them. Nothing
    can be saved then: neither the state nor the other processes can be reached.

    Args:
        config: the `[train]` section, for interval and timeout.
        mesh: mesh of all devices.
    """

    checks_start = True
    judges_state = True

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.every, self._mesh = config.nccl_health_check_interval, mesh
        self._seconds, self._devices = config.health_check_timeout_sec, list(mesh.devices.flat)
        self._answer: Array | None = None

    @classmethod
    def of_run(cls, run: RunParts) -> "CollectiveHealth | None":
        """Return the callback if `train.nccl_health_check_interval` is set."""
        interval = run.config.train.nccl_health_check_interval
        return cls(run.config.train, run.mesh) if interval else None

    def on_train_begin(self, config: JobConfig) -> None:
        """Compile the check and connect the devices, which may take minutes."""
        # On CPU, programs that run at the same time mix up their messages: finish the setup first.
        jax.block_until_ready(jax.live_arrays())
        n = self._mesh.devices.size
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        rows = np.eye(n, dtype=np.int32)
        self._counts = jax.make_array_from_callback((n, n), sharding, lambda index: rows[index])
        self._sum = _compile_sum(self._mesh, self._counts)
        jax.block_until_ready(self._sum(self._counts))

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log a failure of the check; return `Exit.UNHEALTHY` then."""
        self._answer, step = None, context.step
        answer = _in_background(self._missing)
        try:
            missing = answer.result(self._seconds)
        except concurrent.futures.TimeoutError:
            self._log(step, f"no answer within train.health_check_timeout_sec = {self._seconds:g} "
                      f"s; still waiting: {_names(self._waiting())}")  # fmt: skip
            return Exit.UNHEALTHY
        except jax.errors.JaxRuntimeError as error:
            self._log(step, str(error))
            return Exit.UNHEALTHY
        if missing:
            self._log(step, f"wrong contribution from {_names(missing)}")
            return Exit.UNHEALTHY
        return None

    def _missing(self) -> list[jax.Device]:
        """Return the devices whose count is not 1 on some device of this process. Blocks."""
        self._answer = self._sum(self._counts)
        counts = [np.asarray(shard.data)[0] for shard in self._answer.addressable_shards]
        wrong = np.any(np.stack(counts) != 1, axis=0)
        return [device for device, bad in zip(self._devices, wrong, strict=True) if bad]

    def _waiting(self) -> list[jax.Device]:
        """Return the devices of this process that have no answer yet."""
        if self._answer is None:
            return jax.local_devices()
        shards = self._answer.addressable_shards
        return [shard.device for shard in shards if not shard.data.is_ready()]

    def _log(self, step: int, failure: str) -> None:
        log.error("collective health check of process %d failed at step %d: %s",
                  jax.process_index(), step, failure)  # fmt: skip


def _compile_sum(mesh: Mesh, counts: Int[Array, "n n"]) -> Callable[[Array], Array]:
    """Compile the sum of all rows on each device, so that checks compile nothing."""
    spec = PartitionSpec(mesh.axis_names)

    def add(row: Int[Array, "1 n"]) -> Int[Array, "1 n"]:
        return jax.lax.psum(row, mesh.axis_names)

    summed = jax.shard_map(add, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return jax.jit(summed).lower(counts).compile()


def _in_background(function: Callable[[], T]) -> concurrent.futures.Future[T]:
    """Run `function`, which may never return, in a thread that does not keep the process alive."""
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
