"""Distillation from the logits of a teacher: `train.objective = "distillation"`.

    (1 - weight) · cross-entropy + weight · T² · KL(q || p)           (arXiv:1503.02531)

q are the teacher's probabilities at the temperature T, renormalized over its `top_k` largest
logits, and p are the student's over the whole vocabulary: KL = Σ_k q_k (log q_k - log p_k). The
factor T² keeps the size of the gradients, which fall as 1 / T². Both terms are means over labels.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.aux_outputs import AuxOutputs, LossWeights, Mean
from jaxforge.config.job import JobConfig
from jaxforge.data.packing import IGNORE
from jaxforge.data.teacher_logits import TEACHER_IDS, TEACHER_LOGITS
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.parallel.sharding import constrain, merge_sequences, size_per_device, split_sequences
from jaxforge.step.losses import MicrobatchLoss, build_loss
from jaxforge.step.token_nll import Target, token_nll

_LOGITS = 1 << 25  # teacher's logits per device at a time: 128 MiB


def top_logits(
    model: Model, params: Params, hidden_BSD: Float[Array, "b s d"], k: int
) -> tuple[Int[Array, "b s k"], Float[Array, "b s k"]]:
    """Return entries and values of the k largest logits of each token, largest first.

    Logits are computed for a part of the tokens at a time, with the whole vocabulary on a device.
    """
    batch, hidden = hidden_BSD.shape[0], split_sequences(hidden_BSD)
    rows, length, dim = hidden.shape
    size = size_per_device(rows, "tokens") * length * model.config.vocab_size
    least = min(-(-size // _LOGITS), length)
    n = next(n for n in range(least, length + 1) if length % n == 0)

    def part(hidden: Float[Array, "b s d"]) -> tuple[Array, Array]:
        values, ids = jax.lax.top_k(constrain(model.logits(params, hidden), "batch", None, None), k)
        return ids, values

    parts = hidden.reshape(rows, n, length // n, dim).swapaxes(0, 1)
    results = jax.lax.map(part, parts)
    ids, values = (
        merge_sequences(x.swapaxes(0, 1).reshape(rows, length, k), batch) for x in results
    )
    return ids, values


def build_distillation(config: JobConfig, model: Model) -> MicrobatchLoss:
    """Return the loss of `train.objective = "distillation"`."""
    section, label_loss = config.distillation, build_loss(config.train, model)
    t, weight = section.temperature, section.weight

    def loss(params: Params, hidden: Array, batch: Batch, loss_weights: LossWeights) -> AuxOutputs:
        label_weights = loss_weights._replace(token=(1 - weight) * loss_weights.token)
        aux = label_loss(params, hidden, batch, label_weights)
        log_q = jax.nn.log_softmax(batch[TEACHER_LOGITS] / t)
        q = jnp.exp(log_q)
        nll_BS = token_nll(config.train, model, params, hidden, Target(batch[TEACHER_IDS], q), t)
        is_valid = batch["labels"] != IGNORE
        kl = jnp.sum(jnp.where(is_valid, jnp.sum(q * log_q, axis=-1) + nll_BS, 0.0))
        terms = {**aux.loss_terms, "kl": weight * t**2 * loss_weights.token * kl}
        mean = Mean(jax.lax.stop_gradient(kl), jnp.sum(is_valid, dtype=jnp.float32))
        return aux._replace(loss_terms=terms, metrics={**aux.metrics, "distillation/kl": mean})

    return loss
