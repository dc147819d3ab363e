"""Multi-token prediction: an extra head that predicts the token after the next (arXiv:2404.19737).

    python examples/multi_token_prediction.py --config configs/debug.toml [--section.key=value ...]

The head is one matrix before the output projection, which it shares. Its loss is a term of its own:
`terms/after_next` in the log, and `eval/after_next`. At inference the model is as without it.

The run directory is runs/multi_token_prediction, unless --checkpoint.dir names another.
"""

import functools
import sys

import jax.numpy as jnp
from jaxtyping import Array

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.cli.running import run_main
from jaxforge.commands.train import main
from jaxforge.config.model import ModelConfig
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.model.linear import Declare, Linear
from jaxforge.model.network import Transformer
from jaxforge.model.transformer import Batch, Model, Params, register_model
from jaxforge.step.cross_entropy import tiles_of, weighted_loss
from jaxforge.step.losses import LossFunction, register_loss

WEIGHT = 0.3
"""Of the extra head's loss."""


class WithAfterNext(Transformer):
    """A decoder with one matrix more."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        super().__init__(config, declare)
        size = config.dim
        self.after_next = Linear(
            (size, "norm"), (size, "embed"), std=config.init_std, declare=declare
        )


@register_model("with_after_next")
class AfterNextModel(Model):
    """Its parameters have `after_next`."""

    network = WithAfterNext


@register_loss("next_two_tokens")
def next_two_tokens(config: TrainConfig, model: Model) -> LossFunction:
    """Cross-entropy of the next token, and of the one after it."""

    def loss(
        params: Params, hidden_BSD: Array, batch: Batch, loss_weights: LossWeights
    ) -> AuxOutputs:
        labels_BS, head_VD = batch["labels"], model.head(params)
        after_BS = jnp.pad(labels_BS[:, 1:], ((0, 0), (0, 1)), constant_values=IGNORE)
        after_BS = jnp.where(labels_BS == IGNORE, IGNORE, after_BS)  # of another document, perhaps
        matrix_DD = params["after_next"]["weight"].astype(hidden_BSD.dtype)
        tiles = tiles_of(config, labels_BS, head_VD, model)
        item = functools.partial(weighted_loss, tiles)
        weighted = loss_weights._replace(token=WEIGHT * loss_weights.token, position=0.0)
        ahead = item(hidden_BSD @ matrix_DD.T, head_VD, after_BS, weighted)
        usual = item(hidden_BSD, head_VD, labels_BS, loss_weights._replace(position=0.0))
        terms = {"next": usual.cross_entropy, "after_next": ahead.cross_entropy}
        return AuxOutputs(terms)

    return loss


if __name__ == "__main__":
    own = ["--model.model_type=with_after_next", "--train.loss_fn=next_two_tokens"]
    directory = "--checkpoint.dir=runs/multi_token_prediction"
    raise SystemExit(run_main(functools.partial(main, [directory, *sys.argv[1:], *own])))
