"""Visibility of keys to a query: windows, chunks and packed documents.

Chunks are counted from the first token of a document, so that a packed document gives the same
result as alone, and as in generation. transformers counts them from the first real token of a row
(`masking_utils.chunked_overlay`). This is the same for rows of one document; in rows of several
documents, its chunks depend on the position of a document in the row.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_ALL = 2**31 - 1  # more tokens than any sequence has


class Mask(NamedTuple):
    """Limits of causal attention.

    Attributes:
        window: number of tokens that a query sees, including itself; None: no limit.
        chunk: number of tokens of a chunk; queries see only their own chunk. None: no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def within(self, length: int) -> "Mask":
        """Return the mask without limits that have no effect on sequences of this length."""
        return Mask(*(None if n is not None and n >= length else n for n in self))


FULL = Mask()


def select_window(masks: Sequence[Mask], mask_index: int | Int[Array, ""]) -> Int[Array, ""] | None:
    """Return the window of `masks[mask_index]`, or None if no mask has a window."""
    return _select_limit([mask.window for mask in masks], mask_index)


def select_chunk(masks: Sequence[Mask], mask_index: int | Int[Array, ""]) -> Int[Array, ""] | None:
    """Return the chunk of `masks[mask_index]`, or None if no mask has chunks."""
    return _select_limit([mask.chunk for mask in masks], mask_index)


def _select_limit(
    tokens: Sequence[int | None], mask_index: int | Int[Array, ""]
) -> Int[Array, ""] | None:
    if not any(tokens):
        return None
    return jnp.asarray([n or _ALL for n in tokens], jnp.int32)[mask_index]


def visible(
    queries: Int[Array, "..."],
    keys: Int[Array, "..."],
    window: int | Int[Array, ""] | None = None,
    chunk: int | Int[Array, ""] | None = None,
) -> Bool[Array, "..."]:
    """Return whether a query sees a key, from their positions in the document."""
    seen = keys <= queries
    if window is not None:
        seen &= queries - keys < window
    return seen if chunk is None else seen & (queries // chunk == keys // chunk)


def chunk_ids(
    batch: int,
    length: int,
    chunk: int | Int[Array, ""],
    segment_ids: Int[Array, "b s"] | None,
    positions: Int[Array, "b s"] | None = None,
) -> Int[Array, "b s"]:
    """Return ids of the chunks of each document, which kernels treat as documents.

    Args:
        batch: number of rows.
        length: number of tokens of a row.
        chunk: number of tokens of a chunk.
        segment_ids: document of each token; None: each row is one document.
        positions: positions of the tokens in their documents; None: they are counted.
    """
    at = positions_in_documents(batch, length, segment_ids) if positions is None else positions
    begins = _is_new_id(at // chunk)
    if segment_ids is not None:
        begins |= _is_new_id(segment_ids)
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)


def padding_of(batch: Mapping[str, Array]) -> Bool[Array, "..."] | None:
    """Return which tokens of a batch are padding.

    Padding is marked by the field `is_padding`. Tokens without a label, such as prompts, are not
    padding.

    Returns:
        A bool for each token; None if the batch has no field `is_padding`.
    """
    is_padding = batch.get("is_padding")
    return None if is_padding is None else jnp.asarray(is_padding, bool)


def positions_in_documents(
    batch: int, length: int, segment_ids: Int[Array, "b s"] | None
) -> Int[Array, "b s"]:
    """Return the position of each token [b, s] in its document."""
    at = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if segment_ids is None:
        return at
    return at - jax.lax.cummax(jnp.where(_is_new_id(segment_ids), at, 0), axis=1)


def _is_new_id(ids: Int[Array, "b s"]) -> Bool[Array, "b s"]:
    """Return where an id differs from the id of the token before."""
    return ids != jnp.roll(ids, 1, axis=1)
