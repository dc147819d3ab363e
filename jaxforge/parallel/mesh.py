"""The device mesh: its axes, their sizes, and the arrangement of devices.

Axes, from the outermost to the innermost. Devices along inner axes, which communicate most, are
neighbours on the interconnect:

    pp            pipeline stages
    dp_replicate  data parallel, parameters replicated (HSDP's outer axis)
    dp_shard      data parallel, parameters sharded (FSDP)
    cp            context parallel
    ep            expert parallel: experts are split; other parameters and the batch are sharded
    tp            tensor parallel

The network between TPU slices, and between nodes of GPUs, is slower than that within. TPU slices
are arranged along the outer axes. GPUs are arranged in the order of their nodes, with the same
effect.
"""

import collections
import itertools
import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from jaxforge.config.axes import AXES, data_parallel, token_parallel, with_equal_shards
from jaxforge.config.job import JobConfig
from jaxforge.config.rules import mesh_shape
from jaxforge.errors import UserError
from jaxforge.parallel.hardware import chip_by_kind

log = logging.getLogger(__name__)

STAGES = "pp"
"""The axis of pipeline stages."""

_OUTER = (STAGES, "dp_replicate", "dp_shard")
"""Axes that may extend over slices, in order of preference. Others communicate in every layer."""


def make_mesh(config: JobConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """Return the mesh of `[distributed]` over all devices of all processes.

    If dp_shard does not divide `model.dim`, a factor of it moves to dp_replicate
    (`axes.with_equal_shards`), with a warning. Axes that cross a slow network are warnings, too.

    Args:
        config: config that has passed `rules.check`.
        devices: devices of the mesh; None: all.

    Raises:
        UserError: the axes do not fit the network of the TPUs.
    """
    devices = list(jax.devices() if devices is None else devices)
    asked = mesh_shape(config, len(devices))
    shape = _in_order(config, with_equal_shards(config, asked))
    if shape != asked:
        log.warning("%s", _describe_copies(config.model.dim, asked, shape))
    kinds = (AxisType.Auto,) * len(shape)
    return Mesh(arrange(shape, devices), tuple(shape), axis_types=kinds)


def abstract_mesh(config: JobConfig, n_devices: int) -> AbstractMesh:
    """Return a mesh without devices, for shapes and shardings on hypothetical hardware.

    Args:
        config: config that has passed `rules.check`.
        n_devices: number of devices of the whole job.
    """
    shape = _in_order(config, with_equal_shards(config, mesh_shape(config, n_devices)))
    kinds = (AxisType.Auto,) * len(shape)
    return AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=kinds)


def _in_order(config: JobConfig, shape: Mapping[str, int]) -> dict[str, int]:
    """Return the axes from the outermost on; groups that train apart come before their stages."""
    if not config.train.trains_apart:
        return dict(shape)
    return {"dp_replicate": shape["dp_replicate"], **shape}


def describe_mesh(shape: Mapping[str, int]) -> str:
    """Format the axes of a mesh that have several devices, such as `dp_shard 4 x tp 2`."""
    return " x ".join(f"{axis} {size}" for axis, size in shape.items() if size > 1) or "one device"


def data_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of device groups with different sequences."""
    return data_parallel(mesh.shape)


def token_parallel_size(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of device groups with different tokens, and so with their own gradients."""
    return token_parallel(mesh.shape)


