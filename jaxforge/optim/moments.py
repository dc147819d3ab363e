"""What moments are kept in, and how they advance in it.

In a floating-point type a leaf advances as a whole, and XLA makes one pass over it of everything.
In eight bits (`optim.eight_bit`) wide copies of all moments at once would cost more than is saved:
a leaf advances some rows at a time, in place, in a loop of its own on each device.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int, PyTree, UInt32

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


Kept = jnp.dtype | EightBit
"""What moments are stored in."""


@dataclasses.dataclass(frozen=True)
class Place:
    """A parameter: its name, and its logical axes where they are needed."""

    name: str
    axes: Axes = ()


def places(params: PyTree, kept: Kept) -> PyTree:
    """The `Place` of every parameter."""
    axes = flatten_dict(kept.axes) if isinstance(kept, EightBit) else {}
    return unflatten_dict(
        {path: Place(".".join(path), axes.get(path, ())) for path in flatten_dict(params)}
    )


def zeros(params: PyTree, kept: Kept, dtype: jnp.dtype = SIGNED) -> tuple[PyTree, PyTree | None]:
    """Moments before the first update, and their scales: None where there are none.

    Args:
        params: the parameters.
        kept: what they are stored in.
        dtype: of values in eight bits, `SIGNED` or `ROOT`.
    """
    if not isinstance(kept, EightBit):
        return jax.tree.map(lambda p: jnp.zeros_like(p, kept), params), None
    axes = flatten_dict(kept.axes)
    values, scales = {}, {}
    for path, p in flatten_dict(params).items():
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


def parted(moments: PyTree) -> tuple[PyTree, PyTree | None]:
    """What `joined` made one."""
    flat = flatten_dict(moments)
    packed = {k: leaf for k, leaf in flat.items() if isinstance(leaf, Packed)}
    values = {k: leaf.values if k in packed else leaf for k, leaf in flat.items()}
    return unflatten_dict(values), unflatten_dict({k: p.scales for k, p in packed.items()}) or None


def is_packed(leaf: Array) -> bool:
    """Whether an array of an optimizer's state is a part of moments in eight bits."""
    return leaf.dtype in (SIGNED, ROOT)


@dataclasses.dataclass(frozen=True)
class Turn:
    """One update of all moments.

    Attributes:
        kept: what they are stored in.
        number: updates made before it.
        applied: where it is False, moments in eight bits stay as they are. Whether others do is
            up to the caller, who has both then: here the old ones are gone.
    """

    kept: Kept
    number: Int[Array, ""]
    applied: Bool[Array, ""] | bool = True

    def advance(
        self, rule: Rule, place: Place, g: Array, *moments: Any, scalars: tuple[Array, ...] = ()
    ) -> tuple[Any, ...]:
        """The direction that comes of a gradient, float32, and the moments as they are stored.

        Args:
            rule: how it comes.
            place: whose gradient it is.
            g: gradient.
            moments: stored ones.
            scalars: what else the rule is given.
        """
        if not isinstance(moments[0], Packed):
            wide = (a.astype(jnp.float32) for a in (g, *moments))
            direction, *new = rule(scalars, *wide)
            return direction, *(m.astype(old.dtype) for m, old in zip(new, moments, strict=True))
        assert isinstance(self.kept, EightBit)
        key = key_of(self.kept.seed, f"moments/{place.name}", self.number)
        whole, spec = g.shape, partition_spec(place.axes)
        mesh = jax.sharding.get_abstract_mesh()

        def local(g: Array, moments: Any, key: Array, others: Any) -> Any:
            begin = [0 if n is None or mesh.empty else jax.lax.axis_index(n) * size
                     for n, size in zip(spec, g.shape, strict=True)]  # fmt: skip
            bits = functools.partial(words, key, whole, g.shape, begin)
            return _by_rows(functools.partial(_advanced, rule, others), bits, g, moments)

        if not mesh.empty:
            local = jax.shard_map(
                local, in_specs=(spec, spec, P(), P()), out_specs=spec, check_vma=False
            )
        others = jnp.asarray(self.applied), scalars
        direction, new = local(g.astype(jnp.float32), moments, key, others)
        return direction, *new


def _advanced(
    rule: Rule, others: Any, bits: UInt32[Array, "r c"], g: Array, moments: tuple[Packed, ...]
) -> tuple[Array, tuple[Packed, ...]]:
    """Some rows, all at once. At most two moments: each has 16 of the random bits."""
    applied, scalars = others
    direction, *new = rule(scalars, g, *map(unpack, moments))
    uniforms = (uniform(bits & 0xFFFF), uniform(bits >> 16))
    packed = tuple(pack(x, u, old) for x, u, old in zip(new, uniforms, moments, strict=False))
    return direction, jax.tree.map(lambda n, o: jnp.where(applied, n, o), packed, moments)


def _by_rows(advanced: Callable[..., Any], bits: Callable[..., Array], *arrays: Any) -> Any:
    """A leaf [..., r, c] in a loop over parts of its rows, into the memory of `arrays`."""
    g, _ = arrays
    parts = _parts(g.size // g.shape[-1] // BLOCK, g.size)
    rows = g.size // g.shape[-1] // parts
    flat = jax.tree.map(lambda a: a.reshape(parts, -1, a.shape[-1]), arrays)

    def body(i: Array | int, arrays: Any) -> Any:
        # XLA would read from them again after writing, and so copy the whole before.
        own = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), arrays)
        own = jax.lax.optimization_barrier(own)
        new = advanced(bits((i * rows, rows)), *own)
        put = jax.lax.dynamic_update_index_in_dim
        return jax.tree.map(lambda a, n: put(a, n, i, 0), arrays, new)

    if parts > 1:
        made = jax.lax.fori_loop(0, parts, body, flat)
    else:
        made = advanced(bits((0, rows)), *jax.tree.map(lambda a: a[0], flat))
    return jax.tree.map(lambda n, a: n.reshape(a.shape), made, arrays)


def _parts(blocks: int, size: int) -> int:
    """Of how many parts with whole blocks none has more than `AT_ONCE` numbers, if there are."""
    fits = (n for n in range(1, blocks) if blocks % n == 0 and size // n <= AT_ONCE)
    return next(fits, blocks)
