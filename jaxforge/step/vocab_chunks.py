"""Chunks of a vocabulary that may be split over devices, for heads and their gradients."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.config.train import TrainConfig
from jaxforge.model.transformer import project
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import size_per_device

_CHUNK_LOGITS = 1 << 25  # logits of a device and chunk if ce_vocab_chunk = 0: 128 MiB
_MIN_CHUNK = 1024  # vocabulary entries; products with fewer are slow
_LANES = 128  # chunks of a multiple of it fill the tiles of TPUs and of the tensor cores of GPUs


def chunk_size(config: TrainConfig, tokens: int, entries: int) -> int:
    """Return the entries of a chunk of the vocabulary on a device.

    Args:
        config: the `[train]` section.
        tokens: tokens of a microbatch on the device.
        entries: entries of the vocabulary on the device.
    """
    return min(config.ce_vocab_chunk or max(_MIN_CHUNK, _CHUNK_LOGITS // tokens), entries)


def entry_ids(size: int) -> Int[Array, "_"]:
    """Return the ids of the entries of this device's share of the vocabulary."""
    return collectives.first_index("vocab", size) + jnp.arange(size)


class Chunk(NamedTuple):
    """A chunk of the vocabulary.

    Attributes:
        weights: rows of the head [c, d].
        ids: ids of the rows [c]; -1 for padding.
    """

    weights: Float[Array, "c d"]
    ids: Int[Array, "c"]

    def logits(self, hidden: Float[Array, "t d"], softcap: float | None) -> Float[Array, "t c"]:
        """Return the soft-capped logits of tokens; -inf for padding entries."""
        logits = project(hidden, self.weights, softcap)
        return jnp.where(self.ids >= 0, logits, -jnp.inf)


def split_vocab(head_VD: Float[Array, "v d"], size: int) -> Chunk:
    """Split a head into chunks [n, c, ...] of equal size. The last one ends in padding.

    Args:
        head_VD: output head.
        size: upper limit of a device's entries in a chunk.
    """
    ids = entry_ids(head_VD.shape[0])
    return Chunk(_split(head_VD, size, 0), _split(ids, size, -1))


def _split(x: Array, size: int, fill: int) -> Array:
    # Devices hold consecutive parts of the vocabulary. Every chunk takes a slice of every device's
    # part, so that splitting needs no communication:
    #   [v, ...] -> [devices, local, ...] -> pad -> [devices, n, chunk, ...] -> [n, devices · chunk]
    vocab = x.shape[0]
    local = size_per_device(vocab, "vocab")
    equal = -(-local // -(-local // size))
    chunk = min(size, -(-equal // _LANES) * _LANES)
    n = -(-local // chunk)
    pad = (0, n * chunk - local)
    x = x.reshape(vocab // local, local, *x.shape[1:])
    x = jnp.pad(x, ((0, 0), pad, *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    x = x.reshape(x.shape[0], n, chunk, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(n, -1, *x.shape[3:])


def join_vocab(chunks: Float[Array, "n c d"], vocab: int) -> Float[Array, "v d"]:
    """Join the chunks of a gradient to a head: the inverse of `split_vocab`."""
    local = size_per_device(vocab, "vocab")
    n, _, dim = chunks.shape
    x = chunks.reshape(n, vocab // local, -1, dim).swapaxes(0, 1)
    return x.reshape(vocab // local, -1, dim)[:, :local].reshape(vocab, dim)


def float32_zeros(like: Array, head: Array) -> Array:
    """Return zeros of the shape of `like` that vary over the mesh axes of both arrays."""
    return jnp.zeros_like(like, jnp.float32) + jnp.sum(head[:0], dtype=jnp.float32)
