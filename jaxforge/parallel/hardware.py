"""Published figures of the chips that JAX runs on.

Sources: cloud.google.com/tpu/docs (peak, bandwidth, links; a chip's share of the data-center
network is that of its pod or host divided by the chips), XLA's messages (memory of TPUs, less the
part that the runtime uses), nvidia.com (peaks of tensor cores without sparsity; NVLink per
direction, one network adapter per GPU as in DGX: 400 Gb/s, 800 Gb/s in GB300 NVL72).

Memory, cores, caches and clocks of GPUs are those that drivers report, as in XLA's own target
configs (openxla/xla, xla/backends/gpu/target_config/specs). They are lower than the data sheets'
memory, 186 GB of a GB200 and 279 GB of a GB300 in units of 2^30 bytes.

A TPU7x chip has two chiplets, and JAX has a device for each (cloud.google.com/tpu/docs/tpu7x): one
TensorCore, half the chip's FLOP/s, memory and bandwidth. The chiplets share the chip's links. This
module does not import JAX.
"""

import os
from typing import NamedTuple

_GIB = 1 << 30
_PREALLOCATED = "0.75"
"""Fraction of a GPU's memory that JAX allocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set."""

SMALLEST_TPU_MEMORY = 16e9
"""Memory of a v5e, the smallest TPU in use, by its data sheet, in bytes."""


class GpuTarget(NamedTuple):
    """Properties of a GPU that XLA's compiler depends on.

    Attributes:
        name: name of the device, as reported by the driver.
        capability: compute capability.
        cores: number of streaming multiprocessors.
        l2_cache: size of the L2 cache in bytes.
        clock: clock rate in GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    l2_cache: int
    clock: float


class Chip(NamedTuple):
    """Published figures of a JAX device: a chip, or half a chip on TPU7x.

    Attributes:
        name: common name, with which a topology starts.
        platform: platform in JAX, "tpu" or "gpu".
        kinds: parts of the `device_kind` of JAX's devices.
        peak_flops: peak of dense bfloat16 products in FLOP/s.
        fp8_flops: peak of dense products in 8-bit floats in FLOP/s; 0: as in bfloat16.
        capacity: memory of a GPU, or memory of a TPU that programs may use, in bytes.
        bandwidth: memory bandwidth in bytes/s.
        link: bandwidth in bytes/s, in one direction, of a device's share of one link to a
            neighbour (TPU), or of all links to other devices by NVLink (GPU); 0: unknown, as is
            `network`.
        network: share of a device in the bandwidth of the data-center network, in bytes/s.
        flops_per_cycle: FLOPs of a TPU's matrix units per cycle.
        n_sides: number of sides of a TPU slice. A cluster of GPUs has two: NVLink domains and GPUs
            of each. A domain is a node, or a rack of GB200 NVL72 or GB300 NVL72.
        torus_side: a side of a TPU slice is a ring if its length is a multiple of this number.
        per_chip: JAX devices of a chip.
        chip_link: bandwidth in bytes/s, in one direction, between the devices of a chip.
        per_host: GPUs of a host.
        per_domain: largest number of GPUs that NVLink connects.
        target: properties for the compiler of GPUs; None: a TPU.
    """

    name: str
    platform: str
    kinds: tuple[str, ...]
    peak_flops: float
    capacity: int
    bandwidth: float = 0
    fp8_flops: float = 0
    link: float = 0
    network: float = 0
    flops_per_cycle: int = 0
    n_sides: int = 2
    torus_side: int = 0
    per_chip: int = 1
    chip_link: float = 0
    per_host: int = 8
    per_domain: int = 8
    target: GpuTarget | None = None

    def is_ring(self, length: int) -> bool:
        """Return whether the ends of a side of a TPU slice are connected."""
        return self.torus_side > 0 and length % self.torus_side == 0

    @property
    def cycles_per_second(self) -> float:
        """Clock rate of the matrix units, which converts the compiler's cycles to seconds."""
        return self.peak_flops / self.flops_per_cycle

    @property
    def memory(self) -> int:
        """Memory that a program may use, in bytes; for GPUs, the memory that JAX allocates."""
        if self.platform == "tpu":
            return self.capacity
        return usable_gpu_memory(self.capacity)


