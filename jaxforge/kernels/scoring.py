"""Transformation of query-key products before the softmax, and soft caps of logits.

The gradient of sinks, logits that join the scores.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Scoring(NamedTuple):
    """Scores are cap · tanh(scale · q kᵀ / cap), as in Gemma 2 (arXiv:2408.00118).

    Attributes:
        scale: what multiplies products; None: 1 / √h.
        softcap: the cap; None: scores are not capped.
    """

    scale: float | None = None
    softcap: float | None = None

    def scale_of(self, head_size: int) -> float:
        """Return the factor of query-key products for heads of this width."""
        return head_size**-0.5 if self.scale is None else self.scale

    def capped(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Scores, given scaled products."""
        return soft_cap(scores, self.softcap)

    def score_gradients(
        self,
        scores: Float[Array, "*b s t"],
        weights: Float[Array, "*b s t"],
        d_weights: Float[Array, "*b s t"],
        delta: Float[Array, "*b s 1"],
        head_size: int,
    ) -> Float[Array, "*b s t"]:
        """Return the gradients of products of queries and keys.

        Args:
            scores: capped.
            weights: softmax of the scores over all keys that a query sees.
            d_weights: gradients of the weights.
            delta: rowsum(dO ∘ O) of each query.
            head_size: width of a head.
        """
        d_scores = weights * (d_weights - delta) * self.scale_of(head_size)
        if self.softcap is not None:
            d_scores *= soft_cap_slope(scores, self.softcap)
        return d_scores


PLAIN = Scoring()
"""1 / √h, without a cap."""


def product(dimensions: str, left: Array, right: Array) -> Float[Array, "..."]:
    """Return an einsum that is accumulated in float32."""
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Gives cap · tanh(x / cap), which lies between -cap and cap; None leaves x as it is."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """The derivative of `soft_cap`, from what it gave; of -inf, which nothing gives, 0."""
    return 1 - (jnp.maximum(capped, -cap) / cap) ** 2


def sink_gradients(
    sinks: Float[Array, "heads"] | None,
    lse: Float[Array, "b heads s"],
    delta: Float[Array, "b heads s"],
) -> Float[Array, "heads"] | None:
    """-Σ exp(sink - lse) δ over the rows of each head, in the dtype of the sinks.

    Args:
        sinks: a logit of each head, where there are any.
        lse: log Σ exp of the scores of each query and the sink, float32.
        delta: rowsum(dO ∘ O) of each query, float32.
    """
    if sinks is None:
        return None
    taken = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * delta
    return -jnp.sum(taken, axis=(0, 2)).astype(sinks.dtype)
