"""Devices of a dry run, and the memory that the step needs on them."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxforge.checkpoint.layout import split_adapters
from jaxforge.checkpoint.replica.replicas import describe_memory
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.runtime import gpu_capability
from jaxforge.model.transformer import (
    Model,
    active_parameter_count,
    build_model,
    parameter_count,
)
from jaxforge.parallel import device_memory
from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.parallel.hardware import CHIPS, Chip
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.rates import SIMILAR
from jaxforge.program import Program
from jaxforge.state.train_state import TrainState
from jaxforge.step.execution import Execution, choose_execution, executions, in_words
from jaxforge.step.frozen_model import frozen_bytes
from jaxforge.step.memory import StepMemory, step_memory
from jaxforge.telemetry.numbers import human
from jaxforge.tools.plan.topology import CPU, Topology

SLACK = 1.1
"""Largest factor by which the estimate may be too high. A step that needs more does not fit."""

_MAX_ROWS = 1 << 16


class Fit(NamedTuple):
    """Memory estimate of a config on devices of one kind.

    Attributes:
        memory: estimated memory of a device.
        execution: gradient reduction and recomputation, as a run would choose.
        rows: sequences of a microbatch on a device.
        most_rows: largest number of such sequences that fits; 0 if not even one fits.
    """

    memory: StepMemory
    execution: Execution
    rows: int
    most_rows: int


def estimate_fit(
    config: JobConfig,
    model: Model,
    state: TrainState,
    mesh: Mesh | AbstractMesh,
    capacity: int,
    frozen: int = 0,
    chip: Chip | None = None,
) -> Fit:
    """Estimate a step's memory on a device, and the number of sequences that would fit.

    Args:
        config: a config that `rules.check` has passed for the mesh.
        model: the model, from `build_model`.
        state: shapes and shardings of the state.
        mesh: concrete or abstract mesh.
        capacity: bytes of a device.
        frozen: bytes of the frozen model on a device.
        chip: figures of a device; by default, those of the mesh's devices.
    """
    execution = choose_execution(
        config, model, state, mesh, capacity=capacity, chip=chip, frozen=frozen
    )
    stored = bytes_per_device(state)
    dp = data_parallel_size(mesh)
    # Rounded up: the fullest device decides.
    rows = -(-config.train.microbatch_size(dp) // dp)

    def memory(execution: Execution, resized: JobConfig) -> StepMemory:
        return step_memory(execution.applied_to(resized), model, mesh, stored, frozen)

    def fits(n: int) -> bool:
        resized = with_batch_size(config, n)
        # Some execution fits: "auto" would choose it.
        return any(memory(option, resized).total <= capacity for option in executions(config, mesh))

    return Fit(memory(execution, config), execution, rows, _largest(fits))


def with_batch_size(config: JobConfig, rows: int) -> JobConfig:
    """Return the config with this number of sequences per device in a microbatch."""
    return config.with_values({"train.batch_size": rows, "train.global_batch_size": None})


def _largest(fits: Callable[[int], bool]) -> int:
    """Return the largest number up to `_MAX_ROWS` that fits; every smaller number fits, too."""
    if not fits(1):
        return 0
    low, high = 1, 2
    while high <= _MAX_ROWS and fits(high):
        low, high = high, 2 * high
    # Invariant of the bisection: `low` fits, `high` does not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


AnyMesh = Mesh | AbstractMesh


class Device(NamedTuple):
    """Kind of device that the run may have.

    Attributes:
        name: name in messages.
        platform: name of JAX's platform.
        capacity: bytes that a program may use.
        capability: compute capability of a GPU.
    """

    name: str
    platform: str
    capacity: int
    capability: str | None = None

    @property
    def chip(self) -> Chip:
        """Figures of the device, or of a similar one."""
        return CHIPS.get(self.name) or SIMILAR[self.platform]


def parse_devices(devices: str) -> tuple[int, list[Device]] | None:
    """Parse `--devices`: number of devices and their possible kinds; None if it is empty.

    Raises:
        UserError: it is neither a number nor a machine.
    """
    if not devices:
        return None
    if devices.isdigit() and int(devices):
        return int(devices), [chip_device(name) for name in CHIPS]
    try:
        topology = Topology.parse(devices)
    except ValueError as error:
        raise UserError(f"--devices: expected a number, or a machine: {error}") from error
    n = topology.n_devices
    if topology.chip == CPU:
        return n, [Device("cpu", CPU, device_memory.host_memory() // n)]
    return n, [chip_device(topology.chip)]


def this_device() -> Device:
    """Return the kind of this machine's devices."""
    device = jax.devices()[0]
    capacity = device_memory.capacity_per_device()
    return Device(device.device_kind, device.platform, capacity, gpu_capability(device))


