"""Dropout with masks that do not depend on the mesh, for adapters (`lora.dropout`).

A mask is a hash, so that neither a state nor a generator has to be passed between devices:

    token key    hash of seed, step and the token's index in the batch      a field of the batch
    layer key    fmix32(token key + FACTOR * layer)                         once per layer
    mask         fmix32(fmix32(layer key ^ salt) ^ FACTOR * channel) >= rate * 2^32

`salt` is a hash of the linear layer's name. All operations are elementwise: the partitioner splits
them like the activations, XLA fuses them, and the backward pass computes the same mask again.
fmix32 is a bijection, so that within a step and a layer no two tokens have the same key. The xor
with the channel prevents that masks of tokens are shifted copies of each other.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxforge.kernels.hashing import FACTOR, fmix32

MASK_KEYS = "mask_keys"
"""Field of a batch: key of each token, uint32 (`step.mask_keys`)."""

LAYER_NUMBER = "layer_number"
"""Entry of a stack of layers, next to its parameters: number of each layer in the model, int32."""


class Dropout(NamedTuple):
    """Dropout of the input of a linear layer.

    Attributes:
        rate: probability that an element is dropped.
        salt: hash of the layer's name, so that layers with the same input have different masks.
    """

    rate: float
    salt: int

    def drop(self, x: Float[Array, "*t i"], keys: UInt32[Array, "*t"]) -> Float[Array, "*t i"]:
        """Set elements to zero, without the factor `scale` of the others.

        Args:
            x: activations with all of their channels; the partitioner may split them.
            keys: layer key of each token.
        """
        channels = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
        salted = fmix32(keys ^ jnp.uint32(self.salt))[..., None]
        bits = fmix32(salted ^ (channels * jnp.uint32(FACTOR)))
        is_kept = bits >= jnp.uint32(int(self.rate * 2**32))
        return jnp.where(is_kept, x, jnp.zeros((), x.dtype))

    @property
    def scale(self) -> float:
        """Factor that keeps the mean of the elements."""
        return 1 / (1 - self.rate)


def layer_keys(keys: UInt32[Array, "b s"], layer: Int[Array, ""]) -> UInt32[Array, "b s"]:
    """Return the keys of tokens in a layer of the model."""
    return fmix32(keys + layer.astype(jnp.uint32) * jnp.uint32(FACTOR))
