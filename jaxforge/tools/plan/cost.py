"""Cost model: durations of operations, collectives and whole updates on a chip.

Operations: by the compiler's cycles on TPU, by a roofline on GPU (Williams et al., 2009): the
longer of FLOPs over the chip's rate and bytes over that of its memory, each times what kernels
reach of it (`EFFICIENCY`; docs/plan.md holds the sum against published runs). Collectives: by the
bytes that they send and the links that they use.

`update_seconds` needs no program: it is the model of jax-ml.github.io/scaling-book, from sizes
alone, for what a search compiles first. Products run at a part of the peak; weights are gathered
and gradients reduced next to them where every microbatch does it; tensor-parallel exchanges and the
pipeline's bubble come on top.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jaxforge.config.axes import data_parallel
from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import Model, active_parameter_count, parameter_count
from jaxforge.parallel.hardware import Chip
from jaxforge.telemetry.flops import causal_flops_per_token
from jaxforge.tools.plan.hlo import (
    Computation,
    HloProgram,
    Operation,
    first_replica_group,
    sent_bytes,
)
from jaxforge.tools.plan.workload import Workload

_BF16, _F32 = 2, 4
_RECOMPUTED = {
    "none": 0.0,
    "everything_saveable": 0.0,
    "selective": 0.03,
    "dots_saveable": 0.02,
    "dots_with_no_batch_dims_saveable": 0.05,
    "full": 0.22,
    "nothing_saveable": 0.22,
}
"""Recomputed part of the FLOPs of forward and backward; heads are not recomputed."""


class Efficiency(NamedTuple):
    """Efficiency fractions of a data sheet's figures.

    Attributes:
        by_kind: part of the peak FLOP/s, by kind of work, and by `Work.by` where that says one.
        memory: part of the memory's bandwidth.
        launch: seconds between the end of a kernel and the beginning of the next.
        latency: seconds until the first byte of a collective has gone around.
        waited: of the exchanges next to a microbatch's work, the part that is waited for.
        links: part of the links' rate that large collectives reach (0.75 to 0.9 in the makers' own
            tests).
    """

    by_kind: dict[str, float]
    memory: float
    launch: float
    latency: float
    waited: float
    links: float = 0.8


_ON_GPU = {
    "products": 0.72,
    "attention": 0.55,
    "experts": 0.5,
    "triton": 0.35,  # FlashAttention-2 on H100 (Shah et al. 2024, arXiv:2407.08608)
    "masked cudnn": 0.16,  # on H100 (jax-ml/jax#35114)
}
_ON_TPU = {"products": 0.9, "attention": 0.45, "experts": 0.6}
EFFICIENCY = {
    "gpu": Efficiency(_ON_GPU, 0.85, 1.5e-6, latency=12e-6, waited=0.5),
    "tpu": Efficiency(_ON_TPU, 0.8, 0, latency=2e-6, waited=0.1),
}


class Roofline:
    """Rates of a device whose compiler writes no times into its programs.

    Args:
        work: of the program.
        chip: the device.
    """

    def __init__(self, workload: Workload, chip: Chip) -> None:
        self._workload, self._chip, self._reached = workload, chip, EFFICIENCY[chip.platform]

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return the kind of the work, and seconds."""
        cost = self._workload.of(operation, within)
        if cost.kind == "nothing":
            return cost.kind, 0
        products = 0.0
        if cost.flops:
            part = self._reached.by_kind[cost.by or cost.kind]
            products = cost.flops / (self._chip.peak_flops * part)
        moved = cost.bytes / (self._chip.bandwidth * self._reached.memory)
        return cost.kind, max(products, moved) + self._reached.launch


