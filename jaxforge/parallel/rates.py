"""Rates that programs reach: fractions of a chip's data sheet, and links between devices."""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from jaxforge.parallel.hardware import CHIPS, Chip, chip_by_kind
from jaxforge.parallel.mesh import nvlink_domain


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
    "cpu": Efficiency({"products": 0.6}, 0.8, 0, latency=0, waited=1.0),
    "gpu": Efficiency(_ON_GPU, 0.85, 1.5e-6, latency=12e-6, waited=0.15),
    "tpu": Efficiency(_ON_TPU, 0.8, 0, latency=2e-6, waited=0.1),
}
_CPU = Chip("cpu", "cpu", (), peak_flops=1e11, capacity=0, bandwidth=20e9, link=1e9, network=1e9)
"""A device of a CPU with two cores; collectives are copies, during which nothing is computed."""
SIMILAR = {"cpu": _CPU, "gpu": CHIPS["h100"], "tpu": CHIPS["v5p"]}
"""Figures to compare choices with on unknown devices. The ratios of FLOPs, memory and links of an
A100 or a v4 are like those of the next generation."""


def chip_of(mesh: Mesh | AbstractMesh) -> Chip:
    """Return the figures of a mesh's devices; of unknown devices, those of a similar chip.

    A mesh without devices counts as one of CPUs.
    """
    if isinstance(mesh, AbstractMesh):
        return SIMILAR["cpu"]
    device = mesh.devices.flat[0]
    chip = chip_by_kind(device.device_kind)
    return chip if chip and chip.link else SIMILAR[device.platform]


@functools.cache
def rate_along(mesh: Mesh | AbstractMesh, axes: tuple[str, ...], chip: Chip) -> float:
    """Return the bytes/s that a device sends in a group along some axes of a mesh.

    The devices of an abstract mesh are assumed to be neighbours, in domains of `chip.per_domain`.
    """
    first_group = tuple(slice(None) if name in axes else 0 for name in mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        domains = np.arange(mesh.size).reshape(mesh.axis_sizes) // chip.per_domain
        neighbours = np.ravel(domains[first_group]).tolist()
        return EFFICIENCY[chip.platform].links * _between_domains(chip, neighbours)
    members = np.ravel(mesh.devices[first_group])
    return link_rate(chip, "all-gather", list(members), list(mesh.devices.flat))


def link_rate(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Return the bytes/s that each member of a group sends."""
    if chip.platform == "tpu":
        rate = _between_tpus(chip, kind, members, everyone)
    else:
        rate = _between_domains(chip, [nvlink_domain(device) for device in members])
    return EFFICIENCY[chip.platform].links * rate


def _between_domains(chip: Chip, domains: Sequence[int]) -> float:
    """Return the bytes/s of a device: all adapters of a domain serve a ring through its devices.

    Args:
        chip: the devices.
        domains: number of the domain of each device: NVLink domain, or process for CPUs.
    """
    n_domains = len(set(domains))
    return chip.link if n_domains == 1 else min(chip.link, chip.network * len(domains) / n_domains)


def _between_tpus(
    chip: Chip, kind: str, members: Sequence[jax.Device], everyone: Sequence[jax.Device]
) -> float:
    """Return the bytes/s of a TPU, over the links of each dimension that the group spans.

    Devices of a chip share its links (TPU7x). A ring through all of them passes each byte between
    chips once, so that each member has all of a link; in an all-to-all all bytes differ.
    """
    slices = slices_of(members)
    if len(slices) > 1:
        return chip.network * len(members) / len(slices)
    # A group that spans several sides of the torus uses the links of all of them at once.
    rates = []
    for size, whole in zip(shape_of_torus(members), shape_of_torus(everyone), strict=True):
        if size > 1:
            is_ring = size == whole and chip.is_ring(size)
            directions = 2 if is_ring or size > 2 else 1
            rates.append(chip.link * _usable_links(kind, size, is_ring) * directions)
    chips = {tuple(device.coords) for device in members}
    if len(chips) == 1:
        return chip.chip_link or chip.link
    return sum(rates) * (1 if kind == "all-to-all" else len(members) / len(chips))


def slices_of(devices: Sequence[jax.Device]) -> set[int]:
    """Return the numbers of the slices that TPUs belong to; a compiler's devices have slice 0."""
    return {getattr(device, "slice_index", 0) or 0 for device in devices}


def shape_of_torus(devices: Sequence[jax.Device]) -> tuple[int, ...]:
    """Return the number of different coordinates of TPUs along each side of their slice."""
    return tuple(len({device.coords[axis] for device in devices}) for axis in range(3))


def _usable_links(kind: str, size: int, is_ring: bool) -> float:
    """Return the fraction of a dimension's two links per device that a collective can use.

    The ends of a line have one neighbour. In an all-to-all over n devices, the busiest link of a
    ring carries n / 8 of the bytes that each device sends, the busiest link of a line n / 4.
    """
    if kind == "all-to-all" and size > 2:
        return min(1.0, (4 if is_ring else 2) / size)
    return 1.0 if is_ring or size == 2 else 0.5
