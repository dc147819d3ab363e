"""Multiply-adds of a mixer, which determine the FLOPs of a model."""

from typing import NamedTuple

from jaxforge.config.mixers import HeadSizes
from jaxforge.config.model import ModelConfig


class MixerCost(NamedTuple):
    """Multiply-adds of a mixer in one layer.

    Attributes:
        matrices: elements of the matrices that multiply each token.
        per_pair: multiply-adds of a query with a key that it sees, over all heads.
        per_token: other multiply-adds of a token, such as those with a recurrent state.
        per_selected: as `per_pair`, with a key that an indexer has selected for the query.
    """

    matrices: int
    per_pair: int = 0
    per_token: int = 0
    per_selected: int = 0


def attention_cost(config: ModelConfig, sizes: HeadSizes) -> MixerCost:
    """Return the cost of grouped queries: q, k, v, o and gate, and two products per pair."""
    c, width = config, sizes.head_size
    heads = (2 + c.attention_output_gate) * c.n_heads + sizes.projections * sizes.kv_heads
    return MixerCost(c.dim * heads * width, per_pair=2 * c.n_heads * width)
