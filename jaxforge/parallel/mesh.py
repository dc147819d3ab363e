"""The device mesh: which axes there are, how large, and which device is where.

Axes, outermost first, so that the axes that talk most are neighbours on the interconnect:

    pp            pipeline stages
    dp_replicate  data parallel, parameters replicated (HSDP's outer axis)
    dp_shard      data parallel, parameters sharded (FSDP)
    cp            context parallel
    ep            expert parallel: experts are spread, other parameters sharded, as the batch is
    tp            tensor parallel

The network between TPU slices, and between nodes of GPUs, is slower than that within. Several
slices are laid out along the outer axes; GPUs in the order of their nodes, which comes to the same.
"""

import collections
import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxforge.config.axes import AXES, data_parallel, token_parallel, with_equal_shards
from jaxforge.config.job import JobConfig
from jaxforge.config.problems import describe_change
from jaxforge.config.rules import mesh_shape
from jaxforge.errors import UserError

log = logging.getLogger(__name__)

STAGES = "pp"
"""The axis of pipeline stages."""

_OUTER = (STAGES, "dp_replicate", "dp_shard")
"""Axes that may go over slices, the first of them preferred. The others talk in every layer."""


def make_mesh(config: JobConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh that `[distributed]` asks for, over all devices of all processes.

    Of a dp_shard that does not divide `model.dim`, a factor moves to dp_replicate
    (`axes.with_equal_shards`); the log reports this, and axes that cross a slow network.

    Args:
        config: a config that `rules.check` has passed.
        devices: the devices to use; all by default.

    Raises:
        UserError: the axes do not fit the network of the TPUs.
    """
    devices = list(jax.devices() if devices is None else devices)
    asked = mesh_shape(config, len(devices))
    shape = with_equal_shards(config, asked)
    if shape != asked:
        log.warning("%s", _copies(config.model.dim, asked, shape))
    kinds = (AxisType.Auto,) * len(shape)
    return Mesh(arrange(shape, devices), tuple(shape), axis_types=kinds)


def abstract_mesh(config: JobConfig, n_devices: int) -> AbstractMesh:
    """Return a mesh without devices, for shapes and shardings on hypothetical hardware.

    Args:
        config: a config that `rules.check` has passed.
        n_devices: of the whole job.
    """
    shape = with_equal_shards(config, mesh_shape(config, n_devices))
    kinds = (AxisType.Auto,) * len(shape)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)


def describe_mesh(shape: Mapping[str, int]) -> str:
    """A mesh for a reader: `dp_shard 4 x tp 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "one device"


def data_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Number of groups of devices that see different sequences."""
    return data_parallel(mesh.shape)


def token_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Number of groups of devices that see different tokens, and have gradients of their own."""
    return token_parallel(mesh.shape)


def arrange(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the arrangement of devices in a mesh.

    Args:
        shape: size of each axis, in the order of `AXES`.
        devices: as many as the sizes multiply to.

    Raises:
        UserError: the axes do not fit the network of the TPUs.
    """
    if devices[0].platform == "tpu":
        return _on_tpus(shape, devices)
    # Not jax.make_mesh, which refuses several nodes: for it they are slices.
    arranged = mesh_utils.create_device_mesh(tuple(shape.values()), devices)
    if devices[0].platform == "gpu":
        _tell_what_leaves_nodes(arranged)
    return arranged


def _on_tpus(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    # Compilers' descriptions of a single slice have no number for it.
    sizes = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(set(sizes.values())) > 1:
        each = ", ".join(str(size) for size in sizes.values())
        raise UserError(
            f"the slices of this job have {each} devices: a mesh needs as many of each; start it "
            "on slices of one size"
        )
    outer = _over_slices(shape, len(sizes), per_slice=len(devices) // len(sizes))
    inner = {axis: size // outer[axis] for axis, size in shape.items()}
    try:
        return _of_slices(inner, outer, devices)
    except NotImplementedError as error:
        listed = ", ".join(f"{axis} = {size}" for axis, size in inner.items() if size > 1)
        where = "within a slice, " if len(sizes) > 1 else ""
        raise UserError(
            f"[distributed] {where}{listed} does not fit the network of these TPUs: {error}; "
            "choose axes that are products of its sides"
        ) from error


def _of_slices(
    inner: Mapping[str, int], outer: Mapping[str, int], devices: Sequence[jax.Device]
) -> np.ndarray:
    """Axes are whole sides of the torus if they can be, else parts of them.

    Raises:
        NotImplementedError: not even that.
    """
    within, over = tuple(inner.values()), tuple(outer.values())

    def arranged(split: bool) -> np.ndarray:
        if math.prod(over) == 1:
            return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=split)
        return mesh_utils.create_hybrid_device_mesh(
            within, over, devices, allow_split_physical_axes=split
        )

    try:
        return arranged(split=False)
    except NotImplementedError:
        return arranged(split=True)


def _over_slices(shape: Mapping[str, int], slices: int, per_slice: int) -> dict[str, int]:
    """Over how many slices each axis goes; their product is the number of slices."""
    left, outer = slices, dict.fromkeys(shape, 1)
    for axis in _OUTER:
        outer[axis] = math.gcd(left, shape[axis])
        left //= outer[axis]
    if left > 1:
        within = {axis: shape[axis] for axis in AXES if axis not in _OUTER and shape[axis] > 1}
        product = " * ".join(f"distributed.{axis} = {size}" for axis, size in within.items())
        fix = f"lower {' or '.join(f'distributed.{axis}' for axis in within)}"
        if len(within) == 1:
            ((axis, size),) = within.items()
            key = f"distributed.{axis}"
            change = {key: math.gcd(per_slice, size), "distributed.dp_shard": -1}
            fix = f"change {describe_change(change)}"
        raise UserError(
            f"{product} must divide the {per_slice} devices of each of the {slices} slices: what "
            f"they exchange in every layer is too much for the network in between: {fix}"
        )
    if outer["dp_shard"] > 1:
        log.warning(
            "distributed.dp_shard = %d goes over %d slices: weights are gathered through the "
            "network in between. Where a slice has room for the state, set dp_replicate = %d, and "
            "only gradients go there",
            shape["dp_shard"], outer["dp_shard"], shape["dp_replicate"] * outer["dp_shard"],
        )  # fmt: skip
    return outer


def _tell_what_leaves_nodes(arranged: np.ndarray) -> None:
    """Warns of axes that talk in every layer and do so between GPUs that no NVLink connects."""
    node = np.vectorize(lambda device: getattr(device, "slice_index", device.process_index))
    node_of, per_node = node(arranged), max(collections.Counter(node(arranged).flat).values())
    for axis in ("tp", "ep"):
        lines = np.moveaxis(node_of, AXES.index(axis), -1)
        if (lines != lines[..., :1]).any():
            size = lines.shape[-1]
            log.warning(
                "distributed.%s = %d goes over several nodes of %d GPUs, and talks in every layer; "
                "%d would keep that within a node",
                axis, size, per_node, math.gcd(size, per_node),
            )  # fmt: skip


def _copies(dim: int, asked: Mapping[str, int], shape: Mapping[str, int]) -> str:
    """Describe the cost of a dp_shard that does not divide, and sizes that would."""
    copies, width = shape["dp_replicate"] // asked["dp_replicate"], dim // asked["ep"]
    whole = [size for size in range(1, width + 1) if width % size == 0]
    better = {
        max(size for size in whole if size <= asked["dp_shard"]),
        min((size for size in whole if size >= asked["dp_shard"]), default=width),
    }
    how = f"split over {shape['dp_shard']} devices and copied {copies} times"
    if shape["dp_shard"] == 1:
        how = f"not split by it: there are {copies} copies"
    per_ep = f" / ep = {width}" if asked["ep"] > 1 else ""
    return (
        f"distributed.dp_shard = {asked['dp_shard']} does not divide model.dim = {dim}{per_ep}: "
        f"parameters and optimizer state are {how}, {copies} times the memory; dp_shard = "
        f"{' or '.join(map(str, sorted(better)))} would split them all the way"
    )
