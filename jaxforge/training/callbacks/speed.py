"""Callbacks that measure speed: of devices, of collectives, and of hosts that straggle."""

import concurrent.futures
import functools
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, BFloat16, Bool, Float, Int

from jaxforge.config.job import JobConfig
from jaxforge.config.metrics import MetricsConfig
from jaxforge.exit_codes import Exit
from jaxforge.step.train_step import CompiledSteps
from jaxforge.telemetry.tracker import HostTimes
from jaxforge.training.callbacks.callback import IntervalContext, RunCallback, RunParts

log = logging.getLogger(__name__)

_SIZE, _CPU_SIZE = 4096, 256  # of the matrices
_PRODUCTS, _REPETITIONS = 16, 3  # 2.2 TFLOP each time: milliseconds on an accelerator
_SLOW = 0.7
"""A host or device is slow if the fastest one's time / its own is below this, as in NVRx."""
_ANSWER_SEC = 10.0
"""Longest wait for the sum of a health check, which also waits for slower processes."""


class DeviceSpeed(RunCallback):
    """Times a chain of matrix products on each device and names slow devices."""

    def __init__(self, config: MetricsConfig) -> None:
        self.every, self._config = config.straggler_report_interval, config

    @classmethod
    def of_run(cls, run: RunParts) -> "DeviceSpeed | None":
        """Return the callback if `metrics.straggler_report_interval` is set."""
        return cls(run.config.metrics) if run.config.metrics.straggler_report_interval else None

    def on_train_begin(self, config: JobConfig) -> None:
        """Compile the products for each device."""
        for device in jax.local_devices():
            seconds_of(device)

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log the times; return `Exit.STRAGGLER` if that is enabled, on every process alike."""
        local = [(device.id, seconds_of(device)) for device in jax.local_devices()]
        # [devices, 2]: id and seconds; float32 holds ids up to 2^24 exactly.
        table = np.reshape(multihost_utils.process_allgather(np.array(local, np.float32)), (-1, 2))
        seconds = {int(device): float(time_) for device, time_ in table}
        # Every process has the whole table, so that all come to the same verdict.
        slow = slow_devices(seconds)
        if jax.process_index() == 0:
            _report(context.step, seconds, slow)
        if slow and self._config.stop_if_detected_straggler:
            log.warning("Exiting program due to straggler detection.")
            return Exit.STRAGGLER
        return None


def slow_devices(seconds: Mapping[int, float]) -> list[int]:
    """Return the ids of slow devices."""
    fastest = min(seconds.values())
    return [device for device, time_ in seconds.items() if fastest < _SLOW * time_]


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
    # The shortest: longer ones include pauses of the host.
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


T = TypeVar("T")


class CollectiveHealth(RunCallback):
    """Sums a one-hot row from every device; every device must get a vector of ones.

        device 0   1 0 0          psum        1 1 1
        device 1   0 1 0          ---->       1 1 1
        device 2   0 0 1                      1 1 1

    Each process judges the results of its own devices, so one process may end while others still
    wait for it. The others get no answer at their next check, or the watchdog ends them. Nothing
    can be saved then: neither the state nor the other processes can be reached.
    """

    checks_start = True
    judges_state = True

    def __init__(self, interval: int, mesh: Mesh) -> None:
        self.every, self._mesh = interval, mesh
        self._devices = list(mesh.devices.flat)
        self._answer: Array | None = None

    @classmethod
    def of_run(cls, run: RunParts) -> "CollectiveHealth | None":
        """Return the callback if `train.nccl_health_check_interval` is set."""
        interval = run.config.train.nccl_health_check_interval
        return cls(interval, run.mesh) if interval else None

    def on_train_begin(self, config: JobConfig) -> None:
        """Compile the check and connect the devices, which may take minutes."""
        # On CPU, programs that run at the same time mix up their messages: finish the setup first.
        jax.block_until_ready(jax.live_arrays())
        n = self._mesh.devices.size
        sharding = NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names))
        rows = np.eye(n, dtype=np.int32)
        # [n, n]: each device contributes its row of the unit matrix.
        self._counts = jax.make_array_from_callback((n, n), sharding, lambda index: rows[index])
        self._sum = _compile_sum(self._mesh, self._counts)
        jax.block_until_ready(self._sum(self._counts))

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Log a failure of the check; return `Exit.UNHEALTHY` then."""
        self._answer, step = None, context.step
        # A broken collective never returns, so it must not run in this thread.
        answer = _in_background(self._missing)
        try:
            missing = answer.result(_ANSWER_SEC)
        except concurrent.futures.TimeoutError:
            waiting = _names(self._waiting())
            self._log(step, f"no answer within {_ANSWER_SEC:g} s; still waiting: {waiting}")
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
        # [local devices, n]: column i is the contribution of device i.
        wrong = np.any(np.stack(counts) != 1, axis=0)
        return [device for device, bad in zip(self._devices, wrong, strict=True) if bad]

    def _waiting(self) -> list[jax.Device]:
        """Return the devices of this process that have no answer yet."""
        if self._answer is None:
            return jax.local_devices()
        # The check itself hangs, so the state of its result is all that can be asked.
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


