"""Scale and soft cap of attention scores, soft cap of logits, and gradients of sinks."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Scoring(NamedTuple):
    """Scores cap · tanh(scale · q kᵀ / cap), as in Gemma 2 (arXiv:2408.00118).

    Attributes:
        scale: factor of query-key products; None: 1 / √h.
        softcap: soft cap; None: scores are not capped.
    """

    scale: float | None = None
    softcap: float | None = None

    def scale_of(self, head_size: int) -> float:
        """Return the factor of query-key products for heads of this width."""
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
        """Return the gradients of query-key products.

        Args:
            scores: capped scores.
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
"""Scale 1 / √h without a cap."""


def product(dimensions: str, left: Array, right: Array) -> Float[Array, "..."]:
    """Return an einsum that is accumulated in float32."""
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)


def soft_cap(x: Float[Array, "..."], cap: float | None) -> Float[Array, "..."]:
    """Return cap · tanh(x / cap), which is between -cap and cap; without a cap, x itself."""
    return x if cap is None else cap * jnp.tanh(x / cap)


def soft_cap_slope(capped: Float[Array, "..."], cap: float) -> Float[Array, "..."]:
    """Return the derivative of `soft_cap` from its result; 0 for masked scores of -inf."""
    return 1 - (jnp.maximum(capped, -cap) / cap) ** 2


def sink_gradients(
    sinks: Float[Array, "heads"] | None,
    lse: Float[Array, "b heads s"],
    delta: Float[Array, "b heads s"],
) -> Float[Array, "heads"] | None:
    """Return -Σ exp(sink - lse) δ over the rows of each head, in the dtype of the sinks.

    Args:
        sinks: an extra logit per head; None: there are none.
        lse: logsumexp of the scores of each query and the sink, float32.
        delta: rowsum(dO ∘ O) of each query, float32.
    """
    if sinks is None:
        return None
    of_rows = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse) * delta
    return -jnp.sum(of_rows, axis=(0, 2)).astype(sinks.dtype)
