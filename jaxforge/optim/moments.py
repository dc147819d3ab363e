"""Storage formats of optimizer moments, and their updates.

    storage                 update of a leaf
    floating-point dtype    as a whole; XLA fuses everything into one pass
    8-bit (`eight_bit`)     in place, in a loop over chunks of rows, separately on each device
    host memory             in place, in a loop over layers

Without the loops, float32 copies of all 8-bit moments, or device copies of all offloaded moments,
would exist at once and cost more memory than the storage format saves.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from jaxforge.model.linear import is_matrix
from jaxforge.optim.eight_bit import (
    BLOCK,
    ROOT,
    SIGNED,
    Packed,
    is_packable,
    pack,
    scales_shape,
    unpack,
)
from jaxforge.optim.random_bits import draw_key, random_words_of_rows, uniform
from jaxforge.parallel.sharding import Axes, automatic_axes, partition_spec

CHUNK_ELEMENTS = 2**22
"""Upper limit of the elements of an 8-bit moment that are float32 at a time (16 MiB)."""

MomentRule = Callable[..., tuple[Array, ...]]
"""(scalars, gradient, *moments) -> direction, *moments: elementwise, in float32."""


@dataclasses.dataclass(frozen=True)
class EightBit:
    """Storage of moments of matrices in eight bits, of vectors in float32.

    Attributes:
        axes: logical axes of every parameter.
        seed: seed of the stochastic rounding.
    """

    axes: PyTree
    seed: int


@dataclasses.dataclass(frozen=True)
class OnHost:
    """Storage of moments of matrices in host memory, of vectors on the device.

    Attributes:
        axes: logical axes of every parameter.
        dtype: dtype of all moments.
    """

    axes: PyTree
    dtype: jnp.dtype


MomentStorage = jnp.dtype | EightBit | OnHost
"""Storage format of moments: a dtype on the device, eight bits, or host memory."""

Moment = Array | Packed
Bits = Callable[[Int[Array, ""] | int, int], UInt32[Array, "r c"]]
"""(first row, number of rows) -> random bits of these rows."""


@dataclasses.dataclass(frozen=True)
class ParamInfo:
    """Name and logical axes of a parameter; the axes only for 8-bit moments."""

    name: str
    axes: Axes = ()


def param_infos(params: PyTree, storage: MomentStorage) -> PyTree:
    """Return the `ParamInfo` of every parameter."""
    axes = flatten_dict(storage.axes) if isinstance(storage, EightBit) else {}
    return unflatten_dict(
        {path: ParamInfo(".".join(path), axes.get(path, ())) for path in flatten_dict(params)}
    )


def init_moments(
    params: PyTree, storage: MomentStorage, dtype: jnp.dtype = SIGNED
) -> tuple[PyTree, PyTree | None]:
    """Return moments before the first update, and their scales; None for no scales.

    Args:
        params: the parameters.
        storage: storage format of the moments.
        dtype: dtype of 8-bit values, `SIGNED` or `ROOT`.
    """
    if not isinstance(storage, EightBit | OnHost):
        return jax.tree.map(lambda p: jnp.zeros_like(p, storage), params), None
    axes = flatten_dict(storage.axes)
    values, scales = {}, {}
    for path, p in flatten_dict(params).items():
        if isinstance(storage, OnHost):
            leaf = values[path] = jnp.zeros_like(p, storage.dtype)
            if is_matrix(axes[path]):
                values[path] = jax.device_put(leaf, jax.memory.Space.Host)
            continue
        is_packed = is_packable(p.shape, axes[path])
        values[path] = jnp.zeros_like(p, dtype if is_packed else jnp.float32)
        # A scale of 0 with values of 0: packing the first moments sets both.
        if is_packed:
            scales[path] = jnp.zeros_like(p, jnp.uint8, shape=scales_shape(p.shape))
    return unflatten_dict(values), unflatten_dict(scales) or None


def join_scales(values: PyTree, scales: PyTree | None) -> PyTree:
    """Return moments whose leaves with scales are `Packed`."""
    flat_scales = flatten_dict(scales or {})
    return unflatten_dict(
        {
            path: Packed(leaf, flat_scales[path]) if path in flat_scales else leaf
            for path, leaf in flatten_dict(values).items()
        }
    )


def split_scales(moments: PyTree) -> tuple[PyTree, PyTree | None]:
    """Split moments from `join_scales` into values and scales."""
    flat = flatten_dict(moments)
    packed = {k: leaf for k, leaf in flat.items() if isinstance(leaf, Packed)}
    values = {k: leaf.values if k in packed else leaf for k, leaf in flat.items()}
    return unflatten_dict(values), unflatten_dict({k: p.scales for k, p in packed.items()}) or None


def is_updated_in_place(leaf: Array) -> bool:
    """Return whether an optimizer state array holds 8-bit or host-offloaded moments."""
    return leaf.dtype in (SIGNED, ROOT) or _is_on_host(leaf)


def _is_on_host(leaf: Array | Packed) -> bool:
    return not isinstance(leaf, Packed) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class MomentUpdate:
    """One update of all moments.

    If experts have their own counts (`optim.idle_experts`), `number`, `applied` and the scalars of
    a rule are arrays [layers, experts, 1, ...].

    Attributes:
        storage: storage format of the moments.
        number: number of updates made before this one.
        applied: False keeps moments that are updated in place unchanged, because their old values
            are overwritten here. For other moments the caller selects between old and new.
    """

    storage: MomentStorage
    number: Int[Array, "..."]
    applied: Bool[Array, "..."] | bool = True

    def apply(
        self,
        rule: MomentRule,
        info: ParamInfo,
        g: Array,
        *moments: Moment,
        scalars: tuple[Array, ...] = (),
    ) -> tuple[Any, ...]:
        """Return the direction of a parameter's update, float32, and its new stored moments.

        Args:
            rule: computes direction and moments.
            info: the parameter.
            g: gradient.
            moments: stored moments.
            scalars: further arguments of the rule.
        """
        packed = tuple(m for m in moments if isinstance(m, Packed))
        unpacked = tuple(m for m in moments if not isinstance(m, Packed))
        assert not (packed and unpacked)
        if packed:
            direction, new = self._update_packed(rule, info, g.astype(jnp.float32), packed, scalars)
            return direction, *new
        if _is_on_host(unpacked[0]):
            update = functools.partial(_update_offloaded, rule)
            per_expert = scalars, jnp.asarray(self.applied)
            g = g.astype(jnp.float32)
            direction, offloaded = _loop_over_layers(update, per_expert, g, unpacked)
            return direction, *offloaded
        # Arithmetic in float32, whatever the storage dtype: one rounding per update.
        direction, *updated = rule(scalars, *(a.astype(jnp.float32) for a in (g, *unpacked)))
        return direction, *(m.astype(old.dtype) for m, old in zip(updated, unpacked, strict=True))

    def _update_packed(
        self,
        rule: MomentRule,
        info: ParamInfo,
        g: Array,
        moments: tuple[Packed, ...],
        scalars: tuple[Array, ...],
    ) -> tuple[Array, tuple[Packed, ...]]:
        """Update 8-bit moments on each device separately, in `shard_map` over the whole mesh."""
        # No block spans two devices: `state.train_state` raises an error otherwise. So no device
        # needs the scales or numbers of another.
        assert isinstance(self.storage, EightBit)
        # One key per leaf and update. With counts per expert, their sum grows with each update in
        # which tokens reach any expert.
        number = jnp.sum(self.number) if self.number.ndim else self.number
        key = draw_key(self.storage.seed, f"moments/{info.name}", number)
        whole, spec = g.shape, partition_spec(info.axes)
        mesh = jax.sharding.get_abstract_mesh()

        def local(
            g: Array,
            moments: tuple[Packed, ...],
            key: Array,
            applied: Array,
            scalars: tuple[Array, ...],
        ) -> tuple[Array, tuple[Packed, ...]]:
            # Random bits depend on an element's index in the whole array, not on the mesh.
            begin = [0 if n is None or mesh.empty else jax.lax.axis_index(n) * size
                     for n, size in zip(spec, g.shape, strict=True)]  # fmt: skip
            bits = functools.partial(random_words_of_rows, key, whole, g.shape, begin)
            per_row = jax.tree.map(functools.partial(_per_row, g.shape), (scalars, applied))
            return _loop_over_rows(functools.partial(_update_rows, rule), bits, per_row, g, moments)

        applied = jnp.asarray(self.applied)
        if not mesh.empty:
            # Arrays [layers, experts, 1, ...] are sharded like the first two dimensions.
            expert_specs = jax.tree.map(
                lambda a: P(*spec[:2]) if a.ndim else P(), (applied, scalars)
            )
            specs = (spec, spec, P(), *expert_specs)
            local = jax.shard_map(
                local, in_specs=specs, out_specs=spec, axis_names=automatic_axes(), check_vma=False
            )
        return local(g, moments, key, applied, scalars)


def _update_offloaded(
    rule: MomentRule, per_expert: PyTree, g: Array, moments: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    """Copy moments from host memory to the device, update them and copy them back."""
    scalars, applied = per_expert
    old = jax.device_put(moments, jax.memory.Space.Device)
    direction, *new = rule(scalars, g, *(m.astype(jnp.float32) for m in old))
    selected = (jnp.where(applied, n.astype(o.dtype), o) for n, o in zip(new, old, strict=True))
    return direction, jax.device_put(tuple(selected), jax.memory.Space.Host)


def _loop_over_layers(
    update: Callable[[PyTree, Array, tuple[Array, ...]], tuple[Array, tuple[Array, ...]]],
    per_expert: PyTree,
    g: Float[Array, "..."],
    moments: tuple[Array, ...],
) -> tuple[Array, tuple[Array, ...]]:
    """Update a leaf layer by layer if it is stacked: one layer's moments are on the device."""
    if g.ndim < 3:  # a matrix that is not stacked; moments of vectors are never offloaded
        return update(per_expert, g, moments)

    def body(i: Int[Array, ""], arrays: PyTree) -> PyTree:
        layer = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i), arrays)
        layer_scalars = _map_arrays(per_expert, lambda a: jax.lax.dynamic_index_in_dim(a, i))
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda a, n: put(a, n, i, 0), arrays, update(layer_scalars, *layer))

    # The carry (gradient, moments) becomes (direction, new moments): each iteration overwrites the
    # layer that it has read, so that XLA reuses the buffers.
    result: tuple[Array, tuple[Array, ...]] = jax.lax.fori_loop(0, len(g), body, (g, moments))
    return result


