"""The loss of an update: its batch, its weights and its parts."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree, Shaped

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.config.job import JobConfig
from jaxforge.config.model import LAYERS
from jaxforge.config.train import TrainConfig
from jaxforge.kernels.masking import padding_of
from jaxforge.model.transformer import Model, Params
from jaxforge.step.losses import MicrobatchLoss
from jaxforge.step.mtp import further_weights, with_mtp_loss
from jaxforge.step.objectives import build_objective
from jaxforge.step.padded_batch import microbatch_count, reciprocal
from jaxforge.step.token_weights import token_weights, valid_tokens

Batch = dict[str, Shaped[Array, "m b ..."]]
"""`input_ids`, `labels` and, when packed, `segment_ids`: [microbatches, sequences, tokens].

If rows may be padded, `is_padding` is nonzero for padding tokens, which are ignored. A mixture has
`dataset_idx` [microbatches, sequences], or instead `dataset_mask`. Model and loss receive all other
fields of the data as well, one microbatch at a time. A padded batch has `n_microbatches`
(`step.padded_batch`).
"""


class Loss(NamedTuple):
    """Loss of an update, or of a part of it.

    Attributes:
        aux: loss terms, including those of layers; metrics and statistics of the loss.
        layers: metrics and statistics of the layers, by row of stacked parameters.
    """

    aux: AuxOutputs
    layers: AuxOutputs

    @property
    def value(self) -> Float[Array, ""]:
        """The value that training minimises."""
        return self.aux.loss

    @property
    def statistics(self) -> PyTree:
        """The statistics that update non-trainable state."""
        return {**self.aux.statistics, LAYERS: self.layers.statistics}


TokenWeights = tuple[Array, tuple[Array, ...]]
"""`token` and `further` of `LossWeights`, for each microbatch or for one."""


def with_dataset_mask(batch: Batch, n_datasets: int) -> Batch:
    """Replace `dataset_idx` of a batch by `dataset_mask` [m, b, datasets], one-hot."""
    if not n_datasets:
        return batch
    fields = {name: leaf for name, leaf in batch.items() if name != "dataset_idx"}
    return {**fields, "dataset_mask": batch["dataset_idx"][..., None] == jnp.arange(n_datasets)}


def update_loss_weights(
    batch: Batch, config: TrainConfig, scale: Array | None = None
) -> LossWeights:
    """Return the loss weights of an update; `token` and `further` have one entry per microbatch.

    A loss scale multiplies the weights, and so every value of a backward pass, including that of a
    loss with its own gradient.
    """
    labels, is_padding = batch["labels"], padding_of(batch)
    largest, rows, length = labels.shape
    microbatches = microbatch_count(batch)
    # All weights are functions of labels and padding, known before the first microbatch: gradients
    # need no division by a token count that only the last microbatch would complete.
    if is_padding is None:
        position = reciprocal(microbatches, largest, rows * length)
        sequence = reciprocal(microbatches, largest, rows)
    else:
        position = 1 / jnp.maximum(1, jnp.sum(~is_padding))
        sequence = 1 / jnp.maximum(1, jnp.sum(jnp.any(~is_padding, axis=-1)))
    weights = LossWeights(
        token=token_weights(valid_tokens(labels), config.loss_norm, microbatches),
        position=position,
        sequence=sequence,
        further=further_weights(batch, config.loss_norm, microbatches),
    )
    return weights if scale is None else jax.tree.map(lambda weight: weight * scale, weights)


def split_weights(weights: LossWeights) -> tuple[TokenWeights, tuple[Array | float, ...]]:
    """Split the weights of an update into those of each microbatch and the others."""
    return (weights.token, weights.further), (weights.position, weights.sequence)


def join_weights(tokens: TokenWeights, sums: Sequence[Array | float]) -> LossWeights:
    """Undo `split_weights` for a microbatch."""
    (token, further), (position, sequence) = tokens, sums
    return LossWeights(token, position, sequence, further)


def build_training_loss(config: JobConfig, model: Model) -> MicrobatchLoss:
    """Return the loss of `train.objective` with the term of multi-token prediction."""
    return with_mtp_loss(config.train, model, build_objective(config, model))


def unscale(grads: Params, loss: Loss, scale: Array | None) -> tuple[Params, Loss]:
    """Divide gradients and loss by the loss scale."""
    if scale is None:
        return grads, loss
    terms = {name: term / scale for name, term in loss.aux.loss_terms.items()}
    aux = loss.aux._replace(loss_terms=terms)
    return jax.tree.map(lambda grad: grad / scale, grads), loss._replace(aux=aux)
