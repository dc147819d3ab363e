"""Tiles of the logits that exist at a time: their size, and the tokens of each."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Model
from jaxforge.parallel.sharding import size_per_device, split_sequences
from jaxforge.step.vocab_chunks import chunk_size


class Tiling(NamedTuple):
    """Tile size of the logits that exist at a time, and the soft cap of logits.

    Attributes:
        tokens: tokens of each sequence in a tile.
        vocab: entries of each device's share of the vocabulary in a tile.
        softcap: `model.final_logit_softcap`.
    """

    tokens: int
    vocab: int
    softcap: float | None = None


def tiling(config: TrainConfig, batch: int, length: int, vocab: int, tile: int | None) -> Tiling:
    """Return the tiling that `train.loss_fn` selects for a microbatch [batch, length].

    Args:
        config: the `[train]` section.
        batch: number of sequences over all devices, or of parts of sequences
            (`split_sequences`).
        length: tokens of each sequence.
        vocab: size of the vocabulary.
        tile: preferred number of logits at a time on a device of the platform; None: no limit.
    """
    rows, entries = size_per_device(batch, "tokens"), size_per_device(vocab, "vocab")
    return tiling_on_device(config, rows, length, entries, tile)


def tiling_on_device(
    config: TrainConfig, rows: int, length: int, entries: int, tile: int | None
) -> Tiling:
    """Return the tiling from the number of sequences and vocabulary entries on a device."""
    chunked = config.loss_fn == "chunked_cross_entropy"
    if config.ce_chunk_size or not chunked:
        preferred = length if tile is None else tile // entries // rows
        tokens = config.ce_chunk_size // rows if chunked else preferred
        return Tiling(max(1, min(tokens, length)), entries)
    return Tiling(length, chunk_size(config, rows * length, entries))


def tiles_of(config: TrainConfig, labels: Array, head: Array, model: Model) -> Tiling:
    """Return the tiling for labels [b, s], a head [v, d] and the logits of a model."""
    batch, length = split_sequences(labels).shape
    tiles = tiling(config, batch, length, head.shape[0], model.runtime.loss_tile)
    return tiles._replace(softcap=model.config.final_logit_softcap)


class Tile(NamedTuple):
    """Tokens of a tile.

    Attributes:
        hidden: hidden states [t, d].
        labels: labels [t].
        real: True for tokens that are not padding [t].
    """

    hidden: Array
    labels: Array
    real: Array

    @property
    def valid(self) -> Array:
        """True for tokens with a valid label [t]."""
        return self.labels != IGNORE


def split_tokens(
    tokens: int, hidden: Array, labels: Array, padding: Array | None
) -> tuple[Tile, Tile]:
    """Return tiles [n, t, ...] along the sequence, the last one padded, and an empty tile."""
    # [b, s, ...] -> pad s to n · tokens -> [n, b, tokens, ...] -> [n, t = b · tokens, ...]
    batch, length = labels.shape
    n = -(-length // tokens)
    pad = (0, n * tokens - length)

    def cut(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, 0), pad, *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        x = x.reshape(batch, n, tokens, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(n, batch * tokens, *x.shape[3:])

    is_real = jnp.ones_like(labels) if padding is None else (~padding).astype(labels.dtype)
    real = cut(is_real, 0) == 1
    tiles = Tile(cut(hidden, 0), cut(labels, IGNORE), real)
    return tiles, jax.tree.map(lambda x: x[0, :0], tiles)


def single_tile(hidden: Array, labels: Array, padding: Array | None) -> Tile:
    """Return all tokens as one tile."""
    return jax.tree.map(lambda x: x[0], split_tokens(labels.shape[1], hidden, labels, padding)[0])


def scan_tiles(body: Callable[..., Any], start: PyTree, tiles: Tile) -> tuple[Any, Any]:
    """Apply `lax.scan`, without a loop for a single tile."""
    if tiles.labels.shape[0] > 1:
        return jax.lax.scan(body, start, tiles)
    carry, y = body(start, jax.tree.map(lambda x: x[0], tiles))
    return carry, jax.tree.map(lambda x: x[None], y)
