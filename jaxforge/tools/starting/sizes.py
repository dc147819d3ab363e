"""Shapes of dense models, small to large, and how many parameters they have."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxforge.config.model import ModelConfig


class Shape(NamedTuple):
    """Of a decoder; the feed-forward follows `model.ffn_dim_multiplier`.

    Attributes:
        dim: width.
        n_layers: depth.
        n_heads: query heads.
        n_kv_heads: key/value heads.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int

    def parameters(self, vocab_size: int) -> int:
        """Of the model, with one matrix for embedding and head."""
        return parameters(ModelConfig(**self._asdict(), vocab_size=vocab_size, tie_embeddings=True))


SHAPES: Sequence[Shape] = (
    Shape(128, 4, 4, 2),
    Shape(256, 6, 8, 4),
    Shape(384, 8, 6, 3),
    Shape(512, 8, 8, 4),
    Shape(768, 12, 12, 4),
    Shape(1024, 16, 16, 4),
    Shape(1024, 24, 16, 4),
    Shape(1536, 24, 16, 8),
    Shape(2048, 24, 32, 8),
    Shape(2560, 32, 32, 8),
    Shape(4096, 32, 32, 8),
)
"""From a million parameters to seven billion, each with about twice those before it."""


def parameters(model: ModelConfig) -> int:
    """Of a model of Llama's shape, dense or with experts, but for the vectors of its norms."""
    heads, kv = model.n_heads * model.head_size, model.kv_heads * model.head_size
    attention = 2 * model.dim * (heads + kv)
    wide = (2 + model.is_gated) * model.dim
    layers = 0
    for has_experts in model.has_experts if model.is_moe else [False] * model.n_layers:
        feed_forward = model.ffn_dim
        if has_experts:
            feed_forward = model.num_experts * model.expert_dim + model.shared_expert_dim
            layers += model.num_experts * model.dim  # the router
        layers += attention + wide * feed_forward
    return layers + model.vocab_size * model.dim * (1 if model.tie_embeddings else 2)
