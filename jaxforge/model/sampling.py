"""Choosing tokens from logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

LEAST_TEMPERATURE = 1e-5
"""Temperature below which sampling is greedy: logits divided by it would overflow float32, and
another token than the likeliest would need logits that differ by less than 1e-3."""


class Sampling(NamedTuple):
    """Settings of drawing the next token.

    Attributes:
        temperature: divides the logits; 0, or less than `LEAST_TEMPERATURE`, takes the likeliest
            token.
        top_k: keeps the k likeliest tokens, and those as likely as the last of them; 0: all.
        top_p: keeps the likeliest tokens until their probabilities reach p, at least one; 1: all.
        vocab_size: ids from it on, which a model may have for its size's sake, are never drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None


def sample(
    logits: Float[Array, "b v"], sampling: Sampling, keys: Key[Array, "b"]
) -> Int[Array, "b"]:
    """One token for each row: temperature, then top-k, then top-p, then a draw by its own key."""
    logits = logits[:, : sampling.vocab_size]
    if sampling.temperature < LEAST_TEMPERATURE:
        return jnp.argmax(logits, axis=-1)
    logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, sampling.top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if sampling.top_p < 1:
        order = jnp.argsort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        rank = jnp.argsort(order, axis=-1)
        is_kept = jnp.take_along_axis(before < sampling.top_p, rank, axis=-1)
        logits = jnp.where(is_kept | (rank == 0), logits, -jnp.inf)
    return jax.vmap(jax.random.categorical)(keys, logits)
