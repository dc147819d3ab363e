"""Visibility of keys to a query: windows, chunks and packed documents.

Chunks are counted from the first token of a document, so that a packed document is what it is
alone, and what it is when it is generated. transformers counts them from the first real token of a
row (`masking_utils.chunked_overlay`), which is the same where a row is one document; of several it
cuts each wherever in the row it happens to lie.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_ALL = 2**31 - 1  # tokens, more than any sequence has


class Mask(NamedTuple):
    """Limits of attention: window and chunk.

    Attributes:
        window: tokens that it sees, itself included; None: all up to itself.
        chunk: tokens of a chunk; it sees none of other chunks. None: there are no chunks.
    """

    window: int | None = None
    chunk: int | None = None

    def within(self, length: int) -> "Mask":
        """Return the mask for sequences of a length; without effect, the empty mask."""
        return Mask(*(None if n is not None and n >= length else n for n in self))


FULL = Mask()


def select_window(masks: Sequence[Mask], mask_index: int | Int[Array, ""]) -> Int[Array, ""] | None:
    """The window of one of some masks, which only the device may know; None: none has any."""
    return _one_of([mask.window for mask in masks], mask_index)


def select_chunk(masks: Sequence[Mask], mask_index: int | Int[Array, ""]) -> Int[Array, ""] | None:
    """The chunk of one of some masks, which only the device may know; None: none has any."""
    return _one_of([mask.chunk for mask in masks], mask_index)


def _one_of(
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
    """Numbers that tokens of one chunk of one document share: documents of their own, to a kernel.

    Args:
        batch: rows.
        length: tokens of a row.
        chunk: tokens of a chunk.
        segment_ids: document of each token; None: one document a row.
        positions: of the tokens in their documents; None: they are counted.
    """
    at = positions_in_documents(batch, length, segment_ids) if positions is None else positions
    begins = _begins(at // chunk)
    if segment_ids is not None:
        begins |= _begins(segment_ids)
    return jnp.cumsum(begins, axis=1, dtype=jnp.int32)


def padding_of(batch: Mapping[str, Array]) -> Bool[Array, "..."] | None:
    """Return which tokens of a batch are padding.

    The data say so in `is_padding`. Positions without a label are no padding: a prompt has none.

    Returns:
        A bool for each token; None if the batch cannot have padding.
    """
    is_padding = batch.get("is_padding")
    return None if is_padding is None else jnp.asarray(is_padding, bool)


def positions_in_documents(
    batch: int, length: int, segment_ids: Int[Array, "b s"] | None
) -> Int[Array, "b s"]:
    """The position of each token [b, s] in its document."""
    at = jnp.broadcast_to(jnp.arange(length), (batch, length))
    if segment_ids is None:
        return at
    return at - jax.lax.cummax(jnp.where(_begins(segment_ids), at, 0), axis=1)


def _begins(ids: Int[Array, "b s"]) -> Bool[Array, "b s"]:
    """Return where an id differs from the id of the token before."""
    return ids != jnp.roll(ids, 1, axis=1)
