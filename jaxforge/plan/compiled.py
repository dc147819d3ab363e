"""The real step of a config, compiled for a machine that is not here, and what it needs."""

import math
import os
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.runtime import gpu_capability
from jaxforge.model.transformer import Model, build_model
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.device_memory import is_out_of_memory, per_device
from jaxforge.parallel.mesh import STAGES, data_parallel_size, make_mesh
from jaxforge.parallel.sharding import partition_spec, without_data
from jaxforge.plan.chips import CHIPS
from jaxforge.plan.hlo import Program, arrays
from jaxforge.plan.topology import CPU, TPUS, Topology
from jaxforge.state.train_state import TrainState, abstract_state
from jaxforge.step.lowering import lower_train_step
from jaxforge.training.hooks import HookRunner, named_hook


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
        """Whether there is room at the fullest moment."""
        return self.peak <= self.capacity


class Step(NamedTuple):
    """A compiled step.

    Attributes:
        mesh: that it is for.
        program: optimized; None where the compiler gave up for lack of memory.
        memory: of one device.
        seconds: that compiling took.
    """

    mesh: Mesh
    program: Program | None
    memory: Memory
    seconds: float


def devices_of(topology: Topology) -> list[jax.Device]:
    """To make a mesh of; but for a CPU's, nothing can run on them.

    Raises:
        UserError: the compiler is not installed, or knows no such slice.
    """
    if topology.chip == CPU:
        found = jax.devices(CPU)
        if len(found) < topology.n_devices:
            raise UserError(f"{topology}: JAX has {len(found)} CPU devices in this process")
        return found[: topology.n_devices]
    if topology.chip not in TPUS:
        return list(targets.gpus(topology.chip, *topology.sides))
    name = f"{topology.chip}:{'x'.join(map(str, topology.sides))}"
    return list(targets.tpus(name, topology.slices))


def compile_step(config: JobConfig, topology: Topology, devices: list[jax.Device]) -> Step:
    """Compiles as a run would.

    Args:
        config: that `rules.check` has passed for so many devices.
        topology: the machine.
        devices: of it, from `devices_of`.

    Raises:
        UserError: a parameter does not divide, or an axis does not fit the network.
    """
    mesh = make_mesh(config, devices)
    device = devices[0]
    model = build_model(config, device.platform, gpu_capability(device))
    state = abstract_state(model, build_optimizer(config, model.axes), mesh)
    spreads = config.model.is_moe
    options = xla_flags.compiler_options(device, config.train.xla_flags, spreads_experts=spreads)
    hooks = HookRunner([named_hook(path) for path in config.plugins.hooks])
    lowered = lower_train_step(config, mesh, collect=hooks.collect)
    start = time.perf_counter()
    try:
        compiled = lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if not is_out_of_memory(error):
            raise
        seconds = time.perf_counter() - start
        memory = _memory(config, model, state, mesh, topology, _wanted(str(error), state), None)
        return Step(mesh, None, memory, seconds)
    seconds = time.perf_counter() - start
    text, stats = compiled.as_text(), compiled.memory_analysis()
    assert text is not None
    assert stats is not None
    program, peak = Program(text, len(devices)), stats.peak_memory_in_bytes
    if topology.chip == CPU:  # where the peak leaves temporaries out
        kept = stats.output_size_in_bytes - stats.alias_size_in_bytes
        peak = stats.argument_size_in_bytes + kept + stats.temp_size_in_bytes
    return Step(
        mesh, program, _memory(config, model, state, mesh, topology, peak, program), seconds
    )


def _wanted(said: str, state: TrainState) -> int:
    """Bytes that the compiler for TPU would have needed, by its message."""
    number = r"([\d.]+)([KMG])"
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}
    if whole := re.search(rf"Used {number} of", said):
        return int(float(whole[1]) * scale[whole[2]])
    if besides := re.search(rf"HLO temporaries \({number}\)", said):
        return per_device(state) + int(float(besides[1]) * scale[besides[2]])
    return 0


def _memory(
    config: JobConfig,
    model: Model,
    state: TrainState,
    mesh: Mesh,
    topology: Topology,
    peak: int,
    program: Program | None,
) -> Memory:
    parameters, optimizer = per_device(state.params), per_device(state.opt_state)
    gradients = _gradients(config, model, state, mesh)
    activations = _saved(program, model, state, mesh) if program else 0
    other = max(0, peak - parameters - optimizer - gradients - activations)
    chip = CHIPS.get(topology.chip)
    capacity = chip.memory if chip else _memory_of_this_machine() // topology.n_devices
    return Memory(peak, capacity, parameters, optimizer, gradients, activations, other)


def _memory_of_this_machine() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _gradients(config: JobConfig, model: Model, state: TrainState, mesh: Mesh) -> int:
    """Those that are added up over microbatches: whole where they are reduced once per update."""
    whole = config.train.grad_sync == "update" and data_parallel_size(mesh) > 1

    def size(leaf: jax.ShapeDtypeStruct, axes: tuple) -> int:
        spec = partition_spec(without_data(axes) if whole else axes)
        return 4 * math.prod(NamedSharding(mesh, spec).shard_shape(leaf.shape))

    sizes = jax.tree.map(size, state.params, model.axes)
    return sum(jax.tree.leaves(sizes))


def _saved(program: Program, model: Model, state: TrainState, mesh: Mesh) -> int:
    """What the fullest loop over layers carries one of for each layer, but for weights' kin.

    Those have the shapes of parameters, whole, of one device, or whole over the data axes.
    """
    stacks = {len(rows) for rows in model.config.stacks.values()}
    layers = stacks | {-(-n // mesh.shape[STAGES]) for n in stacks}
    weights = set(_weight_shapes(model, state, mesh))
    return max((_of_layers(shape, layers, weights) for shape in _carried(program)), default=0)


def _of_layers(shape: str, layers: set[int], weights: set[tuple[int, ...]]) -> int:
    return int(
        sum(
            math.prod(dims) * size
            for dims, size in arrays(shape)
            if len(dims) > 2 and dims[0] in layers and dims not in weights
        )
    )


def _weight_shapes(model: Model, state: TrainState, mesh: Mesh) -> Iterator[tuple[int, ...]]:
    leaves = jax.tree.leaves(state.params)
    axes = jax.tree.leaves(model.axes, is_leaf=lambda node: isinstance(node, tuple))
    for leaf, names in zip(leaves, axes, strict=True):
        used = NamedSharding(mesh, partition_spec(without_data(names)))
        yield from (leaf.shape, leaf.sharding.shard_shape(leaf.shape), used.shard_shape(leaf.shape))


def _carried(program: Program) -> Iterator[str]:
    for operations in program.computations.values():
        for operation in operations.values():
            if operation.kind == "while":
                yield operation.shape