_NAME_BYTES = 64
_NOTICEABLE = 0.1
"""Share of a step below which the time of a host is noise."""


class Report(NamedTuple):
    """Seconds per step, over the steps since the last report, host by host.

    Attributes:
        data_wait: waiting for batches.
        launch: from the arrival of a batch to the launch of its step.
        step: the whole step; nearly the same on all hosts.
    """

    data_wait: Float[np.ndarray, "hosts"]
    launch: Float[np.ndarray, "hosts"]
    step: Float[np.ndarray, "hosts"]

    @property
    def host_time(self) -> Float[np.ndarray, "hosts"]:
        """Time that each host spends before its step can run."""
        return self.data_wait + self.launch

    @property
    def scores(self) -> Float[np.ndarray, "hosts"]:
        """Time of the fastest host / time of each, 1 for the fastest: NVRx's relative score."""
        return self.host_time.min() / np.maximum(self.host_time, 1e-9)

    @property
    def z_scores(self) -> Float[np.ndarray, "hosts"]:
        """Standard deviations above the mean."""
        return (self.host_time - self.host_time.mean()) / max(self.host_time.std(), 1e-9)

    @property
    def slow(self) -> Bool[np.ndarray, "hosts"]:
        """True for hosts that are slow, and whose time is above noise."""
        return (self.scores < _SLOW) & (self.host_time > _NOTICEABLE * self.step)


class Stragglers(RunCallback):
    """Reports the time that hosts spend on their own and names slow hosts."""

    def __init__(self, config: MetricsConfig) -> None:
        self.every, self._config = config.straggler_report_interval, config
        self._hosts: list[str] = []
        self._since: tuple[int, HostTimes] | None = None

    @classmethod
    def of_run(cls, run: RunParts) -> "Stragglers | None":
        """Return the callback if `metrics.straggler_report_interval` is set."""
        section = run.config.metrics
        return cls(section) if section.straggler_report_interval else None

    def on_compiled(self, steps: CompiledSteps) -> None:
        """Gather the names of all hosts."""
        self._hosts = _host_names()

    def on_interval(self, context: IntervalContext) -> Exit | None:
        """Report the times; return `Exit.STRAGGLER` if that is enabled, on every process alike."""
        step, since, now = context.step, self._since, context.tracker.host_times()
        self._since = step, now
        if since is None:
            return None  # these steps include the setup
        # Seconds per step since the last report; `host_times` are totals.
        mean = (np.subtract(now, since[1]) / (step - since[0])).astype(np.float32)  # per step
        clock, data_wait, launch = multihost_utils.process_allgather(mean).T
        report = Report(data_wait, launch, clock)
        slow = report.slow
        if jax.process_index() == 0:
            for level, text in describe(report, slow, self._hosts):
                log.log(level, "step %d: %s", step, text)
        if slow.any() and self._config.stop_if_detected_straggler:
            log.warning("Exiting program due to straggler detection.")
            return Exit.STRAGGLER
        return None


def describe(
    report: Report, slow: Bool[np.ndarray, "hosts"], hosts: Sequence[str]
) -> Iterator[tuple[int, str]]:
    """Yield log levels and messages: the spread over all hosts, then each slow host."""
    spread = ", ".join(
        f"{name.replace('_', ' ')} {times.min():.4f}/{np.median(times):.4f}/{times.max():.4f}"
        for name, times in report._asdict().items()
    )
    yield logging.INFO, f"seconds per step, min/median/max of {len(hosts)} hosts: {spread}"
    for i in np.flatnonzero(slow).tolist():
        yield (
            logging.WARNING,
            (
                f"host {i} ({hosts[i]}) is slow: per step it waits {report.data_wait[i]:.4f} s for "
                f"data and launches in {report.launch[i]:.4f} s; score {report.scores[i]:.2f}, "
                f"z-score {report.z_scores[i]:.1f}"
            ),
        )


def _host_names() -> list[str]:
    """Return the host name of every process."""
    # Collectives exchange arrays of equal shape, so a name is padded with zeros.
    encoded = np.zeros(_NAME_BYTES, np.uint8)
    name = socket.gethostname().encode()[:_NAME_BYTES]
    encoded[: len(name)] = np.frombuffer(name, np.uint8)
    names = multihost_utils.process_allgather(encoded)
    return [bytes(name).rstrip(b"\0").decode(errors="replace") for name in names]