class Cycles:
    """Rates of a TPU, by the compiler's cycles; Pallas kernels have none.

    Of what has no products, the shorter of its estimate and the roofline's: it charges memory-bound
    operations two to ten times what the memory needs.

    Args:
        program: whose operations are asked for.
        work: of the program.
        chip: the device.
    """

    def __init__(self, program: HloProgram, workload: Workload, chip: Chip) -> None:
        self._program, self._chip = program, chip
        self._roofline = Roofline(workload, chip)

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return the kind of the work, and seconds."""
        if operation.kind == "custom-call":
            return self._roofline.seconds(operation, within)
        if not operation.cycles:
            return "nothing", 0
        seconds = operation.cycles / self._chip.cycles_per_second
        if self._program.category(operation) == "matmul":
            return "products", seconds
        return "memory", min(seconds, self._roofline.seconds(operation, within)[1] or seconds)


class UnknownRates:
    """Rates of an unknown device."""

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return no work and no time."""
        return "nothing", 0


def rates_of(
    program: HloProgram, chip: Chip | None, visible: float
) -> UnknownRates | Cycles | Roofline:
    """Return the rates for a program on a chip; `visible` as in `Workload`."""
    if chip is None:
        return UnknownRates()
    workload = Workload(program, visible)
    return Cycles(program, workload, chip) if chip.platform == "tpu" else Roofline(workload, chip)


class Collective(NamedTuple):
    """One execution of a collective.

    Attributes:
        kind: as XLA names it.
        axes: the axes of the mesh that it goes over.
        sent: bytes that a device sends.
        seconds: that it takes by itself.
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    seconds: float


class Network:
    """Links between the devices of a mesh.

    Args:
        mesh: of devices, which may be described ones.
        chip: what they are; None where links are not known, as between CPU devices.
    """

    def __init__(self, mesh: Mesh, chip: Chip | None) -> None:
        self._mesh, self._chip = mesh, chip
        self._devices = list(mesh.devices.flat)

    def collective(self, operation: Operation, within: Computation) -> Collective:
        """Return what a collective, or the first half of one, will take."""
        kind = operation.collective or operation.kind
        group = first_replica_group(operation.line, len(self._devices))
        size = sum(within[name].bytes for name in operation.operands)
        sent = sent_bytes(kind, size, len(group))
        return Collective(kind, self._axes(group), sent, self._seconds(kind, group, sent))

    def _axes(self, group: Sequence[int]) -> tuple[str, ...]:
        """Return the axes along which the members of a group differ."""
        coordinates = np.unravel_index(group, self._mesh.devices.shape)
        pairs = zip(self._mesh.axis_names, coordinates, strict=True)
        return tuple(str(name) for name, coordinate in pairs if len(set(coordinate.tolist())) > 1)

    def _seconds(self, kind: str, group: Sequence[int], sent: float) -> float:
        if self._chip is None or len(group) == 1:
            return 0
        rate = _rate(self._chip, kind, [self._devices[i] for i in group], self._devices)
        return EFFICIENCY[self._chip.platform].latency + sent / rate


@functools.cache
def rate_along(mesh: Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Return bytes/s that a device sends to the others along some axes of a mesh."""
    along = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    members = np.atleast_1d(mesh.devices[along]).flat
    return _rate(chip, "all-gather", list(members), list(mesh.devices.flat))


