"""The vocabulary in chunks, where it may be split over devices: heads and their gradients."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.model.transformer import project
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import size_per_device


def entry_ids(size: int) -> Int[Array, "_"]:
    """Ids of the entries of this device's share of the vocabulary."""
    return collectives.first_index("vocab", size) + jnp.arange(size)


class Chunk(NamedTuple):
    """Some of the vocabulary: rows of the head [c, d] and their ids [c], -1 where it is padding."""

    weights: Float[Array, "c d"]
    ids: Int[Array, "c"]

    def logits(self, hidden: Float[Array, "t d"], softcap: float | None) -> Float[Array, "t c"]:
        """Return the capped logits of some tokens; padding entries get no probability."""
        logits = project(hidden, self.weights, softcap)
        return jnp.where(self.ids >= 0, logits, -jnp.inf)


def split_vocab(head_VD: Float[Array, "v d"], size: int) -> Chunk:
    """Chunks [n, c, ...] of as near the same size as can be; each takes its part of every device's.

    Devices hold consecutive parts of the vocabulary, so [devices, n, c] is where an entry is.
    """
    ids = entry_ids(head_VD.shape[0])
    return Chunk(_cut(head_VD, size, 0), _cut(ids, size, -1))


def _cut(x: Array, size: int, fill: int) -> Array:
    vocab = x.shape[0]
    local = size_per_device(vocab, "vocab")
    n = -(-local // size)
    each = -(-local // n)
    x = x.reshape(vocab // local, local, *x.shape[1:])
    x = jnp.pad(x, ((0, 0), (0, n * each - local), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
    x = x.reshape(x.shape[0], n, each, *x.shape[2:]).swapaxes(0, 1)
    return x.reshape(n, -1, *x.shape[3:])


def join_vocab(chunks: Float[Array, "n c d"], vocab: int) -> Float[Array, "v d"]:
    """Join chunks of the vocabulary in the order of its entries."""
    local = size_per_device(vocab, "vocab")
    n, _, dim = chunks.shape
    x = chunks.reshape(n, vocab // local, -1, dim).swapaxes(0, 1)
    return x.reshape(vocab // local, -1, dim)[:, :local].reshape(vocab, dim)
