"""Groups of devices that train apart (`train.outer_interval`).

The devices of a position on `dp_replicate` are a group, which trains as a job of its own. For its
step, the mesh has an axis more:

    mesh of the run      dp_replicate, pp, dp_shard, cp, ep, tp
    mesh with groups     groups, dp_replicate, pp, dp_shard, cp, ep, tp

No sharding rule names `groups`, and the step is mapped over it by `shard_map`, so no collective of
the step can cross it: a collective would have to name the axis. `dp_replicate` keeps the copies of
a dp_shard that does not divide (`axes.with_equal_shards`), usually one.

The devices are the same in the same order, so an array of one mesh becomes one of the other by
another label of its sharding (`relabeled`). The state is on the mesh with groups, and the global
weights that a run reads from it (`TrainState.variables`) are on the mesh of the run: programs with
cuDNN's attention refuse arguments of two meshes.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from jaxforge.config.job import JobConfig

GROUPS = "groups"
"""The mesh axis of groups, which splits the first dimension of arrays with a value per group."""

REPLICAS = "dp_replicate"
"""The mesh axis of a run whose positions are the groups."""


def number_of_groups(config: JobConfig) -> int:
    """Return the number of groups that train apart; 0 if all devices train together."""
    return config.distributed.dp_replicate if config.train.trains_apart else 0


def group_view(
    config: JobConfig, mesh: Mesh | AbstractMesh
) -> tuple[JobConfig, Mesh | AbstractMesh]:
    """Return the config of a group as a job of its own, and the mesh with an axis of groups.

    Without groups, both are returned as they are.
    """
    n = number_of_groups(config)
    if not n:
        return config, mesh
    alone = {"outer_interval": 0, "ema_decay": 0.0}
    values: dict[str, object] = {
        "train": config.train.of_groups(1, n).with_values(alone),
        "distributed.dp_replicate": 1,
    }
    return config.with_values(values), with_groups(mesh, n)


def with_groups(mesh: Mesh | AbstractMesh, n: int) -> Mesh | AbstractMesh:
    """Return the mesh of the same devices with an axis of `n` groups."""
    at = mesh.axis_names.index(REPLICAS)
    sizes = list(mesh.shape.values())
    sizes[at : at + 1] = [n, sizes[at] // n]
    names = (*mesh.axis_names[:at], GROUPS, *mesh.axis_names[at:])
    kinds = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(tuple(sizes), names, axis_types=kinds)
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=kinds)


def without_groups(mesh: Mesh) -> Mesh:
    """Undo `with_groups`."""
    at = mesh.axis_names.index(GROUPS)
    sizes = list(mesh.devices.shape)
    sizes[at : at + 2] = [sizes[at] * sizes[at + 1]]
    names = (*mesh.axis_names[:at], *mesh.axis_names[at + 1 :])
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=(AxisType.Auto,) * len(names))


def relabeled(tree: PyTree, relabel: Callable[[NamedSharding], NamedSharding]) -> PyTree:
    """Return arrays, or abstract values, with other labels of the same layout; nothing is copied.

    Args:
        tree: arrays, or `jax.ShapeDtypeStruct`, with a `NamedSharding`; others are unchanged.
        relabel: returns an equivalent sharding.
    """

    def of_leaf(leaf: Any) -> Any:  # noqa: ANN401  # an array, or its description
        before = getattr(leaf, "sharding", None)
        if not isinstance(before, NamedSharding) or isinstance(leaf, jax.core.Tracer):
            return leaf
        after = relabel(before)
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf.update(sharding=after)
        shards = [shard.data for shard in leaf.addressable_shards]
        return jax.make_array_from_single_device_arrays(leaf.shape, after, shards)

    return jax.tree.map(of_leaf, tree)


def on_mesh_of_run(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array that no group has of its own on the mesh without groups."""
    if GROUPS not in sharding.mesh.shape:
        return sharding
    assert isinstance(sharding.mesh, Mesh)
    return NamedSharding(
        without_groups(sharding.mesh), sharding.spec, memory_kind=sharding.memory_kind
    )


