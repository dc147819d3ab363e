"""The real step of a config, compiled for a machine that is not here, and what it needs."""

import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.parallel import compilation, targets, xla_flags
from jaxforge.parallel.device_memory import bytes_per_device, capacity_per_device, is_out_of_memory
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import STAGES, make_mesh, token_parallel_size
from jaxforge.parallel.sharding import Axes, compute_axes, partition_spec
from jaxforge.parallel.xla_flags import Option
from jaxforge.program import Program
from jaxforge.state.train_state import TrainState
from jaxforge.step.executable import CompiledStep
from jaxforge.step.grad_sync import GradSync
from jaxforge.tools.plan.hlo import HloProgram, arrays
from jaxforge.tools.plan.topology import CPU, TPUS, Topology
from jaxforge.training.callbacks.runner import Callbacks
from jaxforge.training.hooks import named_callbacks


class Memory(NamedTuple):
    """Bytes of one device.

    Attributes:
        peak: at the fullest moment, as the compiler says.
        capacity: that a program may use.
        parameters: those that are trained.
        optimizer: moments and what else goes with them.
        gradients: float32, as they are added up.
        activations: saved by the layers for the backward pass.
        other: batch, gathered weights, working space of operations.
    """

    peak: int
    capacity: int
    parameters: int
    optimizer: int
    gradients: int
    activations: int
    other: int

    @property
    def fits(self) -> bool:
        """Return whether the peak fits the device."""
        return self.peak <= self.capacity


class Step(NamedTuple):
    """A compiled step.

    Attributes:
        mesh: that it is for.
        grad_sync: how gradients are reduced, and why.
        program: optimized; None where the compiler gave up for lack of memory.
        memory: of one device.
        seconds: that compiling took.
        executables: by the number of microbatches; empty where there is no program.
    """

    mesh: Mesh
    grad_sync: GradSync
    program: HloProgram | None
    memory: Memory
    seconds: float
    executables: Mapping[int, CompiledStep]


def devices_of(topology: Topology) -> list[jax.Device]:
    """To make a mesh of; but for a CPU's, nothing can run on them.

    Raises:
        UserError: the compiler is not installed, or knows no such slice.
    """
    if topology.chip == CPU:
        devices = jax.devices(CPU)
        if len(devices) < topology.n_devices:
            raise UserError(f"{topology}: JAX has {len(devices)} CPU devices in this process")
        return devices[: topology.n_devices]
    if topology.chip not in TPUS:
        return list(targets.gpus(topology.chip, *topology.shape))
    name = f"{topology.chip}:{'x'.join(map(str, topology.shape))}"
    return list(targets.tpus(name, topology.slices))


def compile_step(
    config: JobConfig, topology: Topology, devices: list[jax.Device], *, every_size: bool = False
) -> Step:
    """Compile the step as a run would.

    Args:
        config: that `rules.check` has passed for this many devices.
        topology: the machine.
        devices: of it, from `devices_of`.
        every_size: the smaller batches of a ramp as well.

    Raises:
        UserError: a parameter does not divide, an axis does not fit the network, or the compiler
            does not know a flag.
    """
    device, chip = devices[0], CHIPS.get(topology.chip)
    hooks = Callbacks(named_callbacks(config))
    capacity = chip.memory if chip else capacity_per_device()
    mesh = make_mesh(config, devices)
    train = Program(config, mesh, collect=hooks.collect, capacity=capacity)
    sync, parts = train.grad_sync, _Parts(train, train.abstract_state(), capacity)
    flags = config.train.xla_flags
    options = xla_flags.compiler_options(device, flags, has=xla_flags.traits(config))
    largest = config.train.grad_accum_steps
    lowered = train.lower_sizes() if every_size else {largest: train.lower()}
    # The program of padded batches does not know how long its loop over microbatches is, which the
    # estimate needs: that of the largest batch alone is compiled for it.
    counted = train.lower() if every_size and train.pads_batches else None
    start = time.perf_counter()
    try:
        steps = {
            n: CompiledStep(program, _compiled(program, options, flags, device.platform))
            for n, program in lowered.items()
        }
        compiled = steps[largest].compiled
        if counted is not None:
            compiled = _compiled(counted, options, flags, device.platform)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        memory = parts.memory(_wanted(str(error), parts.state), None)
        return Step(mesh, sync, None, memory, time.perf_counter() - start, {})
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    assert text is not None
    program = HloProgram(text, len(devices))
    memory = parts.memory(peak_of(compiled, device.platform), program)
    return Step(mesh, sync, program, memory, seconds, steps)