def _map_arrays(tree: PyTree, function: Callable[[Array], Array]) -> PyTree:
    """Apply a function to every array of a tree, but not to scalars."""
    return jax.tree.map(lambda a: function(a) if a.ndim else a, tree)


def _per_row(shape: tuple[int, ...], value: Array) -> Array:
    """Broadcast a value per expert to all rows of an array, [rows, 1]; scalars stay scalars."""
    if not value.ndim:
        return value
    return jnp.broadcast_to(value, (*shape[:-1], 1)).reshape(-1, 1)


def _update_rows(
    rule: MomentRule,
    per_row: PyTree,
    bits: UInt32[Array, "r c"],
    g: Array,
    moments: tuple[Packed, ...],
) -> tuple[Array, tuple[Packed, ...]]:
    """Update whole blocks of rows at once."""
    scalars, applied = per_row
    # Elements of one parameter are independent, so rows can be updated in any chunks.
    direction, *new = rule(scalars, g, *map(unpack, moments))
    # 32 random bits per element serve at most two moments, 16 bits each.
    uniforms = (uniform(bits & 0xFFFF), uniform(bits >> 16))
    packed = tuple(pack(x, u, old) for x, u, old in zip(new, uniforms, moments, strict=False))
    # All rows of a block belong to one expert, so any of its rows can stand for the block.
    block_applied = _map_arrays(applied, lambda rows: rows[::BLOCK])
    # Rejected updates must keep the stored bits: packing the old numbers again would round them.
    return direction, tuple(
        Packed(jnp.where(applied, n.values, o.values), jnp.where(block_applied, n.scales, o.scales))
        for n, o in zip(packed, moments, strict=True)
    )


