"""The device mesh: which axes there are, and how large.

Axes, outermost first, so that the axes that talk most are neighbours on the interconnect:

    pp            pipeline stages
    dp_replicate  data parallel, parameters replicated (HSDP's outer axis)
    dp_shard      data parallel, parameters sharded (FSDP)
    cp            context parallel
    ep            expert parallel: experts are spread, other parameters sharded, as the batch is
    tp            tensor parallel
"""

import jax
from jax.sharding import AxisType, Mesh

from jaxforge.config.job import JobConfig
from jaxforge.config.rules import data_parallel, mesh_shape
from jaxforge.errors import UserError

STAGES = "pp"
"""The axis of pipeline stages."""


def make_mesh(config: JobConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The mesh that `[distributed]` asks for, over all devices of all processes.

    Args:
        config: a config that `rules.check` has passed.
        devices: the devices to use; all by default.

    Raises:
        UserError: the axes do not fit the network of the TPUs.
    """
    devices = jax.devices() if devices is None else devices
    shape = mesh_shape(config, len(devices))
    try:
        return jax.make_mesh(
            tuple(shape.values()),
            tuple(shape),
            axis_types=(AxisType.Auto,) * len(shape),
            devices=devices,
        )
    except NotImplementedError as error:  # TPU: an axis must be made of whole sides of the torus
        sizes = ", ".join(f"{axis} = {size}" for axis, size in shape.items() if size > 1)
        raise UserError(
            f"[distributed] {sizes} does not fit the network of these TPUs: {error}; choose axes "
            "that are products of its sides"
        ) from error


def data_parallel_size(mesh: Mesh) -> int:
    """Number of groups of devices that see different sequences."""
    return data_parallel(mesh.shape)
