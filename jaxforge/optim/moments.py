"""Storage formats of optimizer moments, and their updates.

In a floating-point type a leaf advances as a whole, and XLA makes one pass over it of everything.
In eight bits (`optim.eight_bit`) wide copies of all moments at once would cost more than is saved:
a leaf advances some rows at a time, in place, in a loop of its own on each device. In the memory of
the host (`train.offload`) the same is so of their copies on the device: layers take turns.
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
from jaxforge.optim.eight_bit import BLOCK, ROOT, SIGNED, Packed, pack, packs, scales_shape, unpack
from jaxforge.optim.random_bits import key_of, uniform, words
from jaxforge.parallel.sharding import Axes, partition_spec

AT_ONCE = 2**22
"""Numbers that are wide at a time: 16 MiB of each moment."""

Rule = Callable[..., tuple[Array, ...]]
"""(scalars, gradient, *moments) -> direction, *moments: number by number, in float32."""


@dataclasses.dataclass(frozen=True)
class EightBit:
    """Moments of matrices in eight bits, of vectors in float32.

    Attributes:
        axes: logical axes of every parameter.
        seed: of the rounding.
    """

    axes: PyTree
    seed: int


@dataclasses.dataclass(frozen=True)
class OnHost:
    """Moments of matrices in the memory of the host, of vectors on the device.

    Attributes:
        axes: logical axes of every parameter.
        dtype: what both are stored in.
    """

    axes: PyTree
    dtype: jnp.dtype


MomentStorage = jnp.dtype | EightBit | OnHost
"""What moments are stored in, and where."""

Moment = Array | Packed
Bits = Callable[[Int[Array, ""] | int, int], UInt32[Array, "r c"]]
"""(first row, number of rows) -> random bits of them."""


@dataclasses.dataclass(frozen=True)
class Location:
    """A parameter: its name, and its logical axes where they are needed."""

    name: str
    axes: Axes = ()


def locations(params: PyTree, storage: MomentStorage) -> PyTree:
    """The `Location` of every parameter."""
    axes = flatten_dict(storage.axes) if isinstance(storage, EightBit) else {}
    return unflatten_dict(
        {path: Location(".".join(path), axes.get(path, ())) for path in flatten_dict(params)}
    )


def zeros(
    params: PyTree, storage: MomentStorage, dtype: jnp.dtype = SIGNED
) -> tuple[PyTree, PyTree | None]:
    """Moments before the first update, and their scales: None where there are none.

    Args:
        params: the parameters.
        storage: what they are stored in.
        dtype: of values in eight bits, `SIGNED` or `ROOT`.
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
        is_packed = packs(p.shape, axes[path])
        values[path] = jnp.zeros_like(p, dtype if is_packed else jnp.float32)
        if is_packed:
            scales[path] = jnp.zeros_like(p, jnp.uint8, shape=scales_shape(p.shape))
    return unflatten_dict(values), unflatten_dict(scales) or None


def joined(values: PyTree, scales: PyTree | None) -> PyTree:
    """Moments with `Packed` leaves where they have scales."""
    of = flatten_dict(scales or {})
    flat = flatten_dict(values)
    return unflatten_dict({k: Packed(v, of[k]) if k in of else v for k, v in flat.items()})


def split_scales(moments: PyTree) -> tuple[PyTree, PyTree | None]:
    """Split what `joined` has joined."""
    flat = flatten_dict(moments)
    packed = {k: leaf for k, leaf in flat.items() if isinstance(leaf, Packed)}
    values = {k: leaf.values if k in packed else leaf for k, leaf in flat.items()}
    return unflatten_dict(values), unflatten_dict({k: p.scales for k, p in packed.items()}) or None


def advances_in_place(leaf: Array) -> bool:
    """Return whether an optimizer state array holds 8-bit or host-offloaded moments."""
    return leaf.dtype in (SIGNED, ROOT) or _is_on_host(leaf)


def _is_on_host(leaf: Array | Packed) -> bool:
    return not isinstance(leaf, Packed) and jax.typeof(leaf).memory_space == jax.memory.Space.Host


