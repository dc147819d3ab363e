"""Machines that are not here: XLA compiles for them all the same, without a device of theirs.

The compilers come with JAX's plugins: `pip install ".[cuda]"` brings that for GPUs, `".[tpu]"` that
for TPUs. Set `JAX_PLATFORMS=cpu` where there is no such device.
"""

import importlib.util
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.experimental import topologies

from jaxforge.errors import UserError


class Gpu(NamedTuple):
    """What XLA wants to know of a GPU, from its data sheet.

    Attributes:
        name: as the driver says it.
        capability: compute capability.
        cores: streaming multiprocessors.
        memory: bytes.
        bandwidth: of that memory, bytes a second.
        l2_cache: bytes.
        clock: GHz.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    memory: int
    bandwidth: int
    l2_cache: int
    clock: float

    @property
    def target_config(self) -> str:
        """XLA's `GpuTargetConfigProto` as text; what is the same on all of Hopper stands here."""
        major, minor = self.capability
        return f"""
            platform_name: "CUDA"
            device_description_str: "{self.name}"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {self.cores}
              fpus_per_core: 128
              clock_rate_ghz: {self.clock}
              device_memory_size: {self.memory}
              memory_bandwidth: {self.bandwidth}
              l2_cache_size: {self.l2_cache}
              shared_memory_per_block: 49152
              shared_memory_per_block_optin: 232448
              shared_memory_per_core: 233472
              registers_per_block_limit: 65536
              registers_per_core_limit: 65536
              threads_per_warp: 32
              threads_per_block_limit: 1024
              threads_per_core_limit: 2048
              block_dim_limit_x: 2147483647
              block_dim_limit_y: 65535
              block_dim_limit_z: 65535
            }}"""


GPUS = {
    "h100": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 84_942_979_072, 3_352_320_000_000,
                52_428_800, 1.98),
}  # fmt: skip
"""GPUs to compile for, by name."""


_GIB = 1 << 30
TPU_MEMORY = {
    "TPU v4": 32 * _GIB,
    "TPU v5 lite": 16 * _GIB,
    "TPU v5": 95 * _GIB,
    "TPU v5p": 95 * _GIB,
    "TPU v6 lite": 32 * _GIB,
}
"""Bytes of a chip, by the name that its compiler has for it."""

_PREALLOCATED = 0.75
"""The part of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set."""


def memory(device: jax.Device) -> int | None:
    """Bytes that a program may use of a device that is not here; None where nobody knows."""
    for gpu in GPUS.values():
        if gpu.name == device.device_kind:
            return int(_PREALLOCATED * gpu.memory)
    return TPU_MEMORY.get(device.device_kind)


def gpu_compiler_is_here() -> bool:
    """Whether XLA's compiler for NVIDIA GPUs is installed."""
    return _is_installed("jax_plugins.xla_cuda13")


def gpus(kind: str, nodes: int = 1, per_node: int = 8) -> Sequence[jax.Device]:
    """The devices of a cluster of GPUs, to make a mesh of; nothing can run on them.

    Args:
        kind: a key of `GPUS`.
        nodes: machines, each with NVLink between its GPUs.
        per_node: GPUs of each.

    Raises:
        UserError: the compiler is not installed.
    """
    if not gpu_compiler_is_here():
        raise UserError("XLA's compiler for GPUs is not installed: pip install '.[cuda]'")
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=GPUS[kind].target_config,
        topology=f"1x{nodes}x{per_node}",
    ).devices


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
