"""Token-weighted loss. Sums travel with their weights until the last division.

    loss = Σ_m scale_m · Σ_{valid tokens of microbatch m} -log p(label)
           + z_loss_weight · mean over all positions of logsumexp(logits)²

`loss_norm = "tokens"` gives every valid token of an update the same weight; `"microbatch"` is the
mean over microbatches of each one's token mean, as in PyTorch loops that divide by accumulation.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import project
from jaxforge.parallel.sharding import constrain, size_per_device

_DEFAULT_CHUNK = 4096  # tokens, where ce_chunk_size = 0


class LossSum(NamedTuple):
    """A sum and what to divide it by. Sums of two add; means would not.

    Attributes:
        total: Σ -log p(label) over valid tokens, float32.
        weight: number of valid tokens, float32.
        square_lse: Σ logsumexp(logits)² over all positions, valid or not, float32.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    square_lse: Float[Array, ""]

    def plus(self, other: "LossSum") -> "LossSum":
        """Sum by sum."""
        return jax.tree.map(jnp.add, self, other)

    @classmethod
    def zero(cls) -> "LossSum":
        """The neutral element."""
        return cls(*(jnp.zeros((), jnp.float32) for _ in cls._fields))


def valid_tokens(labels: Int[Array, "... b s"]) -> Float[Array, "..."]:
    """How many labels of each batch count, as float32."""
    return jnp.sum(labels != IGNORE, axis=(-2, -1), dtype=jnp.float32)


def token_scales(weights: Float[Array, "m"], norm: str) -> Float[Array, "m"]:
    """Weight of one token of each microbatch in the loss of the update.

    Args:
        weights: valid tokens of each microbatch, over all devices.
        norm: `train.loss_norm`.
    """
    divisor = weights * weights.shape[0] if norm == "microbatch" else jnp.sum(weights)
    # Nothing to learn from: no division by zero, no gradient.
    return jnp.where(weights > 0, 1.0 / jnp.maximum(divisor, 1.0), 0.0)


def cross_entropy(
    hidden_BSD: Float[Array, "b s d"],
    head_VD: Float[Array, "v d"],
    labels_BS: Int[Array, "b s"],
    config: TrainConfig,
) -> LossSum:
    """Sums of the loss of a batch from its final hidden states.

    `chunked_cross_entropy` computes the logits of `ce_chunk_size` tokens per device at a time and
    recomputes them in the backward pass: no array of size tokens x vocabulary ever exists.
    """
    if config.loss_fn == "cross_entropy":
        return _loss_sum(hidden_BSD, head_VD, labels_BS, jnp.ones(labels_BS.shape[1], bool))
    rows = size_per_device(labels_BS.shape[0], "batch")
    chunk = (config.ce_chunk_size or _DEFAULT_CHUNK) // rows
    return _chunked(hidden_BSD, head_VD, labels_BS, max(1, min(chunk, labels_BS.shape[1])))


def _chunked(hidden_BSD: Array, head_VD: Array, labels_BS: Array, chunk: int) -> LossSum:
    """Slices along the sequence, which no device axis splits here; the last slice is padded."""
    batch, length, _ = hidden_BSD.shape
    n_chunks = -(-length // chunk)
    pad = ((0, 0), (0, n_chunks * chunk - length))
    hidden = jnp.pad(hidden_BSD, (*pad, (0, 0))).reshape(batch, n_chunks, chunk, -1)
    labels = jnp.pad(labels_BS, pad, constant_values=IGNORE).reshape(batch, n_chunks, chunk)
    real = (jnp.arange(n_chunks * chunk) < length).reshape(n_chunks, chunk)

    @jax.checkpoint
    def one(total: LossSum, piece: tuple[Array, Array, Array]) -> tuple[LossSum, None]:
        hidden_BCD, labels_BC, real_C = piece
        return total.plus(_loss_sum(hidden_BCD, head_VD, labels_BC, real_C)), None

    pieces = (hidden.swapaxes(0, 1), labels.swapaxes(0, 1), real)
    # The loss of no tokens: zeros that vary over the same mesh axes as the sums.
    zero = _loss_sum(hidden_BSD[:, :0], head_VD, labels_BS[:, :0], real[0, :0])
    return jax.lax.scan(one, zero, pieces)[0]


def _loss_sum(hidden_BSD: Array, head_VD: Array, labels_BS: Array, real_S: Array) -> LossSum:
    logits_BSV = project(hidden_BSD, head_VD)
    lse_BS = jax.nn.logsumexp(logits_BSV, axis=-1)
    # A comparison, not a gather: it stays local when the vocabulary is split over devices.
    is_label = jnp.arange(logits_BSV.shape[-1]) == labels_BS[..., None]
    label_logits_BS = jnp.sum(jnp.where(is_label, logits_BSV, 0.0), axis=-1)
    valid_BS = constrain(labels_BS != IGNORE, "batch", None)
    return LossSum(
        total=jnp.sum(jnp.where(valid_BS, lse_BS - label_logits_BS, 0.0)),
        weight=jnp.sum(valid_BS, dtype=jnp.float32),
        square_lse=jnp.sum(jnp.where(real_S, lse_BS * lse_BS, 0.0)),
    )
