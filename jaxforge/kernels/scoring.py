"""Transformation of query-key products before the softmax, soft caps, and gradients of sinks."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Scoring(NamedTuple):
    """Transformation of products to scores cap · tanh(scale · q kᵀ / cap), as in Gemma 2.

    Source: Gemma 2, arXiv:2408.00118.

    Attributes:
        scale: factor of the products; None: 1 / √h.
        softcap: cap of the scores; None: no cap.
    """

    scale: float | None = None
    softcap: float | None = None

    def scale_of(self, head_size: int) -> float:
        """Return the factor of query-key products for a width of heads."""
        return head_size**-0.5 if self.scale is None else self.scale

    def capped(self, scores: Float[Array, "..."]) -> Float[Array, "..."]:
        """Return the scores of scaled products."""
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
            scores: capped scores.
            weights: softmax of the scores over all keys that a query sees.
            d_weights: gradients of the weights.
            delta: δ = rowsum(dO ∘ O) of each query.
            head_size: width of a head.
        """
        d_scores = weights * (d_weights - delta) * self.scale_of(head_size)
        if self.softcap is not None:
            d_scores *= soft_cap_slope(scores, self.softcap)
        return d_scores


PLAIN = Scoring()
"""Factor 1 / √h, without a cap."""


def product(dimensions: str, left: Array, right: Array) -> Float[Array, "..."]:
    """Return an einsum with sums in float32."""
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Return cap · tanh(x / cap), which lies between -cap and cap; x if the cap is None."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return the derivative of `soft_cap` as a function of its result; 0 for -inf (masked)."""
    return 1 - (jnp.maximum(capped, -cap) / cap) ** 2


def sink_gradients(
    sinks: Float[Array, "heads"] | None,
    lse: Float[Array, "b heads s"],
    delta: Float[Array, "b heads s"],
) -> Float[Array, "heads"] | None:
    """Return the gradient of sinks, -Σ exp(sink - lse) δ over the queries of each head.

    Args:
        sinks: sink logit of each head; None: no sinks.
        lse: logsumexp of the scores of each query, including the sink, float32.
        delta: δ = rowsum(dO ∘ O) of each query, float32.
    """
    if sinks is None:
        return None
    weighted_delta = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * delta
    return -jnp.sum(weighted_delta, axis=(0, 2)).astype(sinks.dtype)
