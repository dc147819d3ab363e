"""Chips and how they are connected, from their makers' data sheets.

Sources: cloud.google.com/tpu/docs (v5e, v5p, v6e; the network's share is that of a pod or host
divided by its chips), nvidia.com (H100 SXM, H200, B200: NVLink per direction, one 400 Gb/s adapter
per GPU as in DGX).
"""

from typing import NamedTuple

from jaxforge.parallel.targets import GPUS, TPU_MEMORY
from jaxforge.telemetry.flops import PEAK_TFLOPS


class Chip(NamedTuple):
    """One JAX device.

    Attributes:
        name: as people call it.
        platform: JAX's.
        peak_flops: bfloat16 products, FLOP/s.
        memory: bytes that a program may use.
        bandwidth: of that memory, bytes/s.
        link: bytes/s that a device sends over one link to a neighbour (TPU), or over all links to
            the others of its node (GPU).
        network: bytes/s of its share in the data-center network.
        flops_per_cycle: of its matrix units; what the compiler's cycles are turned to seconds by.
        torus_side: TPU: a side of so many chips, or of a multiple, is closed to a ring.
    """

    name: str
    platform: str
    peak_flops: float
    memory: int
    bandwidth: float
    link: float
    network: float
    flops_per_cycle: int = 0
    torus_side: int = 0

    @property
    def cycles_per_second(self) -> float:
        """Clock of the matrix units."""
        return self.peak_flops / self.flops_per_cycle


def _tpu(
    name: str,
    kind: str,
    bandwidth: float,
    link: float,
    network: float,
    per_cycle: int,
    side: int,
) -> Chip:
    peak = PEAK_TFLOPS[f"TPU {name}"] * 1e12
    memory = TPU_MEMORY[kind]
    return Chip(name, "tpu", peak, memory, bandwidth, link, network, per_cycle, side)


def _gpu(name: str, link: float, network: float) -> Chip:
    gpu = GPUS[name]
    peak = PEAK_TFLOPS[name.upper()] * 1e12
    return Chip(name, "gpu", peak, gpu.usable, gpu.bandwidth, link, network)


CHIPS = {
    chip.name: chip
    for chip in (
        _tpu("v5e", "TPU v5 lite", 819e9, 50e9, 3.125e9, 131_072, 16),
        _tpu("v5p", "TPU v5p", 2765e9, 100e9, 6.25e9, 262_144, 4),
        _tpu("v6e", "TPU v6 lite", 1640e9, 100e9, 12.5e9, 524_288, 16),
        _gpu("h100", 450e9, 50e9),
        _gpu("h200", 450e9, 50e9),
        _gpu("b200", 900e9, 50e9),
    )
}
"""By the name that a topology begins with; a CPU is none, as little is known of it."""
