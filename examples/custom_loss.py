"""A loss of your own: cross-entropy with smoothed labels.

    python examples/custom_loss.py --config configs/debug.toml [--section.key=value ...]

or, as the entry points find it for themselves, by its module's name:

    PYTHONPATH=examples python -m jaxforge.train --config configs/debug.toml \\
        --plugins.modules=custom_loss --train.loss_fn=smoothed_cross_entropy \\
        --checkpoint.dir=runs/custom_loss

The run directory is runs/custom_loss, unless --checkpoint.dir names another.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jaxforge.aux_outputs import LossWeights
from jaxforge.cli.running import run_main
from jaxforge.commands.train import main
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.step.losses import LossFunction, register_loss

SMOOTHING = 0.1
"""The share of the target that is spread evenly over the vocabulary."""


@register_loss("smoothed_cross_entropy")
def smoothed_cross_entropy(config: TrainConfig, model: Model) -> LossFunction:
    """Per valid token: -(1 - a) log p(label) - a · mean of log p over the vocabulary."""

    def loss(params: Params, hidden_BSD: Array, batch: Batch, loss_weights: LossWeights) -> Array:
        log_p_BSV = jax.nn.log_softmax(model.logits(params, hidden_BSD))
        valid_BS = batch["labels"] != IGNORE
        labels_BS1 = jnp.where(valid_BS, batch["labels"], 0)[..., None]
        label_BS = jnp.take_along_axis(log_p_BSV, labels_BS1, axis=-1)[..., 0]
        value_BS = -(1 - SMOOTHING) * label_BS - SMOOTHING * jnp.mean(log_p_BSV, axis=-1)
        return loss_weights.token * jnp.sum(jnp.where(valid_BS, value_BS, 0.0))

    return loss


if __name__ == "__main__":
    directory, loss = "--checkpoint.dir=runs/custom_loss", "--train.loss_fn=smoothed_cross_entropy"
    raise SystemExit(run_main(functools.partial(main, [directory, *sys.argv[1:], loss])))
