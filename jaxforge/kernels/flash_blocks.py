"""Visibility of pairs of query and key blocks: skipped, masked, or visible as a whole.

Visibility follows from the least and greatest position and document of each block. So any order of
tokens gives correct results, and an order with consecutive documents is fast.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BEFORE = -1  # position of padding queries: they see no key
AFTER = 2**31 - 1  # position of padding keys: no query sees them


class TokenPositions(NamedTuple):
    """Positions and documents of the tokens of queries or keys.

    Attributes:
        positions: int32 [b, s], from 0, in any order.
        documents: int32 [b, s]; None, on both sides: there is one.
    """

    positions: Int[Array, "b s"]
    documents: Int[Array, "b s"] | None = None


def pad_to_blocks(x: Array, block: int, axis: int = 1, fill: int = 0) -> Array:
    """Pad an axis to a multiple of the block size."""
    more = -x.shape[axis] % block
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=fill)


def pad_tokens(tokens: TokenPositions, block: int, position: int) -> TokenPositions:
    """Pad tokens to whole blocks. Padding belongs to the last document, so that it adds none.

    Args:
        tokens: positions and documents of queries or of keys.
        block: number of tokens of a block.
        position: position of the padding: `BEFORE` for queries, `AFTER` for keys.
    """
    positions = pad_to_blocks(tokens.positions, block, fill=position)
    documents, more = tokens.documents, -tokens.positions.shape[1] % block
    if documents is not None and more:
        documents = jnp.pad(documents, [(0, 0), (0, more)], mode="edge")
    return TokenPositions(positions, documents)


class _Extent(NamedTuple):
    """Least and greatest position and document of each block, each [b, n, 1] or [b, 1, n]."""

    first: Array
    last: Array
    documents: tuple[Array, Array] | None

    @classmethod
    def of(cls, tokens: TokenPositions, block: int, axis: int) -> "_Extent":
        """Return the extents of whole blocks, with an extra axis for pairing them."""

        def ends(x: Array) -> tuple[Array, Array]:
            blocks = x.reshape(x.shape[0], -1, block)
            return jnp.expand_dims(blocks.min(-1), axis), jnp.expand_dims(blocks.max(-1), axis)

        documents = None if tokens.documents is None else ends(tokens.documents)
        return cls(*ends(tokens.positions), documents)


def block_visibility(
    queries: TokenPositions,
    keys: TokenPositions,
    blocks: tuple[int, int],
    window: Int[Array, ""] | int | None,
) -> tuple[Bool[Array, "b n m"], Bool[Array, "b n m"]]:
    """Return for each pair of blocks whether any token pair is visible, and whether all are.

    Args:
        queries: positions and documents of whole blocks of queries.
        keys: positions and documents of whole blocks of keys.
        blocks: number of queries, and of keys, of a block.
        window: number of last positions that a query sees, its own included; None: all.
    """
    q, k = _Extent.of(queries, blocks[0], axis=2), _Extent.of(keys, blocks[1], axis=1)
    # Necessary condition of one visible pair, and sufficient condition that all pairs are visible.
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
        some: whether any pair of tokens of two blocks may be visible.
        every: whether all pairs are visible; implies `some`.

    Returns:
        Indices (first, whole, whole_end, end): blocks [first, end) are visited, and of these
        [whole, whole_end) without a mask.
    """
    m = some.shape[2]
    at = jnp.arange(m, dtype=jnp.int32)
    end = jnp.max(jnp.where(some, at + 1, 0), axis=2)
    first = jnp.minimum(jnp.min(jnp.where(some, at, m), axis=2), end)
    whole = jnp.minimum(jnp.min(jnp.where(every, at, m), axis=2), end)
    masked = ~every & (at >= whole[..., None])
    whole_end = jnp.minimum(jnp.min(jnp.where(masked, at, m), axis=2), end)
    return jnp.stack([first, whole, whole_end, end], axis=2)