def on_mesh_with_groups(sharding: NamedSharding, mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Return a sharding of the mesh of a run on the mesh with groups."""
    if GROUPS in sharding.mesh.shape:
        return sharding

    def split(axes: Any) -> Any:  # noqa: ANN401  # the axes of a dimension
        names = (axes,) if isinstance(axes, str) else axes or ()
        pairs = ((GROUPS, name) if name == REPLICAS else (name,) for name in names)
        return tuple(name for pair in pairs for name in pair) or None

    return NamedSharding(mesh, P(*map(split, sharding.spec)), memory_kind=sharding.memory_kind)


def per_group(sharding: NamedSharding) -> NamedSharding:
    """Return the sharding of an array with a leading dimension over groups.

    Args:
        sharding: sharding of the array of one group, on a mesh with groups.
    """
    return NamedSharding(sharding.mesh, P(GROUPS, *sharding.spec))


def map_over_groups(function: Callable[..., PyTree], mesh: Mesh | AbstractMesh) -> Any:  # noqa: ANN401
    """Return a function that every group runs with its own values.

    Args:
        function: (values of the group, batch of the group, values that groups share) -> results.
        mesh: the mesh with groups.

    Returns:
        A function of values [groups, ...], a batch whose rows are those of all groups one after
        another, and the shared values. Its results have a leading dimension over the groups.
    """

    def in_group(values: PyTree, batch: PyTree, shared: PyTree) -> PyTree:
        own = jax.tree.map(lambda x: x[0], values)
        return jax.tree.map(lambda x: x[None], function(own, batch, shared))

    def mapped(values: PyTree, batch: Mapping[str, jax.Array], shared: PyTree) -> PyTree:
        rows = {name: P(None, GROUPS) if x.ndim else P() for name, x in batch.items()}
        run = jax.shard_map(
            in_group,
            in_specs=(P(GROUPS), rows, P()),
            out_specs=P(GROUPS),
            axis_names=_manual_axes(mesh),
            check_vma=False,  # the step checks its own axes
        )
        return run(values, batch, shared)

    return mapped


class OnMesh:
    """A jitted function that is traced and called on a mesh, whatever the mesh around it.

    Args:
        function: the jitted function.
        mesh: the mesh.
    """

    def __init__(self, function: jax.stages.Wrapped, mesh: Mesh | AbstractMesh) -> None:
        self._function, self._mesh = function, mesh

    def __call__(self, *arguments: Any) -> Any:  # noqa: ANN401
        """Call the function."""
        with self._context():
            return self._function(*self._on_mesh(arguments))

    def trace(self, *arguments: Any) -> jax.stages.Traced:  # noqa: ANN401
        """Trace the function."""
        with self._context():
            return self._function.trace(*self._on_mesh(arguments))

    def lower(self, *arguments: Any) -> jax.stages.Lowered:  # noqa: ANN401
        """Trace and lower the function."""
        with self._context():
            return self._function.lower(*self._on_mesh(arguments))

    def _on_mesh(self, arguments: PyTree) -> PyTree:
        return relabeled(arguments, lambda sharding: on_mesh_with_groups(sharding, self._mesh))

    def _context(self) -> AbstractContextManager[Any]:
        if isinstance(self._mesh, AbstractMesh):
            return jax.sharding.use_abstract_mesh(self._mesh)
        return jax.set_mesh(self._mesh)


def _manual_axes(mesh: Mesh | AbstractMesh) -> set[str]:
    """Return the manual axes of a step in groups: all of them if a group is one device."""
    # Otherwise the step makes axes manual itself (`sharding.manual_over`), and expects the others
    # to be left to the partitioner.
    others = {name: size for name, size in mesh.shape.items() if name != GROUPS}
    return set(mesh.axis_names) if max(others.values()) == 1 else {GROUPS}


_SUMMED = {
    "valid_tokens", "counts", "skipped", "total", "nonfinite", "spikes", "good", "dataset_nll",
    "dataset_tokens", "num_zeros_in_grad", "clipped_heads",
}  # fmt: skip
_LARGEST = {"step", "consecutive", "lr", "max_logit"}


def read_groups(values: PyTree) -> PyTree:
    """Read values of all groups [groups, ...] from the devices, and merge them by their names.

    Counts are added up, and the largest of positions is taken. Losses and norms are averaged; a
    mean over groups with a NaN is a NaN. `applied` is true if all groups applied their update.

    All processes must call this for the same values, because it gathers those of other processes.
    """
    return jax.tree_util.tree_map_with_path(_merged, jax.device_get(_gathered(values)))


def read_groups_here(values: PyTree) -> PyTree:
    """Do `read_groups` for the groups that have devices in this process; it needs no other."""
    own = jax.tree.map(_of_this_process, values)
    return jax.tree_util.tree_map_with_path(_merged, own)


def _of_this_process(values: jax.Array) -> np.ndarray:
    by_group = {str(shard.index): shard.data for shard in values.addressable_shards}
    return np.concatenate([np.asarray(data) for data in by_group.values()])


def _merged(path: jax.tree_util.KeyPath, values: np.ndarray) -> np.ndarray:
    names = {str(getattr(key, "key", getattr(key, "name", ""))) for key in path}
    if names & _SUMMED:
        return values.sum(axis=0)
    if names & _LARGEST:
        return values.max(axis=0)
    merge = np.all if values.dtype == bool else np.mean
    return np.asarray(merge(values, axis=0))


def _gathered(values: PyTree) -> PyTree:
    """Return values that every process can read."""
    leaves = jax.tree.leaves(values)
    if all(leaf.is_fully_addressable for leaf in leaves):
        return values
    everywhere = NamedSharding(leaves[0].sharding.mesh, P())
    gather: Any = jax.jit(_identity, out_shardings=everywhere)
    return gather(values)


def _identity(values: PyTree) -> PyTree:
    return values
