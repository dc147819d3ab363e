"""Loss of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2).

    loss = cross-entropy of the next token + λ / D · Σ_k cross-entropy of depth k

λ is `train.mtp_loss_weight`, D is `model.mtp_depth`. The cross-entropy of a depth is the mean over
its valid labels that `train.loss_norm` selects. Depth k predicts the token k after the next one:

    position           0    1    2    3    4
    document           A    A    A    A    B
    input              a    b    c    d    e
    label              b    c    d    -    f
    token of depth 1   b    c    d    e    -     embedded by the module
    label of depth 1   c    d    -    -    -     "-" is ignored

The label of depth k at position i is the label of position i + k. It is ignored beyond the row, and
if i + k is in another document. Such positions are the last ones of their document, so that a token
of another document, which the module embeds there, reaches no valid label.
"""

import functools

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.aux_outputs import AuxOutputs, LossTerms, LossWeights, Mean
from jaxforge.config.model import MTP, MTP_LOSS, ModelConfig
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.kernels.masking import padding_of
from jaxforge.model.transformer import FURTHER_TOKENS, Batch, Model, Params
from jaxforge.step.cross_entropy import weighted_loss
from jaxforge.step.logit_tiles import tiles_of
from jaxforge.step.losses import MicrobatchLoss
from jaxforge.step.token_weights import token_weights, valid_tokens

FURTHER_LABELS = "further_labels"
"""Field of a batch: the labels of each depth [microbatches, b, s, depths]."""


def with_further_tokens(batch: dict[str, Array], config: ModelConfig) -> dict[str, Array]:
    """Add tokens and labels of each depth to a batch [microbatches, b, s].

    Must be called before the tokens of a sequence are spread over devices.
    """
    if not config.mtp_depth:
        return batch
    inputs, labels, segment_ids = batch["input_ids"], batch["labels"], batch.get("segment_ids")
    tokens, further_labels = [], []
    for depth in range(1, config.mtp_depth + 1):
        depth_labels = _shifted(labels, depth, IGNORE)
        if segment_ids is not None:
            is_same = segment_ids == _shifted(segment_ids, depth, -1)
            depth_labels = jnp.where(is_same, depth_labels, IGNORE)
        tokens.append(_shifted(inputs, depth, 0))
        further_labels.append(depth_labels)
    fields = {FURTHER_TOKENS: tokens, FURTHER_LABELS: further_labels}
    return {**batch, **{name: jnp.stack(x, axis=-1) for name, x in fields.items()}}


def _shifted(x: Int[Array, "m b s"], by: int, fill: int) -> Int[Array, "m b s"]:
    """Return the values `by` positions later, and `fill` beyond the row."""
    return jnp.pad(x[..., by:], ((0, 0), (0, 0), (0, by)), constant_values=fill)[..., : x.shape[2]]


def further_weights(
    batch: Batch, norm: str, microbatches: Int[Array, ""] | int
) -> tuple[Float[Array, "m"], ...]:
    """Return the weight of a token of each microbatch in the loss of each depth.

    Args:
        batch: all microbatches of an update.
        norm: `train.loss_norm`.
        microbatches: number of microbatches without padding.
    """
    labels = batch.get(FURTHER_LABELS)
    if labels is None:
        return ()
    counts = (valid_tokens(labels[..., depth]) for depth in range(labels.shape[-1]))
    return tuple(token_weights(count, norm, microbatches) for count in counts)


def with_mtp_loss(config: TrainConfig, model: Model, loss: MicrobatchLoss) -> MicrobatchLoss:
    """Return a loss with the term `MTP_LOSS`; `loss` itself without modules of prediction.

    The metric of the same name has the mean cross-entropy of each depth [depths].

    Raises:
        UserError: a registered model declares no modules.
    """
    depths = model.config.mtp_depth
    if not depths:
        return loss
    if not model.declares_mtp:
        raise UserError(
            f"model.mtp_depth = {depths}: the network of model.model_type = "
            f'"{model.config.model_type}" declares no modules of multi-token prediction. Set '
            "model.mtp_depth = 0, or declare network.PredictionModules as its attribute mtp"
        )

    def with_further_losses(
        params: Params, hidden: Array, batch: Batch, loss_weights: LossWeights
    ) -> AuxOutputs:
        aux = loss(params, hidden, batch, loss_weights)
        labels, padding = batch[FURTHER_LABELS], padding_of(batch)
        terms, means, statistics = [], [], {}
        further = model.predict_further(params, hidden, batch, loss_weights)
        for depth, (head_input, of_block) in enumerate(further):
            head = model.head(params)
            tiles = tiles_of(config, batch["labels"], head, model)
            token = config.mtp_loss_weight / depths * loss_weights.further[depth]
            depth_labels = labels[..., depth]
            weighted = weighted_loss(
                tiles, head_input, head, depth_labels, LossWeights(token), None, padding
            )
            terms.append(weighted.cross_entropy)
            means.append(Mean(weighted.cross_entropy, token * valid_tokens(depth_labels)))
            statistics[str(depth)] = of_block.statistics
            aux = _with_terms(aux, of_block.loss_terms)
        return AuxOutputs(
            _with_terms(aux, {MTP_LOSS: functools.reduce(jnp.add, terms)}).loss_terms,
            {**aux.metrics, MTP_LOSS: Mean(*map(jnp.stack, zip(*means, strict=True)))},
            {**aux.statistics, MTP: statistics},
        )

    return with_further_losses


def _with_terms(aux: AuxOutputs, terms: LossTerms) -> AuxOutputs:
    """Return auxiliary outputs with the values of loss terms added."""
    summed = {name: aux.loss_terms.get(name, 0.0) + term for name, term in terms.items()}
    return aux._replace(loss_terms={**aux.loss_terms, **summed})
