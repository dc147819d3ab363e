"""Losses of `train.loss_fn`; `register_loss` adds a custom loss."""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.config.train import CROSS_ENTROPIES, LOSSES, TrainConfig
from jaxforge.errors import UserError
from jaxforge.kernels.masking import padding_of
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.step.cross_entropy import cross_entropy, weighted_loss
from jaxforge.step.logit_tiles import tiles_of

LossFunction = Callable[
    [Params, Float[Array, "b s d"], Batch, LossWeights], Float[Array, ""] | AuxOutputs
]
"""(parameters, final hidden states, microbatch, loss_weights) -> part of the update's loss.

The parameters are those of the whole model. A pipeline stage passes its share of the parameters
outside of the layers. `model.logits` computes (soft-capped) logits from them: in a stage, the
logits of its share. The microbatch has `labels` and all other fields of the data. `AuxOutputs`
returns several terms by name, and metrics.
"""

LossBuilder = Callable[[TrainConfig, Model], LossFunction]
"""(the `[train]` section, the model) -> loss."""

MicrobatchLoss = Callable[[Params, Float[Array, "b s d"], Batch, LossWeights], AuxOutputs]
"""As `LossFunction`; for a mixture with the metric `DATASET_NLL`."""

DATASET_NLL = "dataset_nll"
"""Metric of Σ -log p(label) of each dataset of a mixture."""

_vocab_share_builders: set[Callable[[TrainConfig, Model], MicrobatchLoss]] = set()


def register_loss(
    name: str, *, takes_vocab_share: bool = False
) -> Callable[[LossBuilder], LossBuilder]:
    """Return a decorator that registers the builder of a loss for `train.loss_fn`.

    JAX differentiates the loss, unless it defines its own gradient (`jax.custom_vjp`). It computes
    logits with `model.logits(params, hidden)`, which applies head and `final_logit_softcap`. Or it
    calls `step.cross_entropy.weighted_loss` with `step.logit_tiles.tiles_of`, which applies both.
    Training minimises the sum of the loss's terms; each term is logged by its name. Evaluation and
    a mixture's losses by dataset still measure cross-entropy. For the losses by dataset, the logits
    are computed a second time.

    Args:
        name: name of the loss in the config.
        takes_vocab_share: True if the loss accepts a pipeline stage's share of the head and reduces
            over the shares itself (`parallel.collectives.psum` and `pmax` over "vocab"). Other
            losses cannot be used with pipeline stages.
    """

    def add(builder: LossBuilder) -> LossBuilder:
        build = LOSSES.register(name)(_with_dataset_nll(name, builder))
        if takes_vocab_share:
            _vocab_share_builders.add(build)
        return builder

    return add


def build_loss(config: TrainConfig, model: Model) -> MicrobatchLoss:
    """Return the loss of `train.loss_fn`.

    Raises:
        UserError: the model has pipeline stages, and the loss needs the whole vocabulary.
    """
    builder = LOSSES[config.loss_fn]
    if model.stack.stages > 1 and builder not in _vocab_share_builders:
        raise UserError(
            f'train.loss_fn = "{config.loss_fn}" needs the logits of the whole vocabulary, but '
            f"distributed.pp = {model.stack.stages} gives each stage only a share. Set "
            "distributed.pp = 1, or register the loss with takes_vocab_share"
        )
    return builder(config, model)


def _with_dataset_nll(
    name: str, builder: LossBuilder
) -> Callable[[TrainConfig, Model], MicrobatchLoss]:
    """Add the cross-entropy of each dataset of a mixture to the metrics of a custom loss."""

    @functools.wraps(builder)
    def build(config: TrainConfig, model: Model) -> MicrobatchLoss:
        custom_loss = builder(config, model)

        def loss(
            params: Params, hidden: Array, batch: Batch, loss_weights: LossWeights
        ) -> AuxOutputs:
            result = custom_loss(params, hidden, batch, loss_weights)
            aux = result if isinstance(result, AuxOutputs) else AuxOutputs({name: result})
            if "dataset_mask" not in batch:
                return aux
            labels, head = batch["labels"], model.head(params)
            tiles = tiles_of(config, labels, head, model)
            hidden, head = jax.lax.stop_gradient((hidden, head))
            sums = cross_entropy(hidden, head, labels, tiles, batch["dataset_mask"])
            assert sums.by_dataset is not None
            return aux._replace(metrics={**aux.metrics, DATASET_NLL: sums.by_dataset})

        return loss

    return build


def _cross_entropy(config: TrainConfig, model: Model) -> MicrobatchLoss:
    def loss(params: Params, hidden: Array, batch: Batch, loss_weights: LossWeights) -> AuxOutputs:
        labels, head = batch["labels"], model.head(params)
        tiles = tiles_of(config, labels, head, model)
        scaled = loss_weights._replace(position=config.z_loss_weight * loss_weights.position)
        masks = batch.get("dataset_mask"), padding_of(batch)
        weighted = weighted_loss(tiles, hidden, head, labels, scaled, *masks)
        terms = {"cross_entropy": weighted.cross_entropy}
        if config.z_loss_weight:
            terms["z_loss"] = weighted.z_loss
        metrics = {} if weighted.by_dataset is None else {DATASET_NLL: weighted.by_dataset}
        return AuxOutputs(terms, metrics, {})

    return loss


for _name in CROSS_ENTROPIES:
    LOSSES.register(_name)(_cross_entropy)
_vocab_share_builders.add(_cross_entropy)