def _rate(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Return bytes/s that each member sends."""
    is_gpu, links = chip.platform == "gpu", EFFICIENCY[chip.platform].links
    return links * (
        _between_gpus(chip, members) if is_gpu else _between_tpus(chip, kind, members, everyone)
    )


def _between_gpus(chip: Chip, members: Sequence[jax.Device]) -> float:
    """Return bytes/s of a GPU: all adapters of a node serve a ring through all its GPUs."""
    nodes = {_node(device) for device in members}
    if len(nodes) == 1:
        return chip.link
    return min(chip.link, chip.network * len(members) / len(nodes))


def _between_tpus(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Return bytes/s of a TPU, over the links of each direction that the group extends in."""
    slices = {getattr(device, "slice_index", 0) or 0 for device in members}
    if len(slices) > 1:
        return chip.network * len(members) / len(slices)
    rates = []
    for axis in range(3):
        size = len({device.coords[axis] for device in members})
        whole = len({device.coords[axis] for device in everyone})
        if size > 1:
            closed = size == whole and whole % chip.torus_side == 0
            both_ways = 2 if closed or size > 2 else 1
            rates.append(chip.link * _share(kind, size, closed) * both_ways)
    return sum(rates) or chip.link


def _share(kind: str, size: int, closed: bool) -> float:
    """Return the part of both links of a direction that a collective can use.

    A line has one neighbour at its ends. In an all-to-all, the busiest link of a ring of n carries
    n / 8 of what each device sends to all others, that of a line n / 4.
    """
    if kind == "all-to-all" and size > 2:
        return min(1.0, (4 if closed else 2) / size)
    return 1.0 if closed or size == 2 else 0.5


def _node(device: jax.Device) -> object:
    # Described GPUs have the node before their own number; of others, a process is one.
    coords = getattr(device, "coords", None)
    return tuple(coords[:2]) if coords is not None else device.process_index


def update_seconds(config: JobConfig, model: Model, mesh: Mesh, chip: Chip) -> float:
    """Return roughly how long an update takes: good for ranking what is then compiled.

    Args:
        config: that `rules.check` has passed.
        model: of the config.
        mesh: of the target devices.
        chip: the device.
    """
    train, c, sizes = config.train, config.model, mesh.shape
    dp, rounds = data_parallel(sizes), train.grad_accum_steps
    # Of a microbatch on one device.
    tokens = train.microbatch_size(dp) // dp * train.seq_len // sizes["cp"]
    cut = sizes["tp"] * sizes["pp"]
    peak = chip.peak_flops * EFFICIENCY[chip.platform].by_kind["products"]
    again = 1 + _RECOMPUTED[train.activation_checkpointing]
    computing = tokens / cut * causal_flops_per_token(c, train.seq_len) * again / peak
    # Activations go out and come back twice in each half of a layer; rows go to experts and back.
    passed = 8 * c.n_layers / sizes["pp"] * tokens * c.dim * _BF16
    computing += _exchange(passed, mesh, ("tp",), chip)
    # Queries, keys, values and results: in the forward, when that is repeated, and backwards.
    heads = 2 * (c.n_heads + c.kv_heads) * c.head_size
    shared = 3 * c.n_layers / cut * tokens * heads * _BF16
    computing += _exchange(shared, mesh, ("cp",), chip)
    if c.is_moe:
        rows = 4 * c.n_layers * tokens * c.moe_top_k * c.dim * _BF16
        computing += _exchange(rows, mesh, ("ep",), chip)
    bubble = 1 + (sizes["pp"] - 1) / (rounds * config.distributed.chunks)
    weights = _used_by_one(model, sizes)
    gathers = _exchange(weights * _BF16, mesh, ("dp_shard", "cp"), chip)
    reduces = gathers * model.runtime.reduce_dtype.itemsize / _BF16
    stored = weights / (sizes["dp_shard"] * sizes["cp"])
    copies = _exchange(2 * _F32 * stored, mesh, ("dp_replicate",), chip)
    if train.grad_sync == "update":
        return rounds * computing * bubble + gathers + reduces + copies
    exchanging = 2 * gathers + reduces + copies  # weights are gathered again in the backward pass
    waiting = max(exchanging - computing, EFFICIENCY[chip.platform].waited * exchanging)
    return rounds * (computing + waiting) * bubble


def _exchange(sent: float, mesh: Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Return the seconds in which devices along some axes exchange their bytes."""
    n = math.prod(mesh.shape[axis] for axis in axes)
    return sent * (n - 1) / n / rate_along(mesh, axes, chip)


def _used_by_one(model: Model, mesh: Mapping[str, int]) -> float:
    """Return how many parameters a device multiplies with; of experts, its own."""
    every, active = parameter_count(model.abstract), active_parameter_count(model)
    experts = every - active if model.config.is_moe else 0
    return (every - experts + experts / mesh["ep"]) / (mesh["tp"] * mesh["pp"])
