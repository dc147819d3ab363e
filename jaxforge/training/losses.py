"""The losses that `train.loss_fn` names: `register_loss` adds one of yours."""

from collections.abc import Callable

from jaxtyping import Array, Float, Int

from jaxforge.config.train import LOSSES, TrainConfig
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from jaxforge.training.loss import Scales, tiles_of, weighted_loss

Loss = Callable[
    [Float[Array, "b s d"], Float[Array, "v d"], Int[Array, "b s"], Scales], Float[Array, ""]
]
"""(final hidden states, output head, labels, scales) -> a microbatch's part of the update's loss.

`scales.token` is what a valid token counts for in the mean that `train.loss_norm` asks for: a loss
that adds up `scales.token` times its value at each valid token is right on any mesh, with any
number of microbatches. `scales.position` is that of `train.z_loss_weight`, at every position.
"""

LossBuilder = Callable[[TrainConfig, Model], Loss]
"""(the `[train]` section, the model) -> loss."""

_by_share: set[LossBuilder] = set()


def register_loss(
    name: str, *, takes_vocab_share: bool = False
) -> Callable[[LossBuilder], LossBuilder]:
    """Decorates what builds the loss that `train.loss_fn` calls `name`.

    The loss is differentiated by JAX, unless it brings its own gradient (`jax.custom_vjp`), and
    `model.transformer.project` makes logits of hidden states and head. It is what training
    minimises; evaluation goes on to measure cross-entropy.

    Args:
        name: how the config calls it.
        takes_vocab_share: each pipeline stage calls the loss, with its share of the head, and the
            loss reduces over the shares itself (`parallel.sharding.total`). Others are refused
            where there are stages.
    """

    def add(builder: LossBuilder) -> LossBuilder:
        if takes_vocab_share:
            _by_share.add(builder)
        return LOSSES.register(name)(builder)

    return add


def build_loss(config: TrainConfig, model: Model) -> Loss:
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


@register_loss("cross_entropy", takes_vocab_share=True)
@register_loss("chunked_cross_entropy", takes_vocab_share=True)
def _cross_entropy(config: TrainConfig, model: Model) -> Loss:
    def loss(hidden: Array, head: Array, labels: Array, scales: Scales) -> Array:
        return weighted_loss(
            tiles_of(config, labels, head, model.how.tile), hidden, head, labels, scales
        )

    return loss
