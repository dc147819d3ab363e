"""Cost model: durations of operations, collectives and whole updates on a chip.

On TPU, an operation takes the compiler's cycles. On GPU, a roofline (Williams et al., 2009) gives
the time: the longer of FLOPs / peak FLOP/s and bytes / memory bandwidth, with both rates multiplied
by the fraction that kernels reach (`EFFICIENCY`). docs/plan.md compares the sums with published
runs. A collective takes the time in which its bytes pass the links that it uses.

`update_seconds` needs no program. It is the model of jax-ml.github.io/scaling-book, from sizes
alone, and ranks the candidates of a search before they are compiled. Matrix products run at a
fraction of the peak. If every microbatch gathers weights and reduces gradients, these collectives
overlap with the products. Tensor-parallel exchanges and the pipeline's bubble are added.
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
from jaxforge.parallel.mesh import nvlink_domain
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
"""Recomputed fraction of the FLOPs of forward and backward pass; heads are not recomputed."""


class Efficiency(NamedTuple):
    """Fractions of a data sheet's figures that programs reach.

    Attributes:
        by_kind: fraction of the peak FLOP/s, by `OperationCost.kind`, or by `OperationCost.by`.
        memory: fraction of the memory bandwidth.
        launch: seconds between the end of a kernel and the start of the next.
        latency: seconds until the first byte of a collective has gone around.
        waited: fraction of the collectives of a microbatch that its computation does not hide.
        links: fraction of the links' rate that large collectives reach (0.75 to 0.9 in the
            vendors' own tests).
    """

    by_kind: dict[str, float]
    memory: float
    launch: float
    latency: float
    waited: float
    links: float = 0.8


_ON_GPU = {
    # products, attention, cudnn backward: a step of a 1B model on an H200, 2026-11-26 (docs/gpu.md)
    "products": 0.75,
    "fp8": 0.75,  # of the peak in 8 bits; not measured, as in bf16
    "attention": 0.54,
    "cudnn backward": 0.38,
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
        workload: costs of the program's operations.
        chip: the device.
    """

    def __init__(self, workload: Workload, chip: Chip) -> None:
        self._workload, self._chip, self._efficiency = workload, chip, EFFICIENCY[chip.platform]

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return an operation's kind and seconds."""
        cost = self._workload.of(operation, within)
        if cost.kind == "nothing":
            return cost.kind, 0
        products = 0.0
        if cost.flops:
            fraction = self._efficiency.by_kind[cost.by or cost.kind]
            fp8 = self._chip.fp8_flops if cost.by == "fp8" else 0
            products = cost.flops / ((fp8 or self._chip.peak_flops) * fraction)
        transfers = cost.bytes / (self._chip.bandwidth * self._efficiency.memory)
        return cost.kind, max(products, transfers) + self._efficiency.launch


class Cycles:
    """Rates of a TPU, by the compiler's cycles; Pallas kernels have none and use the roofline.

    The compiler's estimate for a memory-bound operation is two to ten times the time that the
    memory needs. Operations without products therefore take the shorter of both estimates.

    Args:
        program: program of the operations.
        workload: costs of its operations.
        chip: the device.
    """

    def __init__(self, program: HloProgram, workload: Workload, chip: Chip) -> None:
        self._program, self._chip = program, chip
        self._roofline = Roofline(workload, chip)

    def seconds(self, operation: Operation, within: Computation) -> tuple[str, float]:
        """Return an operation's kind and seconds."""
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
        """Return kind "nothing" and 0 seconds."""
        return "nothing", 0


def rates_of(
    program: HloProgram, chip: Chip | None, visible: float, length: int
) -> UnknownRates | Cycles | Roofline:
    """Return the rates of a program's operations on a chip.

    Args:
        program: the program.
        chip: the device; None if it is unknown.
        visible: fraction of visible pairs of attention, as in `Workload`.
        length: tokens of a sequence.
    """
    if chip is None:
        return UnknownRates()
    workload = Workload(program, visible, length)
    return Cycles(program, workload, chip) if chip.platform == "tpu" else Roofline(workload, chip)


class Collective(NamedTuple):
    """One execution of a collective.

    Attributes:
        kind: XLA's name, such as "all-gather".
        axes: mesh axes of its groups.
        sent: bytes that a device sends.
        seconds: duration without overlap.
    """

    kind: str
    axes: tuple[str, ...]
    sent: float
    seconds: float


class Network:
    """Links between the devices of a mesh.

    Args:
        mesh: mesh of the devices, which may be compile-only.
        chip: their kind; None if the links are unknown, as between CPU devices.
    """

    def __init__(self, mesh: Mesh, chip: Chip | None) -> None:
        self._mesh, self._chip = mesh, chip
        self._devices = list(mesh.devices.flat)

    def collective(self, operation: Operation, within: Computation) -> Collective:
        """Return the cost of a collective, or of the first half (`-start`) of one."""
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
    """Return the bytes/s that a device sends in a group along some axes of a mesh."""
    first_group = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    members = np.atleast_1d(mesh.devices[first_group]).flat
    return _rate(chip, "all-gather", list(members), list(mesh.devices.flat))


