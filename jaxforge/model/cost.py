"""Multiply-adds of a mixer, which determine the FLOPs of a model."""

from typing import NamedTuple

from jaxforge.config.model import ModelConfig


class MixerCost(NamedTuple):
    """Multiply-adds of a mixer in one layer.

    Attributes:
        matrices: elements of the matrices that multiply each token.
        per_pair: multiply-adds of a query with a key that it attends to, over all heads.
        per_token: other multiply-adds of a token, such as those with a recurrent state.
    """

    matrices: int
    per_pair: int = 0
    per_token: int = 0


def attention_cost(config: ModelConfig) -> MixerCost:
    """Return the cost of grouped-query attention: q, k, v and o, and two products per pair."""
    c = config
    heads = 2 * c.n_heads + 2 * c.kv_heads
    return MixerCost(c.dim * heads * c.head_size, per_pair=2 * c.n_heads * c.head_size)
