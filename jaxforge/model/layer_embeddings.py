"""Embeddings of tokens for each layer, as in Gemma 3n and 4.

Token t has a vector e of p = `layer_embedding_dim` channels for each layer, from a table of its own
and from the input x of the first layer:

    e = (RMSNorm(x Wᵀ / √d) + √p table[t]) / √2

A layer adds RMSNorm((act(y Gᵀ) · e) Pᵀ) to its output y. The matrices are not split over `tp`: each
device computes its own tokens of the residual stream.
"""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.config.model import ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.linear import Declare, Embedding, Linear, residual_std, times
from jaxforge.model.mlp import ACTIVATIONS
from jaxforge.model.norm import RMSNorm, build_norm


class LayerEmbeddings(nnx.Module):
    """The embeddings of all layers: a table [vocabulary, layers · p], and a projection of x."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c, width = config, config.layer_embedding_dim
        assert width is not None
        self.shape, self.scales = (c.n_layers, width), (c.dim**-0.5, width**0.5)
        channels = c.n_layers * width
        self.embedding = Embedding(c.vocab_size, channels, std=c.init_std, declare=declare)
        self.proj = Linear((channels, "latent"), (c.dim, "embed"), std=c.init_std, declare=declare)
        self.norm = RMSNorm(width, c.norm_eps, declare, unit_offset=c.norm_unit_offset)

    def __call__(
        self, x_BSD: Float[Array, "b s d"], tokens: Int[Array, "b s"]
    ) -> Float[Array, "l b s p"]:
        """Return the embeddings of each layer.

        Args:
            x_BSD: input of the first layer.
            tokens: ids of the tokens.
        """
        of_input, of_table = self.scales
        projected = times(self.proj(x_BSD), of_input).reshape(*tokens.shape, *self.shape)
        table = times(self.embedding(tokens, x_BSD.dtype), of_table).reshape(projected.shape)
        e_BSLP = times(self.norm(projected) + table, 0.5**0.5)
        return jnp.moveaxis(e_BSLP, 2, 0)


class LayerEmbedding(nnx.Module):
    """Part of a layer that adds a term to its output for the embedding of each token."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c, width = config, config.layer_embedding_dim
        assert width is not None
        embed, latent = (c.dim, "embed"), (width, "latent")
        self.gate = Linear(latent, embed, std=c.init_std, declare=declare)
        self.proj = Linear(embed, latent, std=residual_std(c), declare=declare)
        self.norm = build_norm(c, declare)
        self.activation = ACTIVATIONS[c.activation]

    def __call__(
        self,
        y_BSD: Float[Array, "b s d"],
        e_BSP: Float[Array, "b s p"],
        precision: LayerPrecision | None = None,
    ) -> Float[Array, "b s d"]:
        """Return the term to add to the output y of a layer."""
        gated = self.activation(self.gate(y_BSD, precision)) * e_BSP
        return self.norm(self.proj(gated, precision))
