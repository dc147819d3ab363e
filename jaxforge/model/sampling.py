"""Choosing tokens from logits, and decoding with a cache."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxforge.model.attention import KVCache
from jaxforge.model.transformer import Model, Params


class Sampling(NamedTuple):
    """How the next token is drawn.

    Attributes:
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: keeps the k likeliest tokens, and those as likely as the last of them; 0: all.
        top_p: keeps the likeliest tokens until their probabilities reach p, at least one; 1: all.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


def sample(logits: Float[Array, "b v"], how: Sampling, key: Array) -> Int[Array, "b"]:
    """One token for each row: temperature, then top-k, then top-p, then a draw."""
    if how.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / how.temperature
    if 0 < how.top_k < logits.shape[-1]:
        threshold = jax.lax.top_k(logits, how.top_k)[0][:, -1:]
        logits = jnp.where(logits < threshold, -jnp.inf, logits)
    if how.top_p < 1:
        order = jnp.argsort(logits, axis=-1, descending=True)
        probabilities = jax.nn.softmax(jnp.take_along_axis(logits, order, axis=-1), axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        rank = jnp.argsort(order, axis=-1)
        kept = jnp.take_along_axis(before < how.top_p, rank, axis=-1)
        logits = jnp.where(kept | (rank == 0), logits, -jnp.inf)
    return jax.random.categorical(key, logits, axis=-1)


def generate(
    model: Model,
    params: Params,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    how: Sampling,
    *,
    eos_id: int | None = None,
    seed: int = 0,
) -> Iterator[list[int | None]]:
    """Continues every prompt at once, one token a turn.

    Prompts may differ in length: each row of the batch keeps its own position.

    Args:
        model: the model.
        params: its parameters.
        prompts: token ids, at least one each.
        max_tokens: tokens to add to each prompt.
        how: how tokens are drawn.
        eos_id: ends a row; None: rows end only by `max_tokens`.
        seed: seed of the draws.

    Yields:
        The next token of each row; None for rows that have ended.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    padded = np.zeros((len(prompts), lengths.max()), np.int32)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = prompt
    positions = np.broadcast_to(np.arange(padded.shape[1]), padded.shape)
    cache = model.empty_cache(len(prompts), padded.shape[1] + max_tokens)
    # What a short prompt's padding leaves in the cache is overwritten before it can be seen.
    logits, cache = _extend(model, params, jnp.asarray(padded), jnp.asarray(positions), cache)
    logits = logits[jnp.arange(len(prompts)), lengths - 1]
    ended = np.zeros(len(prompts), bool)
    for turn, key in enumerate(jax.random.split(jax.random.key(seed), max_tokens)):
        tokens = _sample(logits, how, key)
        row_tokens = np.asarray(tokens)
        ended |= row_tokens == eos_id
        yield [None if end else int(t) for t, end in zip(row_tokens, ended, strict=True)]
        if ended.all() or turn == max_tokens - 1:
            return
        at = jnp.asarray(lengths + turn)[:, None]
        logits, cache = _extend(model, params, tokens[:, None], at, cache)
        logits = logits[:, -1]


@partial(jax.jit, static_argnums=0, donate_argnums=4)
def _extend(
    model: Model, params: Params, tokens: Array, positions: Array, cache: KVCache
) -> tuple[Array, KVCache]:
    return model.extend(params, tokens, positions, cache)


_sample = jax.jit(sample, static_argnums=1)
