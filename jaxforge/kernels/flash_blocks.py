"""Classification of pairs of query and key blocks as skipped, masked, or wholly visible.

Minimum and maximum of positions and documents of each block decide. So any order of tokens is
correct, and an order in which documents are contiguous is fast.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

BEFORE = -1  # position of padding queries, which see nothing
AFTER = 2**31 - 1  # position of padding keys, which nothing sees


class TokenPositions(NamedTuple):
    """Positions and documents of queries or keys.

    Attributes:
        positions: int32 [b, s], from 0, in any order.
        documents: int32 [b, s]; None, for queries and keys: each row is one document.
    """

    positions: Int[Array, "b s"]
    documents: Int[Array, "b s"] | None = None


def pad_to_blocks(x: Array, block: int, axis: int = 1, fill: int = 0) -> Array:
    """Pad an axis to a multiple of `block`."""
    more = -x.shape[axis] % block
    if not more:
        return x
    return jnp.pad(x, [(0, more if i == axis else 0) for i in range(x.ndim)], constant_values=fill)


def pad_tokens(tokens: TokenPositions, block: int, position: int) -> TokenPositions:
    """Pad tokens to whole blocks; padding continues the last document, which adds none to a block.

    Args:
        tokens: tokens of queries or keys.
        block: number of tokens of a block.
        position: position of padding: `BEFORE` for queries, `AFTER` for keys.
    """
    positions = pad_to_blocks(tokens.positions, block, fill=position)
    documents, more = tokens.documents, -tokens.positions.shape[1] % block
    if documents is not None and more:
        documents = jnp.pad(documents, [(0, 0), (0, more)], mode="edge")
    return TokenPositions(positions, documents)


class _Extent(NamedTuple):
    """Minimum and maximum position and document of each block, [b, n, 1] or [b, 1, n]."""

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
        queries: tokens of whole blocks of queries.
        keys: tokens of whole blocks of keys.
        blocks: number of queries and of keys of a block.
        window: number of positions that a query sees.
    """
    q, k = _Extent.of(queries, blocks[0], axis=2), _Extent.of(keys, blocks[1], axis=1)
    any_visible, all_visible = k.first <= q.last, k.last <= q.first
    if window is not None:
        any_visible &= q.first - k.last < window
        all_visible &= q.last - k.first < window
    if q.documents is not None and k.documents is not None:
        (q_first, q_last), (k_first, k_last) = q.documents, k.documents
        any_visible &= (q_first <= k_last) & (k_first <= q_last)
        all_visible &= (q_first == k_last) & (k_first == q_last)
    return any_visible, any_visible & all_visible


def block_ranges(
    any_visible: Bool[Array, "b n m"], all_visible: Bool[Array, "b n m"]
) -> Int[Array, "b n 4"]:
    """Return for each block the range of blocks to visit and the range that needs no mask.

    Args:
        any_visible: pairs of blocks in which a token pair may be visible.
        all_visible: pairs of blocks in which all token pairs are visible.

    Returns:
        First block, first and end of the blocks without a mask, end, in the last dimension.
    """
    m = any_visible.shape[2]
    at = jnp.arange(m, dtype=jnp.int32)
    end = jnp.max(jnp.where(any_visible, at + 1, 0), axis=2)
    first = jnp.minimum(jnp.min(jnp.where(any_visible, at, m), axis=2), end)
    whole = jnp.minimum(jnp.min(jnp.where(all_visible, at, m), axis=2), end)
    masked = ~all_visible & (at >= whole[..., None])
    whole_end = jnp.minimum(jnp.min(jnp.where(masked, at, m), axis=2), end)
    return jnp.stack([first, whole, whole_end, end], axis=2)