@dataclasses.dataclass(frozen=True)
class Turn:
    """One update of all moments.

    Where experts have counts of their own (`optim.idle_experts`), the number, `applied` and the
    scalars of a rule are arrays [layers, experts, 1, ...].

    Attributes:
        kept: what they are stored in.
        number: updates made before it.
        applied: where it is False, moments that advance in place stay as they are. Whether others
            do is up to the caller, who has both then: here the old ones are gone.
    """

    storage: MomentStorage
    number: Int[Array, "..."]
    applied: Bool[Array, "..."] | bool = True

    def advance(
        self,
        rule: Rule,
        location: Location,
        g: Array,
        *moments: Moment,
        scalars: tuple[Array, ...] = (),
    ) -> tuple[Any, ...]:
        """The direction that comes of a gradient, float32, and the moments as they are stored.

        Args:
            rule: how it comes.
            location: whose gradient it is.
            g: gradient.
            moments: stored ones.
            scalars: what else the rule is given.
        """
        packed = tuple(m for m in moments if isinstance(m, Packed))
        wide = tuple(m for m in moments if not isinstance(m, Packed))
        assert not (packed and wide)
        if packed:
            direction, new = self._in_place(rule, location, g.astype(jnp.float32), packed, scalars)
            return direction, *new
        if _is_on_host(wide[0]):
            there = functools.partial(_there_and_back, rule)
            per_expert = scalars, jnp.asarray(self.applied)
            direction, back = _by_layer(there, per_expert, g.astype(jnp.float32), wide)
            return direction, *back
        direction, *moved = rule(scalars, *(a.astype(jnp.float32) for a in (g, *wide)))
        return direction, *(m.astype(old.dtype) for m, old in zip(moved, wide, strict=True))

    def _in_place(
        self,
        rule: Rule,
        location: Location,
        g: Array,
        moments: tuple[Packed, ...],
        scalars: tuple[Array, ...],
    ) -> tuple[Array, tuple[Packed, ...]]:
        """Each device's part on its own: blocks are whole there (`state.train_state`)."""
        assert isinstance(self.storage, EightBit)
        number = jnp.sum(self.number) if self.number.ndim else self.number
        key = key_of(self.storage.seed, f"moments/{location.name}", number)
        whole, spec = g.shape, partition_spec(location.axes)
        mesh = jax.sharding.get_abstract_mesh()

        def local(
            g: Array,
            moments: tuple[Packed, ...],
            key: Array,
            applied: Array,
            scalars: tuple[Array, ...],
        ) -> tuple[Array, tuple[Packed, ...]]:
            begin = [0 if n is None or mesh.empty else jax.lax.axis_index(n) * size
                     for n, size in zip(spec, g.shape, strict=True)]  # fmt: skip
            bits = functools.partial(words, key, whole, g.shape, begin)
            per_row = jax.tree.map(functools.partial(_per_row, g.shape), (scalars, applied))
            return _by_rows(functools.partial(_advanced, rule), bits, per_row, g, moments)

        applied = jnp.asarray(self.applied)
        if not mesh.empty:
            of_experts = jax.tree.map(lambda a: P(*spec[:2]) if a.ndim else P(), (applied, scalars))
            specs = (spec, spec, P(), *of_experts)
            local = jax.shard_map(local, in_specs=specs, out_specs=spec, check_vma=False)
        return local(g, moments, key, applied, scalars)


def _there_and_back(
    rule: Rule, per_expert: PyTree, g: Array, moments: tuple[Array, ...]
) -> tuple[Array, tuple[Array, ...]]:
    scalars, applied = per_expert
    old = jax.device_put(moments, jax.memory.Space.Device)
    direction, *new = rule(scalars, g, *(m.astype(jnp.float32) for m in old))
    selected = (jnp.where(applied, n.astype(o.dtype), o) for n, o in zip(new, old, strict=True))
    return direction, jax.device_put(tuple(selected), jax.memory.Space.Host)