def _rate(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Return the bytes/s that each member of a group sends."""
    is_gpu, links = chip.platform == "gpu", EFFICIENCY[chip.platform].links
    return links * (
        _between_gpus(chip, members) if is_gpu else _between_tpus(chip, kind, members, everyone)
    )


def _between_gpus(chip: Chip, members: Sequence[jax.Device]) -> float:
    """Return the bytes/s of a GPU: all adapters of a node serve a ring through all its GPUs."""
    nodes = {nvlink_domain(device) for device in members}
    if len(nodes) == 1:
        return chip.link
    return min(chip.link, chip.network * len(members) / len(nodes))


def _between_tpus(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Return the bytes/s of a TPU, over the links of each dimension that the group spans.

    Devices of a chip share its links (TPU7x). A ring through all of them passes each byte between
    chips once, so that each member has all of a link; in an all-to-all all bytes differ.
    """
    slices = {getattr(device, "slice_index", 0) or 0 for device in members}
    if len(slices) > 1:
        return chip.network * len(members) / len(slices)
    rates = []
    for axis in range(3):
        size = len({device.coords[axis] for device in members})
        whole = len({device.coords[axis] for device in everyone})
        if size > 1:
            is_ring = size == whole and whole % chip.torus_side == 0
            directions = 2 if is_ring or size > 2 else 1
            rates.append(chip.link * _usable_links(kind, size, is_ring) * directions)
    chips = {tuple(device.coords) for device in members}
    if len(chips) == 1:
        return chip.chip_link or chip.link
    return sum(rates) * (1 if kind == "all-to-all" else len(members) / len(chips))


def _usable_links(kind: str, size: int, is_ring: bool) -> float:
    """Return the fraction of a dimension's two links per device that a collective can use.

    The ends of a line have one neighbour. In an all-to-all over n devices, the busiest link of a
    ring carries n / 8 of the bytes that each device sends, the busiest link of a line n / 4.
    """
    if kind == "all-to-all" and size > 2:
        return min(1.0, (4 if is_ring else 2) / size)
    return 1.0 if is_ring or size == 2 else 0.5


def update_seconds(config: JobConfig, model: Model, mesh: Mesh, chip: Chip) -> float:
    """Return a rough estimate of an update's seconds, good enough to rank candidates.

    Args:
        config: a config that `rules.check` has passed.
        model: model of the config.
        mesh: mesh of the target devices.
        chip: the device.
    """
    train, c, sizes = config.train, config.model, mesh.shape
    dp, microbatches = data_parallel(sizes), train.grad_accum_steps
    # tokens: of a microbatch on one device. tp and pp split the products of each token.
    tokens = train.microbatch_size(dp) // dp * train.seq_len // sizes["cp"]
    split = sizes["tp"] * sizes["pp"]
    peak = chip.peak_flops * EFFICIENCY[chip.platform].by_kind["products"]
    recompute = 1 + _RECOMPUTED[train.activation_checkpointing]
    computing = tokens / split * causal_flops_per_token(c, train.seq_len) * recompute / peak
    # tp: each half of a layer (attention, feed-forward) gathers and scatters the residual stream,
    # in the forward and in the backward pass: 2 halves x 2 collectives x 2 passes = 8.
    stream = 8 * c.n_layers / sizes["pp"] * tokens * c.dim * _BF16
    computing += _exchange(stream, mesh, ("tp",), chip)
    # cp: queries, keys, values and outputs in the forward pass, its recomputation and the backward.
    heads = (c.n_heads + c.kv_heads) * (c.head_size + c.value_head_size)
    attention = 3 * c.n_layers / split * tokens * heads * _BF16
    computing += _exchange(attention, mesh, ("cp",), chip)
    if c.is_moe:
        # ep: rows go to their experts and back, in the forward and in the backward pass.
        rows = 4 * c.n_layers * tokens * c.moe_top_k * c.dim * _BF16
        computing += _exchange(rows, mesh, ("ep",), chip)
    bubble = 1 + (sizes["pp"] - 1) / (microbatches * config.distributed.chunks)
    weights = _weights_per_device(model, sizes)
    gathers = _exchange(weights * _BF16, mesh, ("dp_shard", "cp"), chip)
    reduces = gathers * model.runtime.reduce_dtype.itemsize / _BF16
    stored = weights / (sizes["dp_shard"] * sizes["cp"])
    replicas = _exchange(2 * _F32 * stored, mesh, ("dp_replicate",), chip)
    if train.grad_sync == "update":
        return microbatches * computing * bubble + gathers + reduces + replicas
    exchanging = 2 * gathers + reduces + replicas  # the backward pass gathers weights again
    waiting = max(exchanging - computing, EFFICIENCY[chip.platform].waited * exchanging)
    return microbatches * (computing + waiting) * bubble


def _exchange(sent: float, mesh: Mesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Return the seconds in which devices along some axes exchange their bytes."""
    n = math.prod(mesh.shape[axis] for axis in axes)
    return sent * (n - 1) / n / rate_along(mesh, axes, chip)


def _weights_per_device(model: Model, mesh: Mapping[str, int]) -> float:
    """Return the number of parameters that a device multiplies with; experts are split over ep."""
    total, active = parameter_count(model.abstract), active_parameter_count(model)
    experts = total - active if model.config.is_moe else 0
    return (total - experts + experts / mesh["ep"]) / (mesh["tp"] * mesh["pp"])
