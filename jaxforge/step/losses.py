"""The losses that `train.loss_fn` names: `register_loss` adds one of yours."""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.config.train import CROSS_ENTROPIES, LOSSES, TrainConfig
from jaxforge.errors import UserError
from jaxforge.kernels.masking import padding_of
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.step.cross_entropy import cross_entropy, tiles_of, weighted_loss

LossFunction = Callable[
    [Params, Float[Array, "b s d"], Batch, LossWeights], Float[Array, ""] | AuxOutputs
]
"""(parameters, final hidden states, microbatch, loss_weights) -> its part of the update's loss.

The parameters are all of the model's, or, in a pipeline stage, its share of those outside layers.
`model.logits` makes logits of them, those of its share in a stage, capped where the model caps
them. The microbatch has `labels` and whatever else the data have. `AuxOutputs` names several terms,
and metrics.
"""

LossBuilder = Callable[[TrainConfig, Model], LossFunction]
"""(the `[train]` section, the model) -> loss."""

MicrobatchLoss = Callable[[Params, Float[Array, "b s d"], Batch, LossWeights], AuxOutputs]
"""The same; of a mixture it tells `dataset_nll`, Σ -log p(label) of each dataset."""

DATASET_NLL = "dataset_nll"

_by_share: set[Callable[[TrainConfig, Model], MicrobatchLoss]] = set()


def register_loss(
    name: str, *, takes_vocab_share: bool = False
) -> Callable[[LossBuilder], LossBuilder]:
    """Decorates what builds the loss that `train.loss_fn` calls `name`.

    The loss is differentiated by JAX, unless it brings its own gradient (`jax.custom_vjp`). It
    makes logits by `model.logits(params, hidden)`, which knows head and `final_logit_softcap`, or
    leaves them to `step.cross_entropy.weighted_loss`, whose `tiles_of` does. Its terms together are
    what training minimises; each is logged by its name. Evaluation, and a mixture's losses by
    dataset, go on to measure cross-entropy. For the latter the logits are computed once more.

    Args:
        name: how the config calls it.
        takes_vocab_share: each pipeline stage calls the loss, with its share of the head, and the
            loss reduces over the shares itself (`parallel.collectives.psum` and `pmax` over
            "vocab"). Others are refused where there are stages.
    """

    def add(builder: LossBuilder) -> LossBuilder:
        build = LOSSES.register(name)(_beside_cross_entropy(name, builder))
        if takes_vocab_share:
            _by_share.add(build)
        return builder

    return add


def build_loss(config: TrainConfig, model: Model) -> MicrobatchLoss:
    """The loss that `train.loss_fn` asks for.

    Raises:
        UserError: the model has pipeline stages, and the loss wants the whole vocabulary.
    """
    builder = LOSSES[config.loss_fn]
    if model.stack.stages > 1 and builder not in _by_share:
        raise UserError(
            f'train.loss_fn = "{config.loss_fn}" wants the logits of the whole vocabulary, and '
            f"distributed.pp = {model.stack.stages} gives each stage a share of it: set "
            "distributed.pp = 1, or register the loss with takes_vocab_share"
        )
    return builder(config, model)


def _beside_cross_entropy(
    name: str, builder: LossBuilder
) -> Callable[[TrainConfig, Model], MicrobatchLoss]:
    """A loss of one's own, with the cross-entropy of each dataset of a mixture."""

    @functools.wraps(builder)
    def build(config: TrainConfig, model: Model) -> MicrobatchLoss:
        own = builder(config, model)

        def loss(
            params: Params, hidden: Array, batch: Batch, loss_weights: LossWeights
        ) -> AuxOutputs:
            own_loss = own(params, hidden, batch, loss_weights)
            aux = own_loss if isinstance(own_loss, AuxOutputs) else AuxOutputs({name: own_loss})
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
        own = loss_weights._replace(position=config.z_loss_weight * loss_weights.position)
        masks = batch.get("dataset_mask"), padding_of(batch)
        weighted = weighted_loss(tiles, hidden, head, labels, own, *masks)
        terms = {"cross_entropy": weighted.cross_entropy}
        if config.z_loss_weight:
            terms["z_loss"] = weighted.z_loss
        metrics = {} if weighted.by_dataset is None else {DATASET_NLL: weighted.by_dataset}
        return AuxOutputs(terms, metrics, {})

    return loss


for _name in CROSS_ENTROPIES:
    LOSSES.register(_name)(_cross_entropy)
_by_share.add(_cross_entropy)