def _by_layer(
    advanced: Callable[[PyTree, Array, tuple[Array, ...]], tuple[Array, tuple[Array, ...]]],
    per_expert: PyTree,
    g: Float[Array, "..."],
    moments: tuple[Array, ...],
) -> tuple[Array, tuple[Array, ...]]:
    """A leaf in a loop over its layers, if it is stacked: no two have moments here at a time."""
    if g.ndim < 3:
        return advanced(per_expert, g, moments)

    def body(i: Int[Array, ""], arrays: PyTree) -> PyTree:
        own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i), arrays)
        of_layer = _indexed(per_expert, lambda a: jax.lax.dynamic_index_in_dim(a, i))
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda a, n: put(a, n, i, 0), arrays, advanced(of_layer, *own))

    result: tuple[Array, tuple[Array, ...]] = jax.lax.fori_loop(0, len(g), body, (g, moments))
    return result


def _indexed(per_expert: PyTree, index: Callable[[Array], Array]) -> PyTree:
    """A part of every array; scalars stay, as they are the same in all parts."""
    return jax.tree.map(lambda a: index(a) if a.ndim else a, per_expert)


def _per_row(shape: tuple[int, ...], value: Array) -> Array:
    """A number for each row of an array of some shape, [rows, 1]; a scalar stays."""
    if not value.ndim:
        return value
    return jnp.broadcast_to(value, (*shape[:-1], 1)).reshape(-1, 1)


def _advanced(
    rule: Rule,
    per_row: PyTree,
    bits: UInt32[Array, "r c"],
    g: Array,
    moments: tuple[Packed, ...],
) -> tuple[Array, tuple[Packed, ...]]:
    """Some rows, all at once. At most two moments: each has 16 of the random bits."""
    scalars, applied = per_row
    direction, *new = rule(scalars, g, *map(unpack, moments))
    uniforms = (uniform(bits & 0xFFFF), uniform(bits >> 16))
    packed = tuple(pack(x, u, old) for x, u, old in zip(new, uniforms, moments, strict=False))
    of_block = _indexed(applied, lambda rows: rows[::BLOCK])
    return direction, tuple(
        Packed(jnp.where(applied, n.values, o.values), jnp.where(of_block, n.scales, o.scales))
        for n, o in zip(packed, moments, strict=True)
    )


def _by_rows(
    advanced: Callable[..., tuple[Array, tuple[Packed, ...]]],
    bits: Bits,
    per_row: PyTree,
    g: Float[Array, "... r c"],
    moments: tuple[Packed, ...],
) -> tuple[Array, tuple[Packed, ...]]:
    """A leaf in a loop over parts of its rows, which writes where it has read."""
    arrays, blocks = (g, moments), g.size // g.shape[-1] // BLOCK
    # The fewest parts of whole blocks, none with more than `AT_ONCE` numbers.
    fits = (n for n in range(1, blocks) if blocks % n == 0 and g.size // n <= AT_ONCE)
    parts = next(fits, blocks)
    rows = blocks // parts * BLOCK
    flat = jax.tree.map(lambda a: a.reshape(parts, -1, a.shape[-1]), arrays)
    per_row = _indexed(per_row, lambda a: a.reshape(parts, -1, 1))

    def body(i: Int[Array, ""], arrays: PyTree) -> PyTree:
        own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), arrays)
        # Else XLA reads from `arrays` again after it has written there, and so copies them before.
        own = jax.lax.optimization_barrier(own)
        of_rows = _indexed(per_row, lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False))
        new = advanced(of_rows, bits(i * rows, rows), *own)
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda a, n: put(a, n, i, 0), arrays, new)

    if parts > 1:
        result = jax.lax.fori_loop(0, parts, body, flat)
    else:
        of_rows = _indexed(per_row, lambda a: a[0])
        result = advanced(of_rows, bits(0, rows), *jax.tree.map(lambda a: a[0], flat))
    return jax.tree.map(lambda n, a: n.reshape(a.shape), result, arrays)
