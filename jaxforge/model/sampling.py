"""Sampling of tokens from logits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

LEAST_TEMPERATURE = 1e-5
"""Temperature below which sampling is greedy. Division by a smaller one would overflow float32, and
only tokens within 1e-3 of the largest logit could be drawn."""


class Sampling(NamedTuple):
    """Settings of sampling.

    Attributes:
        temperature: divisor of the logits; below `LEAST_TEMPERATURE`, such as 0, sampling is
            greedy.
        top_k: draw from the k likeliest tokens and ties with the last of them; 0: from all.
        top_p: draw from the likeliest tokens whose probabilities reach p, at least one; 1: from
            all.
        vocab_size: ids from this one on, which pad the vocabulary of a model, are never drawn.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    vocab_size: int | None = None


def sample(
    logits: Float[Array, "b v"], sampling: Sampling, keys: Key[Array, "b"]
) -> Int[Array, "b"]:
    """Draw a token for each row by its own key: temperature, then top-k, then top-p."""
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
