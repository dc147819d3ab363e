"""Direct preference optimization: `train.objective = "dpo"` (arXiv:2305.18290).

    h = [log p(chosen) - log p(rejected)] - [log q(chosen) - log q(rejected)]

p is the trained model and q the reference. Per pair, with s the label smoothing:

    sigmoid  -(1 - s) log σ(beta h) - s log σ(-beta h)      (s > 0: conservative DPO)
    ipo      (h - 1 / (2 beta))²                            (arXiv:2310.12036)
    hinge    max(0, 1 - beta h)                             (arXiv:2305.10425)
    rpo      + rpo_alpha · (-log p(chosen) / tokens of the answer)   (arXiv:2404.19733)

The loss of an update is the mean over its pairs. With `dpo.length_normalized`, log-probabilities of
answers are means over their tokens. A sequence holds whole pairs, each as two documents: chosen,
rejected (`data.preference_shards`). A pair without a label in one of its answers does not count.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import AuxOutputs, LossWeights, Mean, Metric
from jaxforge.config.fine_tuning import DpoConfig
from jaxforge.config.job import JobConfig
from jaxforge.data.packing import IGNORE
from jaxforge.kernels.masking import padding_of
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.parallel import collectives
from jaxforge.step.losses import DATASET_NLL, MicrobatchLoss
from jaxforge.step.token_nll import label_nll

REFERENCE_NLL = "reference_nll"
"""Field of a batch: -log q of each label by the reference [m, b, s]."""

PAIR_SCALE = "pair_scale"
"""Field of a batch: sequences divided by pairs of the update [m, b], the same everywhere."""


class Answers(NamedTuple):
    """Sums over the two answers of each pair of each row.

    Attributes:
        chosen: sums over chosen answers.
        rejected: sums over rejected answers.
    """

    chosen: Float[Array, "... pairs"]
    rejected: Float[Array, "... pairs"]


def sum_answers(values: Float[Array, "*b s"], segment_ids: Int[Array, "*b s"]) -> Answers:
    """Sum values of tokens over documents: even documents of a row are chosen, odd are rejected."""
    pairs = (segment_ids.shape[-1] + 1) // 2  # a window of s + 1 entries holds no more
    is_document = segment_ids[..., None] == jnp.arange(2 * pairs)
    sums = jnp.sum(jnp.where(is_document, values[..., None], 0.0), axis=-2)
    if collectives.split_over("context"):  # devices that share the tokens of a row
        sums = collectives.psum(sums, "context")
    return Answers(sums[..., 0::2], sums[..., 1::2])


def answer_lengths(batch: Batch) -> Answers:
    """Return the number of labels of each answer, as floats."""
    is_valid = (batch["labels"] != IGNORE).astype(jnp.float32)
    return sum_answers(is_valid, batch["segment_ids"])


def is_pair(lengths: Answers) -> Bool[Array, "*b pairs"]:
    """Return which entries are pairs with labels in both answers."""
    return (lengths.chosen > 0) & (lengths.rejected > 0)


def pair_scale(batch: Batch) -> Float[Array, "m b"]:
    """Return `PAIR_SCALE` of a whole batch [microbatches, rows, tokens]."""
    is_padding = padding_of(batch)
    rows = jnp.float32(batch["labels"].shape[0] * batch["labels"].shape[1])
    if is_padding is not None:  # as `update_loss_weights` counts sequences
        rows = jnp.maximum(1, jnp.sum(jnp.any(~is_padding, axis=-1))).astype(jnp.float32)
    pairs = jnp.sum(is_pair(answer_lengths(batch)), dtype=jnp.float32)
    return jnp.broadcast_to(rows / jnp.maximum(1, pairs), batch["labels"].shape[:2])


def pair_losses(config: DpoConfig, h: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return the loss of each pair, given h."""
    if config.loss == "ipo":
        return (h - 1 / (2 * config.beta)) ** 2
    if config.loss == "hinge":
        return jax.nn.relu(1 - config.beta * h)
    smoothing, logits = config.label_smoothing, config.beta * h
    losses = -(1 - smoothing) * jax.nn.log_sigmoid(logits)
    return losses - smoothing * jax.nn.log_sigmoid(-logits) if smoothing else losses


def build_dpo(config: JobConfig, model: Model) -> MicrobatchLoss:
    """Return the loss of `train.objective = "dpo"`."""
    section = config.dpo

    def loss(params: Params, hidden: Array, batch: Batch, loss_weights: LossWeights) -> AuxOutputs:
        is_valid = batch["labels"] != IGNORE
        nll_BS = label_nll(config.train, model, params, hidden, batch["labels"])
        nll_BS = jnp.where(is_valid, nll_BS, 0.0)
        ratio_BS = jnp.where(is_valid, batch[REFERENCE_NLL] - nll_BS, 0.0)  # log p / q
        lengths, segment_ids = answer_lengths(batch), batch["segment_ids"]
        ratios, counts = sum_answers(ratio_BS, segment_ids), is_pair(lengths)
        if section.length_normalized:
            ratios = Answers(*(x / jnp.maximum(1, n) for x, n in zip(ratios, lengths, strict=True)))
        h = ratios.chosen - ratios.rejected
        share = 1 / collectives.axis_size("context")  # these devices have the same pairs

        def total(values: Float[Array, "b pairs"]) -> Float[Array, ""]:
            return share * jnp.sum(jnp.where(counts, values, 0.0))

        scale_B1, weight = batch[PAIR_SCALE][:, None], loss_weights.sequence
        terms = {"dpo": weight * total(scale_B1 * pair_losses(section, h))}
        if section.rpo_alpha:
            means = sum_answers(nll_BS, segment_ids).chosen / jnp.maximum(1, lengths.chosen)
            terms["rpo"] = section.rpo_alpha * weight * total(scale_B1 * means)
        values = {
            "loss": pair_losses(section, h),
            "accuracy": (h > 0).astype(jnp.float32),
            "margin": section.beta * h,
            "chosen_reward": section.beta * ratios.chosen,
            "rejected_reward": section.beta * ratios.rejected,
        }
        n = total(jnp.ones_like(h))
        metrics: dict[str, Metric] = {
            f"dpo/{name}": Mean(total(x), n) for name, x in values.items()
        }
        if "dataset_mask" in batch:
            by_row = jnp.sum(nll_BS, axis=-1)[:, None]
            metrics[DATASET_NLL] = jnp.sum(jnp.where(batch["dataset_mask"], by_row, 0.0), axis=0)
        return AuxOutputs(terms, jax.lax.stop_gradient(metrics))

    return loss