def usable_gpu_memory(capacity: float) -> int:
    """Return the bytes of a GPU that JAX allocates for programs."""
    return int(float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", _PREALLOCATED)) * capacity)


_CHIPS = (
    Chip("v4", "tpu", ("TPU v4",), 275e12, int(30.75 * _GIB)),
    Chip("v5e", "tpu", ("TPU v5 lite", "TPU v5e"), 197e12, int(15.75 * _GIB), 819e9,
         link=50e9, network=3.125e9, flops_per_cycle=131_072, torus_side=16),
    Chip("v5p", "tpu", ("TPU v5", "TPU v5p"), 459e12, int(95.74 * _GIB), 2765e9,
         link=100e9, network=6.25e9, flops_per_cycle=262_144, n_sides=3, torus_side=4),
    Chip("v6e", "tpu", ("TPU v6 lite", "TPU v6e"), 918e12, int(31.25 * _GIB), 1640e9,
         link=100e9, network=12.5e9, flops_per_cycle=524_288, torus_side=16),
    # Half a chip of 2307 (fp8: 4614) TFLOP/s and 7380 GB/s, whose six links have 100 GB/s in each
    # direction. The chiplets' own link is six times as fast as one of these.
    Chip("tpu7x", "tpu", ("TPU7x",), 1153.5e12, int(94.75 * _GIB), 3690e9, fp8_flops=2307e12,
         link=50e9, network=6.25e9, flops_per_cycle=524_288, n_sides=3, torus_side=4,
         per_chip=2, chip_link=600e9),
    Chip("h100", "gpu", ("H100",), 989e12, 84_942_979_072, 3_352_320_000_000, fp8_flops=1979e12,
         link=450e9, network=50e9,
         target=GpuTarget("NVIDIA H100 80GB HBM3", (9, 0), 132, 52_428_800, 1.98)),
    Chip("h200", "gpu", ("H200",), 989e12, 151_397_597_184, 4_800_000_000_000, fp8_flops=1979e12,
         link=450e9, network=50e9,
         target=GpuTarget("NVIDIA H200 141GB HBM3e", (9, 0), 132, 52_428_800, 1.98)),
    Chip("b200", "gpu", ("B200",), 2250e12, 191_514_411_008, 7_672_320_000_000, fp8_flops=4500e12,
         link=900e9, network=50e9,
         target=GpuTarget("NVIDIA B200", (10, 0), 148, 132_644_864, 1.965)),
    # GB200 NVL72 and GB300 NVL72: 18 hosts of four GPUs, and NVLink between all 72.
    Chip("gb200", "gpu", ("GB200",), 2500e12, 197_897_748_480, 7_928_064_000_000, fp8_flops=5000e12,
         link=900e9, network=50e9, per_host=4, per_domain=72,
         target=GpuTarget("NVIDIA GB200", (10, 0), 152, 135_528_448, 2.062)),
    Chip("gb300", "gpu", ("GB300",), 2500e12, 297_021_079_552, 7_928_064_000_000, fp8_flops=5000e12,
         link=900e9, network=100e9, per_host=4, per_domain=72,
         target=GpuTarget("NVIDIA GB300", (10, 3), 152, 135_528_448, 2.07)),
)  # fmt: skip

CHIPS = {chip.name: chip for chip in _CHIPS if chip.link}
"""Chips with known links by name. Runs on them can be planned."""

_VARIANTS = {
    "H200 NVL": 835e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "GH200": 989e12, "H800": 989e12,
    "A100": 312e12, "L40S": 362e12,
    # As in KempnerForge; with sums in float32 these three reach about half.
    "RTX 4090": 330e12, "RTX 3090": 142e12, "A10G": 125e12,
    "TPU v4 lite": 138e12,
}  # fmt: skip
"""Peak of dense bf16 products of devices of which nothing else is known, in FLOP/s."""

_BY_KIND = {kind: chip for chip in _CHIPS for kind in chip.kinds} | {
    kind: Chip(kind, "tpu" if kind.startswith("TPU") else "gpu", (kind,), peak, 0)
    for kind, peak in _VARIANTS.items()
}


def chip_by_kind(device_kind: str) -> Chip | None:
    """Return the figures of a device, by the longest known name in its kind; None if unknown.

    Figures that are not published are 0.
    """
    names = [name for name in _BY_KIND if name in device_kind]
    return _BY_KIND[max(names, key=len)] if names else None


def known_memory(device_kind: str) -> int | None:
    """Return the memory that a program may use on a device, in bytes; None if unknown.

    GPUs of the same name have memories of several sizes, so that the whole kind counts.
    """
    chip = chip_by_kind(device_kind)
    if chip is None or not chip.capacity:
        return None
    names = chip.kinds if chip.target is None else (chip.target.name,)
    return chip.memory if device_kind in names else None
