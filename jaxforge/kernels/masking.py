"""Visibility of keys to queries: windows, chunks and packed documents.

Chunks are counted from the first token of a document, so that attention within a packed document is
the same as in a row of its own, and as in generation. transformers counts chunks from the first
real token of a row (`masking_utils.chunked_overlay`). That is the same if a row is one document;
with several documents, their chunks depend on their position in the row.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_NO_LIMIT = 2**31 - 1  # tokens, more than any sequence has


class Mask(NamedTuple):
    """Limits of causal attention.

    Attributes:
        window: number of last tokens that a query sees, its own included; None: all.
        chunk: number of tokens of a chunk; a query sees only its own chunk. None: no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def within(self, length: int) -> "Mask":
        """Return the mask for sequences of a length, without limits that have no effect."""
        return Mask(*(None if n is not None and n >= length else n for n in self))


FULL = Mask()


def select_window(masks: Sequence[Mask], mask_index: int | Int[Array, ""]) -> Int[Array, ""] | None:
    """Return the window of the mask at an index, which may be traced; None: no mask has one."""
    return _select_limit([mask.window for mask in masks], mask_index)


def select_chunk(masks: Sequence[Mask], mask_index: int | Int[Array, ""]) -> Int[Array, ""] | None:
    """Return the chunk size of the mask at an index, which may be traced; None: no mask has one."""
    return _select_limit([mask.chunk for mask in masks], mask_index)


def _select_limit(
    limits: Sequence[int | None], mask_index: int | Int[Array, ""]
) -> Int[Array, ""] | None:
    if not any(limits):
        return None
    return jnp.asarray([n or _NO_LIMIT for n in limits], jnp.int32)[mask_index]


def visible(
    queries: Int[Array, "..."],
    keys: Int[Array, "..."],
    window: int | Int[Array, ""] | None = None,
    chunk: int | Int[Array, ""] | None = None,
) -> Bool[Array, "..."]:
    """Return whether a query sees a key, from their positions in the document."""
    is_visible = keys <= queries
    if window is not None:
        is_visible &= queries - keys < window
    return is_visible if chunk is None else is_visible & (queries // chunk == keys // chunk)


def chunk_ids(
    batch: int,
    length: int,
    chunk: int | Int[Array, ""],
    segment_ids: Int[Array, "b s"] | None,
    positions: Int[Array, "b s"] | None = None,
) -> Int[Array, "b s"]:
    """Return an id for each chunk of each document, which kernels can use as a document id.

    Args:
        batch: number of rows.
        length: number of tokens of a row.
        chunk: number of tokens of a chunk.
        segment_ids: document id of each token; None: one document per row.
        positions: position of each token in its document; None: computed from `segment_ids`.
    """
    if positions is None:
        positions = positions_in_documents(batch, length, segment_ids)
    is_start = _is_start(positions // chunk)
    if segment_ids is not None:
        is_start |= _is_start(segment_ids)
    return jnp.cumsum(is_start, axis=1, dtype=jnp.int32)


def padding_of(batch: Mapping[str, Array]) -> Bool[Array, "..."] | None:
    """Return which tokens of a batch are padding.

    Padding is marked by `is_padding` in the batch. Missing labels do not mark padding: the tokens
    of a prompt have no labels either.

    Returns:
        A bool for each token; None if the batch cannot have padding.
    """
    is_padding = batch.get("is_padding")
    return None if is_padding is None else jnp.asarray(is_padding, bool)


def positions_in_documents(
    batch: int, length: int, segment_ids: Int[Array, "b s"] | None
) -> Int[Array, "b s"]:
    """Return the position of each token [b, s] in its document."""
    column = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if segment_ids is None:
        return column
    # `cummax` carries the column of each document's first token along the document.
    return column - jax.lax.cummax(jnp.where(_is_start(segment_ids), column, 0), axis=1)


def _is_start(ids: Int[Array, "b s"]) -> Bool[Array, "b s"]:
    """Return where an id differs from the id of the previous token, or of the last in column 0."""
    return ids != jnp.roll(ids, 1, axis=1)