def peak_of(compiled: jax.stages.Compiled, platform: str) -> int:
    """Bytes of a device at the fullest moment of a program, as the compiler says."""
    stats = compiled.memory_analysis()
    assert stats is not None
    if platform != CPU:
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes  # it counts those
    output = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return (
        stats.argument_size_in_bytes + output + stats.temp_size_in_bytes
    )  # the peak leaves it out


def _compiled(
    lowered: jax.stages.Lowered, options: dict[str, Option], own: Mapping[str, str], platform: str
) -> jax.stages.Compiled:
    """Without the flags of our table that this XLA does not take, as a run would be.

    Raises:
        UserError: it does not take one of the user's own.
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        name = compilation.refused_flag(error)
        if name is None:
            raise
        if name in own:
            raise UserError(compilation.flag_error_message(name, own[name], platform)) from error
    others = {other: value for other, value in options.items() if other != name}
    return _compiled(lowered, others, own, platform)


def _wanted(said: str, state: TrainState) -> int:
    """Bytes that the compiler for TPU would have needed, by its message."""
    number = r"([\d.]+)([KMG])"
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}
    if whole := re.search(rf"Used {number} of", said):
        return int(float(whole[1]) * scale[whole[2]])
    if besides := re.search(rf"HLO temporaries \({number}\)", said):
        return bytes_per_device(state) + int(float(besides[1]) * scale[besides[2]])
    return 0


class _Parts(NamedTuple):
    """Parts of a device's memory."""

    train: Program
    state: TrainState
    capacity: int

    def memory(self, peak: int, program: HloProgram | None) -> Memory:
        """The parts of the peak; what the program saves is known where there is one."""
        parameters, optimizer = (
            bytes_per_device(self.state.params),
            bytes_per_device(self.state.opt_state),
        )
        gradients = self._gradients()
        activations = self._saved(program) if program else 0
        other = max(0, peak - parameters - optimizer - gradients - activations)
        return Memory(peak, self.capacity, parameters, optimizer, gradients, activations, other)

    @property
    def _is_whole(self) -> bool:
        return self.train.grad_sync.mode == "update" and token_parallel_size(self.train.mesh) > 1

    def _gradients(self) -> int:
        """Return the bytes of summed gradients; whole ones if they are reduced once per update."""

        def size(leaf: jax.ShapeDtypeStruct, axes: Axes) -> int:
            spec = partition_spec(compute_axes(axes) if self._is_whole else axes)
            return 4 * math.prod(NamedSharding(self.train.mesh, spec).shard_shape(leaf.shape))

        sizes = jax.tree.map(size, self.state.params, self.train.model.axes)
        return sum(jax.tree.leaves(sizes))

    def _saved(self, program: HloProgram) -> int:
        """Return the bytes that the largest loop over layers saves per layer, apart from weights.

        Those have the shapes of parameters, whole, of one device, or whole over the data axes; in
        the dtype of products only where they are gathered for the whole update.
        """
        stacks = {len(rows) for rows in self.train.model.config.stacks.values()}
        layers = stacks | {-(-n // self.train.mesh.shape[STAGES]) for n in stacks}
        weights = set(self._weights())
        return max((_of_layers(shape, layers, weights) for shape in _carried(program)), default=0)

    def _weights(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Dimensions, and bytes of an element."""
        sizes = {4, *([jnp.dtype(self.train.model.dtype).itemsize] if self._is_whole else [])}
        leaves = jax.tree.leaves(self.state.params)
        axes = jax.tree.leaves(self.train.model.axes, is_leaf=lambda node: isinstance(node, tuple))
        for leaf, names in zip(leaves, axes, strict=True):
            used = NamedSharding(self.train.mesh, partition_spec(compute_axes(names)))
            for size in {leaf.dtype.itemsize, *sizes}:
                yield leaf.shape, size
                yield leaf.sharding.shard_shape(leaf.shape), size
                yield used.shard_shape(leaf.shape), size


def _of_layers(shape: str, layers: set[int], weights: set[tuple[tuple[int, ...], float]]) -> int:
    return int(
        sum(
            math.prod(dims) * size
            for dims, size in arrays(shape)
            if len(dims) > 2 and dims[0] in layers and (dims, size) not in weights
        )
    )


def _carried(program: HloProgram) -> Iterator[str]:
    for operations in program.computations.values():
        for operation in operations.values():
            if operation.kind == "while":
                yield operation.shape