def _loop_over_rows(
    update: Callable[..., tuple[Array, tuple[Packed, ...]]],
    bits: Bits,
    per_row: PyTree,
    g: Float[Array, "... r c"],
    moments: tuple[Packed, ...],
) -> tuple[Array, tuple[Packed, ...]]:
    """Update a leaf in place, chunk by chunk of its rows."""
    # All dimensions but the last are flattened to rows, and rows are split into equal chunks:
    #
    #   gradient, values   [..., R, C]      ->  [chunks, rows, C]
    #   scales             [..., R/32, C]   ->  [chunks, rows/32, C]
    #   scalars per row    [all rows, 1]    ->  [chunks, rows, 1]
    #
    # R is a multiple of 32 (`eight_bit.is_packable`), so a chunk consists of whole blocks.
    arrays, blocks = (g, moments), g.size // g.shape[-1] // BLOCK
    # The fewest equal chunks of at most `CHUNK_ELEMENTS` elements; else one block per chunk.
    fitting = (n for n in range(1, blocks) if blocks % n == 0 and g.size // n <= CHUNK_ELEMENTS)
    chunks = next(fitting, blocks)
    rows = blocks // chunks * BLOCK
    flat = jax.tree.map(lambda a: a.reshape(chunks, -1, a.shape[-1]), arrays)
    per_row = _map_arrays(per_row, lambda a: a.reshape(chunks, -1, 1))

    def body(i: Int[Array, ""], arrays: PyTree) -> PyTree:
        chunk = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), arrays)
        # Without the barrier, XLA reads from `arrays` again after writing to them, and therefore
        # copies all of them first.
        chunk = jax.lax.optimization_barrier(chunk)
        scalars = _map_arrays(per_row, lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False))
        new = update(scalars, bits(i * rows, rows), *chunk)
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda a, n: put(a, n, i, 0), arrays, new)

    # As in `_loop_over_layers`, the direction takes the buffer of the gradient.
    if chunks > 1:
        result = jax.lax.fori_loop(0, chunks, body, flat)
    else:
        scalars = _map_arrays(per_row, lambda a: a[0])
        result = update(scalars, bits(0, rows), *jax.tree.map(lambda a: a[0], flat))
    return jax.tree.map(lambda n, a: n.reshape(a.shape), result, arrays)