def chip_device(name: str) -> Device:
    """Return the device of a chip by its name in `CHIPS`."""
    chip = CHIPS[name]
    capability = ".".join(map(str, chip.target.capability)) if chip.target else None
    return Device(name, chip.platform, chip.memory, capability)


def fits_by_device(
    config: JobConfig, mesh: AnyMesh, kinds: Iterable[Device], teacher: ModelConfig | None = None
) -> tuple[Model, TrainState, dict[Device, Fit]]:
    """Return model and state for the first kind of device with the kernels, and the fit on each.

    Raises:
        UserError: no kind of device has the kernels, or a parameter does not divide.
    """
    fits: dict[Device, Fit] = {}
    model_and_state, first_error = None, None
    for device in kinds:
        try:
            model = build_model(config, device.platform, device.capability)
        except UserError as error:
            # An error only if no kind of device can run the model.
            first_error = first_error or error
            continue
        state = Program(config, mesh, model=model).abstract_state()
        frozen = frozen_bytes(config, model, mesh, teacher)
        fits[device] = estimate_fit(
            config, model, state, mesh, device.capacity, frozen, device.chip
        )
        model_and_state = model_and_state or (model, state)
    if model_and_state is None:
        assert first_error is not None
        raise first_error
    return *model_and_state, fits


def replica_rows(config: JobConfig, state: TrainState) -> list[str]:
    """Return a row about replicas in the memory of hosts, if there are any."""
    text = describe_memory(config.checkpoint, state)
    return [f"replicas: {text}"] if text else []


def model_rows(model: Model) -> Iterator[str]:
    """Yield the shape and size of the model."""
    c = model.config
    yield (
        f"{c.n_layers} layers, dim {c.dim}, {c.n_heads}/{c.kv_heads} heads of {c.head_size}, "
        f"vocabulary {c.vocab_size:,}"
    )
    active = f", {human(active_parameter_count(model))} active per token" if c.is_moe else ""
    trained = ""
    if model.adapters is not None:
        trained = f", {human(parameter_count(split_adapters(model.abstract)[0]))} trained"
    yield f"{human(parameter_count(model.abstract))} parameters{active}{trained}"


def memory_rows(fits: dict[Device, Fit]) -> Iterator[str]:
    """Yield the parts of memory on the first kind of device, and a line for each kind."""
    parts = next(iter(fits.values())).memory._asdict()
    yield ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())
    for device, estimate in fits.items():
        most = f"at most {estimate.most_rows:,} fit" if estimate.most_rows else "not even 1 fits"
        yield (
            f"{device.name}: {gigabytes(estimate.memory.total)} of {gigabytes(device.capacity)}; "
            f"{estimate.rows} sequence(s) of a microbatch on a device, {most}; gradients reduced "
            f"per {estimate.execution.grad_sync}, {in_words(estimate.execution.recomputation)}"
        )


def too_large(fits: dict[Device, Fit]) -> Iterator[str]:
    """Yield a warning if no kind of device has enough memory."""
    if any(estimate.memory.total <= SLACK * device.capacity for device, estimate in fits.items()):
        return
    device, estimate = max(fits.items(), key=lambda item: item[0].capacity)
    rows = f"at most {estimate.most_rows:,} sequence(s) of a microbatch fit"
    yield (
        f"the step needs about {gigabytes(estimate.memory.total)} of a device, and {device.name} "
        f"has {gigabytes(device.capacity)}: {rows if estimate.most_rows else 'not even one fits'}. "
        "Use smaller microbatches (train.batch_size, train.grad_accum_steps), "
        'train.activation_checkpointing = "full", or more devices'
    )