def arrange(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the arrangement of devices in a mesh.

    Args:
        shape: size of each axis, in the order of `AXES`.
        devices: devices, as many as the product of the sizes.

    Raises:
        UserError: the axes do not fit the network of the TPUs.
    """
    if devices[0].platform == "tpu":
        return _on_tpus(shape, devices)
    # Not jax.make_mesh: it takes nodes for slices, and raises for several of them.
    arranged = mesh_utils.create_device_mesh(tuple(shape.values()), devices)
    if devices[0].platform == "gpu":
        _warn_of_axes_across_nodes(arranged)
    return arranged


def _on_tpus(shape: Mapping[str, int], devices: Sequence[jax.Device]) -> np.ndarray:
    # Devices of a compiler's topology of a single slice have no `slice_index`.
    sizes = collections.Counter(getattr(device, "slice_index", 0) for device in devices)
    if len(set(sizes.values())) > 1:
        each = ", ".join(str(size) for size in sizes.values())
        raise UserError(
            f"the slices of this job differ in size: they have {each} devices. Start the job on "
            "slices of the same size"
        )
    outer = _over_slices(shape, len(sizes), per_slice=len(devices) // len(sizes))
    inner = {axis: size // outer[axis] for axis, size in shape.items()}
    try:
        return _in_rings(_arrange_slices(inner, outer, devices))
    except NotImplementedError as error:
        listed = ", ".join(f"{axis} = {size}" for axis, size in inner.items() if size > 1)
        where = "within a slice, " if len(sizes) > 1 else ""
        raise UserError(
            f"[distributed] {where}{listed} does not fit the network of these TPUs: {error}. "
            "Choose axes that are products of the sides of the network"
        ) from error


def _in_rings(arranged: np.ndarray) -> np.ndarray:
    """Order devices that an axis spreads over a rectangle of chips as a ring of neighbours.

    Partial sums of gradients go around such a ring in both directions at once. Row by row, the
    message from the end of a row to the next row would go back along the row, on the links of the
    other direction. Sides whose ends are connected need no other order.
    """
    chip = chip_by_kind(arranged.flat[0].device_kind)
    for axis, size in enumerate(arranged.shape):
        line = np.moveaxis(arranged, axis, 0).reshape(size, -1)[:, 0]
        lengths = [len({device.coords[i] for device in line}) for i in range(3)]
        # An even length first: without one, there is no ring.
        plane = sorted((i for i in range(3) if lengths[i] > 1), key=lambda i: lengths[i] % 2)
        if chip is None or len(plane) != 2 or lengths[plane[0]] % 2:
            continue
        index_of = {tuple(device.coords[i] for i in plane): n for n, device in enumerate(line)}
        is_rectangle = math.prod(lengths) == len(index_of) == size
        if is_rectangle and not any(chip.is_ring(lengths[i]) for i in plane):
            order = [index_of[cell] for cell in _ring(sorted(index_of))]
            arranged = np.take(arranged, order, axis)
    return arranged


def _ring(cells: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the sorted cells of a rectangle with an even number of rows as a ring of neighbours.

    The ring goes through the rows, to and fro, without the first column, and back along it.
    """
    first = cells[0][1]
    rows = itertools.groupby(cells, key=lambda cell: cell[0])
    ring: list[tuple[int, int]] = []
    for n, (_, row) in enumerate(rows):
        cells_of_row = [cell for cell in row if cell[1] != first]
        ring += reversed(cells_of_row) if n % 2 else cells_of_row
    return [*ring, *(cell for cell in reversed(cells) if cell[1] == first)]


def _arrange_slices(
    inner: Mapping[str, int], outer: Mapping[str, int], devices: Sequence[jax.Device]
) -> np.ndarray:
    """Arrange axes along whole sides of the torus if possible, else along parts of sides.

    Args:
        inner: size of each axis within a slice.
        outer: size of each axis over slices.
        devices: devices of all slices.

    Raises:
        NotImplementedError: the axes do not fit the torus.
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
    # Whole sides of the torus are faster, so an axis is a part of a side only if nothing else fits.
    except NotImplementedError:
        return arranged(split=True)


def _over_slices(shape: Mapping[str, int], slices: int, per_slice: int) -> dict[str, int]:
    """Return the number of slices that each axis extends over, whose product is `slices`."""
    remaining, outer = slices, dict.fromkeys(shape, 1)
    # Greedy, from the axis that communicates least: stages, then replicas, then shards. Groups that
    # train apart come before stages.
    for axis in (name for name in shape if name in _OUTER):
        outer[axis] = math.gcd(remaining, shape[axis])
        remaining //= outer[axis]
    if remaining > 1:
        within = {axis: shape[axis] for axis in AXES if axis not in _OUTER and shape[axis] > 1}
        product = " * ".join(f"distributed.{axis} = {size}" for axis, size in within.items())
        raise UserError(
            f"{product} must divide the {per_slice} devices of each of the {slices} slices: these "
            "axes communicate in every layer, which is too slow for the network between slices. "
            f"Lower {' or '.join(f'distributed.{axis}' for axis in within)}"
        )
    if outer["dp_shard"] > 1:
        log.warning(
            "distributed.dp_shard = %d goes over %d slices: weights are gathered through the "
            "network between them. If the state fits into a slice, set dp_replicate = %d, so that "
            "only gradients use that network",
            shape["dp_shard"], outer["dp_shard"], shape["dp_replicate"] * outer["dp_shard"],
        )  # fmt: skip
    return outer


def nvlink_domain(device: jax.Device) -> int:
    """Return the number of a GPU's NVLink domain: a node, or a rack of GB200 NVL72."""
    # A GPU to compile for has its domain as its first coordinate, and always slice 0.
    client = getattr(device, "client", None)
    if client is not None and client.runtime_type == "compile_only_runtime":
        return device.coords[0]
    return device.slice_index if hasattr(device, "slice_index") else device.process_index


def _warn_of_axes_across_nodes(arranged: np.ndarray) -> None:
    """Warn of axes that communicate in every layer between GPUs without NVLink."""
    node_of = np.vectorize(nvlink_domain)(arranged)
    per_node = max(collections.Counter(node_of.flat).values())
    for axis in ("tp", "ep"):
        lines = np.moveaxis(node_of, AXES.index(axis), -1)
        if (lines != lines[..., :1]).any():
            size = lines.shape[-1]
            log.warning(
                "distributed.%s = %d goes over several nodes of %d GPUs, and communicates in every "
                "layer; %d would stay within a node",
                axis, size, per_node, math.gcd(size, per_node),
            )  # fmt: skip


def _describe_copies(dim: int, asked: Mapping[str, int], shape: Mapping[str, int]) -> str:
    """Describe the cost of a dp_shard that does not divide."""
    copies, width = shape["dp_replicate"] // asked["dp_replicate"], dim // asked["ep"]
    per_ep = f" / ep = {width}" if asked["ep"] > 1 else ""
    return (
        f"distributed.dp_shard = {asked['dp_shard']} does not divide model.dim = {dim}{per_ep}: "
        f"parameters and optimizer state are split over {shape['dp_shard']} devices and copied "
        f"{copies} times, {copies} times the memory. A divisor splits them all the way"
    )
