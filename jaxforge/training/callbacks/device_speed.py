"""Detection of slow devices, such as accelerators that are throttled.

All devices step together, so step times do not reveal a slow device. Here each device computes the
same chain of matrix products alone, and the fastest of a few times is compared with those of the
other devices.
"""

import functools
import logging
import time
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16

from jaxforge.config.job import JobConfig
from jaxforge.config.metrics import MetricsConfig
from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks.callback import IntervalContext
from jaxforge.training.callbacks.run_callback import RunCallback, RunParts

log = logging.getLogger(__name__)

_SIZE, _CPU_SIZE = 4096, 256  # of the matrices
_PRODUCTS, _REPETITIONS = 16, 3  # 2.2 TFLOP each time: milliseconds on an accelerator


class DeviceSpeed(RunCallback):
    """Times a chain of matrix products on each device and names slow devices.

    Args:
        config: the `[metrics]` section.
    """

    def __init__(self, config: MetricsConfig) -> None:
        self.every, self._config = config.device_speed_interval, config

    @classmethod
    def of_run(cls, run: RunParts) -> "DeviceSpeed | None":
        """Return the callback if `metrics.device_speed_interval` is set."""
        return cls(run.config.metrics) if run.config.metrics.device_speed_interval else None

    def on_train_begin(self, config: JobConfig) -> None:
        """Compile the products for each device."""
        for device in jax.local_devices():
            seconds_of(device)

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log the times; return `Exit.STRAGGLER` if that is enabled, on every process alike."""
        own = [(device.id, seconds_of(device)) for device in jax.local_devices()]
        table = np.reshape(multihost_utils.process_allgather(np.array(own, np.float32)), (-1, 2))
        seconds = {int(device): float(time_) for device, time_ in table}
        slow = slow_devices(seconds, self._config.straggler_threshold)
        if jax.process_index() == 0:
            _report(context.step, seconds, slow)
        if slow and self._config.stop_if_detected_straggler:
            log.warning("Exiting program due to straggler detection.")
            return Exit.STRAGGLER
        return None


def slow_devices(seconds: Mapping[int, float], threshold: float) -> list[int]:
    """Return the ids of devices for which the fastest time / their own time < threshold."""
    fastest = min(seconds.values())
    return [device for device, time_ in seconds.items() if fastest < threshold * time_]


def seconds_of(device: jax.Device) -> float:
    """Return the shortest of a few times that the products take on a device of this process."""
    size = _CPU_SIZE if device.platform == "cpu" else _SIZE
    mesh, times = Mesh(np.array([device]), ("alone",)), []
    with jax.set_mesh(mesh):
        x = _matrix(jax.device_put(np.uint32(1), NamedSharding(mesh, PartitionSpec())), size)
        jax.block_until_ready(_multiply(x))  # compiled, and at full clock speed
        for _ in range(_REPETITIONS):
            start = time.perf_counter()
            jax.block_until_ready(_multiply(x))
            times.append(time.perf_counter() - start)
    return min(times)


@functools.partial(jax.jit, static_argnums=1)
def _matrix(seed: Array, size: int) -> BFloat16[Array, "n n"]:
    """Return random numbers, which take more power than a constant; products keep their size."""
    x = jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16)
    return x * jnp.bfloat16(size**-0.5)


@jax.jit
def _multiply(x: BFloat16[Array, "n n"]) -> BFloat16[Array, "n n"]:
    return jax.lax.fori_loop(0, _PRODUCTS, lambda _, y: y @ x, x)


def _report(step: int, seconds: Mapping[int, float], slow: list[int]) -> None:
    """Log the spread over all devices, then each slow device."""
    times = 1000 * np.array([*seconds.values()])
    log.info(
        "step %d: milliseconds for matrix products, min/median/max of %d devices: %.3f/%.3f/%.3f",
        step, len(times), times.min(), np.median(times), times.max(),
    )  # fmt: skip
    devices = {device.id: device for device in jax.devices()}
    for id_ in slow:
        log.warning(
            "step %d: %s of process %d is slow: %.3f ms for matrix products, the fastest device "
            "%.3f ms. It may be throttled",
            step, devices[id_], devices[id_].process_index, 1000 * seconds[id_], times.min(),
        )  # fmt: skip
