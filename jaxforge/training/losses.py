"""The losses that `train.loss_fn` names: `register_loss` adds one of yours."""

import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Bool, Float, Int

from jaxforge.config.train import LOSSES, TrainConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.training.loss import Loss, Scales, cross_entropy, tiles_of, weighted_loss

LossFunction = Callable[
    [Float[Array, "b s d"], Float[Array, "v d"], Int[Array, "b s"], Scales], Float[Array, ""]
]
"""(final hidden states, output head, labels, scales) -> a microbatch's part of the update's loss.

`scales.token` is what a valid token counts for in the mean that `train.loss_norm` asks for: a loss
that adds up `scales.token` times its value at each valid token is right on any mesh, with any
number of microbatches. `scales.position` is that of `train.z_loss_weight`, at every position.
"""

LossBuilder = Callable[[TrainConfig, Model], LossFunction]
"""(the `[train]` section, the model) -> loss."""

MicrobatchLoss = Callable[
    [
        Float[Array, "b s d"],
        Float[Array, "v d"],
        Int[Array, "b s"],
        Scales,
        Bool[Array, "b n"] | None,
    ],
    Loss,
]
"""The same, told which dataset of a mixture each sequence is of, and telling of each dataset."""

_by_share: set[Callable[[TrainConfig, Model], MicrobatchLoss]] = set()


def register_loss(
    name: str, *, takes_vocab_share: bool = False
) -> Callable[[LossBuilder], LossBuilder]:
    """Decorates what builds the loss that `train.loss_fn` calls `name`.

    The loss is differentiated by JAX, unless it brings its own gradient (`jax.custom_vjp`), and
    `model.transformer.project` makes logits of hidden states and head. It is what training
    minimises; evaluation, and a mixture's losses by dataset, go on to measure cross-entropy. For
    the latter the logits are computed once more.

    Args:
        name: how the config calls it.
        takes_vocab_share: each pipeline stage calls the loss, with its share of the head, and the
            loss reduces over the shares itself (`parallel.sharding.total`). Others are refused
            where there are stages.
    """

    def add(builder: LossBuilder) -> LossBuilder:
        build = LOSSES.register(name)(_beside_cross_entropy(builder))
        if takes_vocab_share:
            _by_share.add(build)
        return builder

    return add


def build_loss(config: TrainConfig, model: Model) -> MicrobatchLoss:
    """The loss that `train.loss_fn` asks for.

    Raises:
        UserError: the model has pipeline stages, and the loss wants the whole vocabulary; or the
            model caps logits, and the loss makes logits of its own.
    """
    builder = LOSSES[config.loss_fn]
    cap = model.config.final_logit_softcap
    if cap is not None and builder is not _cross_entropy:
        raise UserError(
            f'train.loss_fn = "{config.loss_fn}" makes logits without the cap of '
            f'model.final_logit_softcap = {cap}: set train.loss_fn = "cross_entropy", or leave the '
            "cap out"
        )
    if model.stack.stages > 1 and builder not in _by_share:
        raise UserError(
            f'train.loss_fn = "{config.loss_fn}" wants the logits of the whole vocabulary, and '
            f"distributed.pp = {model.stack.stages} gives each stage a share of it: set "
            "distributed.pp = 1, or register the loss with takes_vocab_share"
        )
    return builder(config, model)


def _beside_cross_entropy(builder: LossBuilder) -> Callable[[TrainConfig, Model], MicrobatchLoss]:
    """A loss of one's own, with the cross-entropy of each dataset of a mixture."""

    @functools.wraps(builder)
    def build(config: TrainConfig, model: Model) -> MicrobatchLoss:
        own = builder(config, model)

        def loss(
            hidden: Array, head: Array, labels: Array, scales: Scales, members: Array | None
        ) -> Loss:
            value = own(hidden, head, labels, scales)
            if members is None:
                return Loss(value, None)
            tiles = tiles_of(config, labels, head, model)
            hidden, head = jax.lax.stop_gradient((hidden, head))
            return Loss(value, cross_entropy(hidden, head, labels, tiles, members).by_dataset)

        return loss

    return build


@LOSSES.register("cross_entropy")
@LOSSES.register("chunked_cross_entropy")
def _cross_entropy(config: TrainConfig, model: Model) -> MicrobatchLoss:
    def loss(
        hidden: Array, head: Array, labels: Array, scales: Scales, members: Array | None
    ) -> Loss:
        tiles = tiles_of(config, labels, head, model)
        return weighted_loss(tiles, hidden, head, labels, scales, members)

    return loss


_by_share.add(_cross_entropy)
