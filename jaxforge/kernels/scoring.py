"""Scale, soft cap and ALiBi of attention scores, soft cap of logits, and gradients of sinks."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

Slopes = Float[Array, "heads"] | None
"""Slope of ALiBi of each query head; None: there is no ALiBi."""


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


def alibi_slopes(heads: int, max_bias: float = 8.0) -> np.ndarray:
    """Return the slopes of ALiBi (arXiv:2108.12409, section 3), float32.

    For n = 2^k heads, head i of 1 to n has 2^(-max_bias · i / n). Otherwise the first 2^k heads,
    with the largest 2^k below n, have the slopes of 2^k heads, and the others every second slope of
    2^(k + 1) heads, from the first on. BLOOM and MPT do the same.
    """
    most = 2 ** (heads - 1).bit_length()  # the next power of two
    slopes = 2.0 ** (-max_bias * np.arange(1, most + 1) / most)
    if most != heads:
        slopes = np.concatenate([slopes[1::2], slopes[::2]])[:heads]
    return slopes.astype(np.float32)


def alibi_bias(
    slopes: Slopes, queries: Int[Array, "*b s"], keys: Int[Array, "*b t"]
) -> Float[Array, "*b heads s t"] | None:
    """Return the term slope · (key - query) of the scores from positions; None without slopes."""
    if slopes is None:
        return None
    back = (keys[..., None, :] - queries[..., :, None]).astype(jnp.float32)
    return slopes[:, None, None] * back[..., None, :, :]


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
