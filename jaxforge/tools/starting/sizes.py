"""Shapes of dense models, from small to large, and their numbers of parameters."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxforge.config.model import ModelConfig
from jaxforge.model.flops import matrix_elements


class Shape(NamedTuple):
    """Shape of a decoder; the feed-forward follows `model.ffn_dim_multiplier`.

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
        """Return the parameters of the model, with one matrix for embedding and head."""
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
"""Shapes from a million to seven billion parameters, growing by a factor of about two."""


def parameters(model: ModelConfig) -> int:
    """Return the parameters of a Llama-style model, dense or with experts, without norm vectors."""
    matrices = matrix_elements(model, 2 + model.is_gated, model.num_experts)  # with the head
    has_experts = (*model.has_experts, *model.has_experts[-1:] * model.mtp_depth)
    routers = model.num_experts * model.dim * sum(has_experts)
    tables = (0 if model.tie_embeddings else 1) - model.mtp_depth  # depths share the head
    return matrices + routers + tables * model.vocab_size * model.dim
