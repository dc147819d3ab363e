"""Target hardware that XLA compiles for ahead of time, without devices.

The compilers come with JAX's plugins: `pip install ".[cuda]"` installs the one for GPUs, and
`".[tpu]"` the one for TPUs. Set `JAX_PLATFORMS=cpu` on machines without such devices.
"""

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from jaxforge.errors import UserError
from jaxforge.parallel import hardware


def target_config(chip: hardware.Chip) -> str:
    """Return XLA's `GpuTargetConfigProto` as text. Literal values are common to all these GPUs."""
    target = chip.target
    assert target is not None, f"{chip.name} is not a GPU"
    major, minor = target.capability
    return f"""
            platform_name: "CUDA"
            device_description_str: "{target.name}"
            dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
            gpu_device_info {{
              cuda_compute_capability {{ major: {major} minor: {minor} }}
              core_count: {target.cores}
              fpus_per_core: 128
              clock_rate_ghz: {target.clock}
              device_memory_size: {chip.capacity}
              memory_bandwidth: {chip.bandwidth}
              l2_cache_size: {target.l2_cache}
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


def has_gpu_compiler() -> bool:
    """Return whether XLA's compiler for NVIDIA GPUs is installed."""
    return _is_installed("jax_plugins.xla_cuda13")


def gpus(kind: str, nodes: int = 1, per_node: int = 8) -> Sequence[jax.Device]:
    """Return the devices of a cluster of GPUs for a mesh to compile for; they cannot run programs.

    Args:
        kind: key of the GPU in `hardware.CHIPS`.
        nodes: number of NVLink domains: machines, or racks of GB200 NVL72 and GB300 NVL72.
        per_node: number of GPUs of each domain.

    Raises:
        UserError: the compiler is not installed.
    """
    if not has_gpu_compiler():
        raise UserError(
            "XLA's compiler for GPUs is not installed. Run: pip install 'jaxforge[plan-gpu]'"
        )
    chip = hardware.CHIPS[kind]
    per_host = min(chip.per_host, per_node)
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=target_config(chip),
        # domains x hosts of a domain x GPUs of a host
        topology=f"{nodes}x{per_node // per_host}x{per_host}",
    ).devices


def has_tpu_compiler() -> bool:
    """Return whether XLA's compiler for TPUs is installed."""
    return _is_installed("libtpu")


def tpus(topology: str, slices: int = 1) -> Sequence[jax.Device]:
    """Return the devices of TPU slices for a mesh to compile for; they cannot run programs.

    Set `TPU_SKIP_MDS_QUERY=1` if there is no metadata server of Google Cloud.

    Args:
        topology: topology of each slice, such as "v5e:4x4", "v5p:2x2x4" or "tpu7x:4x4x4".
        slices: number of slices, with a slower network between them.

    Raises:
        UserError: the compiler is not installed, or does not know the topology.
    """
    if not has_tpu_compiler():
        raise UserError(
            "XLA's compiler for TPUs is not installed. Run: pip install 'jaxforge[plan-tpu]'"
        )
    # A host has 2 x 2 chips, in a smaller slice all of them.
    lengths = [int(text) for text in topology.partition(":")[2].split("x") if text.isdecimal()]
    bounds = tuple(min(pair) for pair in zip((2, 2, 1), [*lengths, 1, 1], strict=False))
    try:
        return topologies.get_topology_desc(
            platform="tpu",
            topology_name=topology,
            num_slices=slices,
            chips_per_host_bounds=bounds,
        ).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        raise UserError(
            f'there is no TPU slice "{topology}": {error}. All TPUs have slices whose sides are '
            "powers of two"
        ) from error


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing, too
        return False
