"""Machines that are not here: XLA compiles for them all the same, without a device of theirs.

The compilers come with JAX's plugins: `pip install ".[cuda]"` brings that for GPUs, `".[tpu]"` that
for TPUs. Set `JAX_PLATFORMS=cpu` where there is no such device.
"""

import importlib.util
from collections.abc import Sequence

import jax
from jax.experimental import topologies

from jaxforge.errors import UserError
from jaxforge.parallel import hardware


def _target_config(chip: hardware.Chip) -> str:
    """Return XLA's `GpuTargetConfigProto` as text; what all of these GPUs share stands here."""
    target = chip.target
    assert target is not None, f"{chip.name} is no GPU"
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
    """The devices of a cluster of GPUs, to make a mesh of; nothing can run on them.

    Args:
        kind: a GPU's key in `hardware.CHIPS`.
        nodes: machines, each with NVLink between its GPUs.
        per_node: GPUs of each.

    Raises:
        UserError: the compiler is not installed.
    """
    if not has_gpu_compiler():
        raise UserError(
            "XLA's compiler for GPUs is not installed: pip install 'jaxforge[plan-gpu]'"
        )
    return topologies.get_topology_desc(
        platform="cuda",
        target_config=_target_config(hardware.CHIPS[kind]),
        topology=f"{nodes}x1x{per_node}",  # NVLink ends where a node does
    ).devices


def has_tpu_compiler() -> bool:
    """Return whether XLA's compiler for TPUs is installed."""
    return _is_installed("libtpu")


def tpus(topology: str, slices: int = 1) -> Sequence[jax.Device]:
    """The devices of TPU slices, to make a mesh of; nothing can run on them.

    Set `TPU_SKIP_MDS_QUERY=1` where there is no metadata server of Google Cloud to ask.

    Args:
        topology: of each slice, such as "v5e:4x4", "v5p:2x2x4" or "v6e:16x16".
        slices: how many there are, with a slower network in between.

    Raises:
        UserError: the compiler is not installed, or knows no such slice.
    """
    if not has_tpu_compiler():
        raise UserError(
            "XLA's compiler for TPUs is not installed: pip install 'jaxforge[plan-tpu]'"
        )
    try:
        return topologies.get_topology_desc(
            platform="tpu", topology_name=topology, num_slices=slices
        ).devices
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        near = _power_of_two_sides(topology)
        hint = f'; did you mean "{near}"?' if near != topology else ""
        raise UserError(f'there is no TPU slice "{topology}": {error}{hint}') from error


def _power_of_two_sides(topology: str) -> str:
    """The next larger slice whose sides are powers of two, which there are of all kinds."""
    kind, _, lengths = topology.partition(":")
    powers = (1 << (int(length) - 1).bit_length() for length in lengths.split("x"))
    return f"{kind}:{'x'.join(map(str, powers))}"


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it would be in
        return False
