"""Ahead-of-time compilation of a config's train step for target hardware, and its memory."""

import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.optim.freezing import frozen_paths
from jaxforge.optim.trees import split
from jaxforge.parallel import compilation, targets, xla_flags
from jaxforge.parallel.device_memory import bytes_per_device, capacity_per_device, is_out_of_memory
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.mesh import STAGES, make_mesh, token_parallel_size
from jaxforge.parallel.sharding import Axes, compute_axes, partition_spec
from jaxforge.parallel.xla_flags import Option
from jaxforge.program import Program
from jaxforge.state.train_state import TrainState
from jaxforge.step.executable import CompiledStep
from jaxforge.step.execution import with_execution
from jaxforge.step.frozen_model import frozen_bytes
from jaxforge.step.group_traffic import GroupTraffic, group_traffic
from jaxforge.tools.plan.hlo import HloProgram, parse_arrays
from jaxforge.tools.plan.topology import CPU, TPUS, Topology
from jaxforge.training.callbacks.callback import named_callbacks
from jaxforge.training.callbacks.runner import Callbacks


class Memory(NamedTuple):
    """Memory of one device, in bytes.

    Attributes:
        peak: peak usage, as the compiler reports it, and the frozen model.
        capacity: memory that a program may use.
        parameters: trained parameters.
        optimizer: optimizer state, and the average of the parameters.
        frozen_model: parameters of the frozen model, which the compiled step does not hold.
        gradients: accumulated gradients, float32.
        activations: activations that the layers save for the backward pass.
        other: batch, gathered weights, working space of operations.
    """

    peak: int
    capacity: int
    parameters: int
    optimizer: int
    frozen_model: int
    gradients: int
    activations: int
    other: int

    @property
    def fits(self) -> bool:
        """True if the peak fits the device."""
        return self.peak <= self.capacity

    @property
    def parts(self) -> dict[str, int]:
        """The parts of the peak by name; the frozen model only if there is one."""
        sizes = self._asdict()
        shown = (name for name in self._fields[2:] if name != "frozen_model" or self.frozen_model)
        return {name.replace("_", " "): sizes[name] for name in shown}


class Step(NamedTuple):
    """A compiled step.

    Attributes:
        mesh: mesh of the step.
        config: the config, with an execution in place of "auto".
        why: reason of that execution; empty if the config names it.
        program: the optimized program; None if the compiler ran out of device memory.
        memory: memory of one device.
        seconds: compile time.
        executables: compiled steps by number of microbatches; empty without a program.
        between_groups: traffic between groups that train apart; None without them.
    """

    mesh: Mesh
    config: JobConfig
    why: str
    program: HloProgram | None
    memory: Memory
    seconds: float
    executables: Mapping[int, CompiledStep]
    between_groups: GroupTraffic | None = None


def devices_of(topology: Topology) -> list[jax.Device]:
    """Return the devices of a topology, for a mesh. Only those of `cpu` can run programs.

    Raises:
        UserError: the compiler is not installed, or does not know the slice.
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
    config: JobConfig,
    topology: Topology,
    devices: list[jax.Device],
    *,
    every_size: bool = False,
    teacher: ModelConfig | None = None,
) -> Step:
    """Compile the step as a run would.

    Args:
        config: a config that `rules.check` has passed for the number of devices.
        topology: the target hardware.
        devices: its devices, from `devices_of`.
        every_size: compile the smaller batches of a ramp as well.
        teacher: the `[model]` section of the teacher, if it is known.

    Raises:
        UserError: a parameter does not divide, an axis does not fit the network, or the compiler
            does not know a flag.
    """
    device, chip = devices[0], CHIPS.get(topology.chip)
    # Callbacks may collect metrics, which are outputs of the step.
    callbacks = Callbacks(named_callbacks(config))
    capacity = chip.memory if chip else capacity_per_device()
    mesh = make_mesh(config, devices)
    config, why = with_execution(config, mesh, capacity=capacity, teacher=teacher)
    train = Program(config, mesh, collect=callbacks.collect)
    frozen = frozen_bytes(config, train.model, mesh, teacher)
    # Shapes alone: no device holds anything.
    parts = _Parts(train, train.abstract_state(), capacity, frozen)
    flags = config.train.xla_flags
    options = xla_flags.compiler_options(
        device, flags, has=xla_flags.traits(config, train.model.runtime.unroll)
    )
    traffic = group_traffic(config, train.model, mesh)
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
        memory = parts.memory(_required_bytes(str(error), parts.state), None)
        return Step(mesh, config, why, None, memory, time.perf_counter() - start, {}, traffic)
    seconds = time.perf_counter() - start
    text = compiled.as_text()
    assert text is not None
    program = HloProgram(text, len(devices))
    memory = parts.memory(peak_memory(compiled, device.platform), program)
    return Step(mesh, config, why, program, memory, seconds, steps, traffic)


def peak_memory(compiled: jax.stages.Compiled, platform: str) -> int:
    """Return a program's peak memory on a device, in bytes, as the compiler reports it."""
    stats = compiled.memory_analysis()
    assert stats is not None
    if platform != CPU:
        # The reported peak includes arguments in host memory.
        return stats.peak_memory_in_bytes - stats.host_argument_size_in_bytes
    # The reported peak of XLA:CPU leaves arguments and outputs out.
    output = stats.output_size_in_bytes - stats.alias_size_in_bytes
    return stats.argument_size_in_bytes + output + stats.temp_size_in_bytes


