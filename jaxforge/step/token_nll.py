"""Cross-entropy of each token with a soft target, with a custom gradient.

    nll = logsumexp(z / T) - Σ_k p_k z[id_k] / T

z are the logits of a token, T is a temperature, and the target gives the probability p_k to the
vocabulary entry id_k. A label is the target with K = 1, p = 1.

As `chunked_cross_entropy`, it computes the logits of a part of the vocabulary at a time, and again
in the backward pass: four matrix products, and memory that does not grow with the vocabulary. Other
than in `cross_entropy.weighted_loss`, every token has its own cotangent, so that a loss may be any
function of the results. In a pipeline, each stage has a share of the vocabulary.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.config.train import TrainConfig
from jaxforge.kernels.scoring import product, soft_cap_slope
from jaxforge.model.transformer import Model, Params
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    constrain,
    merge_sequences,
    size_per_device,
    split_sequences,
)
from jaxforge.step.vocab_chunks import (
    Chunk,
    chunk_size,
    float32_zeros,
    join_vocab,
    split_vocab,
)

_HEAD = ("vocab", "embed")  # logical axes of the output head


class Target(NamedTuple):
    """Soft targets of tokens.

    Attributes:
        ids: vocabulary entries; negative ids match none.
        probabilities: their probabilities, which have no gradient.
    """

    ids: Int[Array, "... k"]
    probabilities: Float[Array, "... k"]

    @classmethod
    def of_labels(cls, labels: Int[Array, "b s"]) -> "Target":
        """Return the targets that give a label the probability 1."""
        return cls(labels[..., None], jnp.ones((*labels.shape, 1), jnp.float32))

    def weights(self, ids: Int[Array, "c"]) -> Float[Array, "*t c"]:
        """Return the probabilities of the entries `ids`: a comparison, local on any mesh."""
        is_entry = self.ids[..., None, :] == ids[:, None]
        return jnp.sum(jnp.where(is_entry, self.probabilities[..., None, :], 0.0), axis=-1)


class _Settings(NamedTuple):
    """Static settings.

    Attributes:
        chunk: entries of each device's share of the vocabulary in a chunk.
        temperature: the temperature T.
        softcap: `model.final_logit_softcap`.
    """

    chunk: int
    temperature: float
    softcap: float | None


def label_nll(
    config: TrainConfig,
    model: Model,
    params: Params,
    hidden_BSD: Float[Array, "b s d"],
    labels: Int[Array, "b s"],
) -> Float[Array, "b s"]:
    """Return -log p(label) of each token, float32; without meaning for negative labels.

    Args:
        config: the `[train]` section.
        model: the model.
        params: its parameters; of a pipeline stage, its share of the vocabulary.
        hidden_BSD: final hidden states.
        labels: the labels.
    """
    return token_nll(config, model, params, hidden_BSD, Target.of_labels(labels))


def token_nll(
    config: TrainConfig,
    model: Model,
    params: Params,
    hidden_BSD: Float[Array, "b s d"],
    target: Target,
    temperature: float = 1.0,
) -> Float[Array, "b s"]:
    """Return the cross-entropy of each token with its target at a temperature, float32.

    Arguments are those of `label_nll`.
    """
    head = model.head(params)
    hidden, (ids, probabilities) = split_sequences(hidden_BSD), map(split_sequences, target)
    tokens = size_per_device(hidden.shape[0], "tokens") * hidden.shape[1]
    chunk = chunk_size(config, tokens, size_per_device(head.shape[0], "vocab"))
    settings = _Settings(chunk, temperature, model.config.final_logit_softcap)
    flat = hidden.reshape(-1, hidden.shape[-1])
    targets = Target(*(x.reshape(len(flat), -1) for x in (ids, probabilities)))
    nll = _token_nll(settings, flat, head, targets)
    return merge_sequences(nll.reshape(hidden.shape[:2]), hidden_BSD.shape[0])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _token_nll(
    settings: _Settings, hidden_TD: Array, head_VD: Array, target: Target
) -> Float[Array, "t"]:
    return _forward(settings, hidden_TD, head_VD, target)[0]


def _forward(
    settings: _Settings, hidden_TD: Array, head_VD: Array, target: Target
) -> tuple[Float[Array, "t"], tuple[Any, ...]]:
    """Return the result and the residuals of the backward pass."""
    weights_VD = collectives.all_gather_weight(head_VD.astype(hidden_TD.dtype), _HEAD)

    # Invariant of the scan, over the entries of the chunks so far:
    #   maximum = max z/T,  total = Σ exp(z/T - maximum),  expected = Σ target · z/T
    def fold_chunk(carry: tuple[Array, Array, Array], chunk: Chunk) -> tuple[Any, None]:
        maximum, total, expected = carry
        logits = chunk.logits(hidden_TD, settings.softcap) / settings.temperature
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        total = total * jnp.exp(maximum - new_maximum)
        total += jnp.sum(jnp.exp(logits - new_maximum[:, None]), axis=-1)
        is_entry = chunk.ids >= 0  # logits of others are -inf
        terms = target.weights(chunk.ids) * jnp.where(is_entry, logits, 0.0)
        return (new_maximum, total, expected + jnp.sum(terms, axis=-1)), None

    zeros = jnp.sum(float32_zeros(hidden_TD, weights_VD)[:, :0], axis=-1)
    chunks = split_vocab(weights_VD, settings.chunk)
    (maximum, total, expected), _ = jax.lax.scan(
        fold_chunk, (zeros - jnp.inf, zeros, zeros), chunks
    )
    lse = maximum + jnp.log(total)
    if collectives.split_over("vocab"):
        top = collectives.pmax(lse, "vocab")
        lse = top + jnp.log(collectives.psum(jnp.exp(lse - top), "vocab"))
    nll = lse - collectives.psum(expected, "vocab")
    like = jnp.zeros((), head_VD.dtype)
    return nll, (hidden_TD, weights_VD, like, target, lse)


def _backward(
    settings: _Settings, saved: tuple[Any, ...], cotangent_T: Float[Array, "t"]
) -> tuple[Array, Array, None]:
    # d nll / d z = (softmax(z / T) - target) / T, times the slope of the soft cap
    hidden_TD, weights_VD, like, target, lse = saved
    scale = (cotangent_T / settings.temperature)[:, None]

    def fold_chunk(d_hidden: Array, chunk: Chunk) -> tuple[Array, Array]:
        logits = chunk.logits(hidden_TD, settings.softcap)
        p = jnp.exp(logits / settings.temperature - lse[:, None])
        gradient = scale * (p - target.weights(chunk.ids))
        if settings.softcap is not None:
            gradient *= soft_cap_slope(jnp.where(chunk.ids >= 0, logits, 0.0), settings.softcap)
        d_logits = jnp.where(chunk.ids >= 0, gradient, 0.0).astype(hidden_TD.dtype)
        d_hidden += product("tv,vd->td", d_logits, chunk.weights)
        return d_hidden, product("tv,td->vd", d_logits, hidden_TD).astype(like.dtype)

    chunks = split_vocab(weights_VD, settings.chunk)
    d_hidden, d_chunks = jax.lax.scan(fold_chunk, float32_zeros(hidden_TD, weights_VD), chunks)
    d_head = constrain(join_vocab(d_chunks, len(weights_VD)), *_HEAD)
    return collectives.psum(d_hidden, "vocab").astype(hidden_TD.dtype), d_head, None


_token_nll.defvjp(_forward, _backward)
