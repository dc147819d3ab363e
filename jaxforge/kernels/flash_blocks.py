"""Pairs of query and key blocks: skipped, masked, or visible as a whole.

By the least and greatest position and document of each block, so that any order of tokens is right,
and one in which documents follow each other is fast.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BEFORE = -1  # position of the queries that fill up a block
AFTER = 2**31 - 1  # position of such keys


class Tokens(NamedTuple):
    """Positions and documents of the tokens of queries or keys.

    Attributes:
        positions: int32 [b, s], from 0, in any order.
        documents: int32 [b, s]; None, on both sides: there is one.
    """

    positions: Int[Array, "b s"]
    documents: Int[Array, "b s"] | None = None


def pad_to_blocks(x: Array, block: int, axis: int = 1, fill: int = 0) -> Array:
    """Whole blocks of what lies along an axis."""
    more = -x.shape[axis] % block
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=fill)


def pad_tokens(tokens: Tokens, block: int, position: int) -> Tokens:
    """Return whole blocks of tokens. The last document goes on, so that no block has more of them.

    Args:
        tokens: of one side.
        block: tokens of a block.
        position: of the added ones: `BEFORE` for queries, which see nothing, `AFTER` for keys.
    """
    positions = pad_to_blocks(tokens.positions, block, fill=position)
    documents, more = tokens.documents, -tokens.positions.shape[1] % block
    if documents is not None and more:
        documents = jnp.pad(documents, [(0, 0), (0, more)], mode="edge")
    return Tokens(positions, documents)


class _Extent(NamedTuple):
    """The least and greatest of each block, [b, n, 1] or [b, 1, n]: of positions and documents."""

    first: Array
    last: Array
    documents: tuple[Array, Array] | None

    @classmethod
    def of(cls, tokens: Tokens, block: int, axis: int) -> "_Extent":
        """Return the extents of whole blocks, with an extra axis for pairing them."""

        def ends(x: Array) -> tuple[Array, Array]:
            blocks = x.reshape(x.shape[0], -1, block)
            return jnp.expand_dims(blocks.min(-1), axis), jnp.expand_dims(blocks.max(-1), axis)

        documents = None if tokens.documents is None else ends(tokens.documents)
        return cls(*ends(tokens.positions), documents)


def block_visibility(
    queries: Tokens, keys: Tokens, blocks: tuple[int, int], window: Int[Array, ""] | int | None
) -> tuple[Bool[Array, "b n m"], Bool[Array, "b n m"]]:
    """Return for each pair of blocks whether any token pair is visible, and whether all are.

    Args:
        queries: whole blocks of them.
        keys: whole blocks of them.
        blocks: queries and keys of a block.
        window: positions that a query sees.
    """
    q, k = _Extent.of(queries, blocks[0], axis=2), _Extent.of(keys, blocks[1], axis=1)
    some, every = k.first <= q.last, k.last <= q.first
    if window is not None:
        some &= q.first - k.last < window
        every &= q.last - k.first < window
    if q.documents is not None and k.documents is not None:
        (q_first, q_last), (k_first, k_last) = q.documents, k.documents
        some &= (q_first <= k_last) & (k_first <= q_last)
        every &= (q_first == k_last) & (k_first == q_last)
    return some, some & every


def block_ranges(some: Bool[Array, "b n m"], every: Bool[Array, "b n m"]) -> Int[Array, "b n 4"]:
    """Return for each block the range of blocks to visit and the range that needs no mask.

    Args:
        some: where there may be anything to see.
        every: where everything is seen, a part of `some`.

    Returns:
        first, whole, end of whole, end.
    """
    m = some.shape[2]
    at = jnp.arange(m, dtype=jnp.int32)
    end = jnp.max(jnp.where(some, at + 1, 0), axis=2)
    first = jnp.minimum(jnp.min(jnp.where(some, at, m), axis=2), end)
    whole = jnp.minimum(jnp.min(jnp.where(every, at, m), axis=2), end)
    masked = ~every & (at >= whole[..., None])
    whole_end = jnp.minimum(jnp.min(jnp.where(masked, at, m), axis=2), end)
    return jnp.stack([first, whole, whole_end, end], axis=2)