def _compiled(
    lowered: jax.stages.Lowered,
    options: dict[str, Option],
    user_options: Mapping[str, str],
    platform: str,
) -> jax.stages.Compiled:
    """Compile without the default flags that this version of XLA refuses, as a run does.

    Args:
        lowered: the step.
        options: all compiler options.
        user_options: options that the user has set.
        platform: name of the platform, for messages.

    Raises:
        UserError: XLA refuses one of the user's own flags.
    """
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        name = compilation.refused_flag(error)
        if name is None:
            raise
        if name in user_options:
            raise UserError(
                compilation.flag_error_message(name, user_options[name], platform)
            ) from error
    accepted = {key: value for key, value in options.items() if key != name}
    return _compiled(lowered, accepted, user_options, platform)


def _required_bytes(message: str, state: TrainState) -> int:
    """Parse the required bytes from an out-of-memory message of the TPU compiler; 0 if none."""
    number = r"([\d.]+)([KMG])"
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}
    # The compiler reports only what it needed, in the text of its error.
    if total := re.search(rf"Used {number} of", message):
        return int(float(total[1]) * scale[total[2]])
    if temporaries := re.search(rf"HLO temporaries \({number}\)", message):
        return bytes_per_device(state) + int(float(temporaries[1]) * scale[temporaries[2]])
    return 0


class _Parts(NamedTuple):
    """Attribution of a device's memory to parameters, gradients, activations, ..."""

    train: Program
    state: TrainState
    capacity: int
    frozen: int

    def memory(self, peak: int, program: HloProgram | None) -> Memory:
        """Split the peak into its parts; activations are 0 without a program."""
        parameters = bytes_per_device(self.state.params)
        optimizer = bytes_per_device((self.state.opt_state, self.state.ema))
        gradients = self._gradients()
        activations = self._saved(program) if program else 0
        # Buffers are reused, so the parts may add up to more than the peak.
        other = max(0, peak - parameters - optimizer - gradients - activations)
        return Memory(
            peak + self.frozen, self.capacity, parameters, optimizer, self.frozen, gradients,
            activations, other,
        )  # fmt: skip

    @property
    def _gathers_weights(self) -> bool:
        """True if weights and gradients are unsharded over the data axes for a whole update."""
        per_update = self.train.config.train.grad_sync == "update"
        return per_update and token_parallel_size(self.train.mesh) > 1

    def _gradients(self) -> int:
        """Return the bytes of accumulated gradients."""

        def size(leaf: jax.ShapeDtypeStruct, axes: Axes) -> int:
            spec = partition_spec(compute_axes(axes) if self._gathers_weights else axes)
            # 4 bytes: gradients are accumulated in float32.
            return 4 * math.prod(NamedSharding(self.train.mesh, spec).shard_shape(leaf.shape))

        # Frozen parameters have no gradient.
        frozen = frozen_paths(self.train.model.axes, self.train.config)
        trees = (split(t, frozen)[1] for t in (self.state.params, self.train.model.axes))
        sizes = jax.tree.map(size, *trees)
        return sum(jax.tree.leaves(sizes))

    def _saved(self, program: HloProgram) -> int:
        """Return the bytes that the largest loop over layers saves for the backward pass.

        Saved activations are arrays in a loop's carry, [layers, ...], that are not weights.
        """
        stacks = {len(rows) for rows in self.train.model.config.stacks.values()}
        # A pipeline stage has a part of a stack, rounded up.
        layers = stacks | {-(-n // self.train.mesh.shape[STAGES]) for n in stacks}
        layers.add(self.train.model.stack.per_chunk)  # in stages of different layers
        weights = set(self._weights())

        def saved(carry: str) -> float:
            return sum(
                math.prod(dims) * size
                for dims, size in parse_arrays(carry)
                if len(dims) > 2 and dims[0] in layers and (dims, size) not in weights
            )

        carries = (
            operation.shape
            for operations in program.computations.values()
            for operation in operations.values()
            if operation.kind == "while"
        )
        return int(max(map(saved, carries), default=0))

    def _weights(self) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield dimensions and bytes per element that a weight, or its gradient, may have.

        Weights are whole, sharded as stored, or unsharded over the data axes. They have the
        compute dtype only if they are gathered for the whole update.
        """
        compute = jnp.dtype(self.train.model.dtype).itemsize
        sizes = {4, compute} if self._gathers_weights else {4}
        leaves = jax.tree.leaves(self.state.params)
        axes = jax.tree.leaves(self.train.model.axes, is_leaf=lambda node: isinstance(node, tuple))
        for leaf, names in zip(leaves, axes, strict=True):
            used = NamedSharding(self.train.mesh, partition_spec(compute_axes(names)))
            for size in {leaf.dtype.itemsize, *sizes}:
                yield leaf.shape, size
                yield leaf.sharding.shard_shape(leaf.shape), size
                yield used.shard_shape(leaf.shape), size
