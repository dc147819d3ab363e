"""Write a loss function: cross-entropy with label smoothing.

    python examples/custom_loss.py --config configs/debug.toml [--section.key=value ...]

`jaxforge train` finds the loss by its name if the config imports this module:

    PYTHONPATH=examples jaxforge train --config configs/debug.toml \\
        --plugins.modules=custom_loss --train.loss_fn=smoothed_cross_entropy \\
        --checkpoint.dir=runs/custom_loss

The run directory is runs/custom_loss. Change it with --checkpoint.dir.
"""

import functools
import sys

import jax
import jax.numpy as jnp
from jaxtyping import Array

import jaxforge as jf
from jaxforge.aux_outputs import LossWeights
from jaxforge.cli.running import run_main
from jaxforge.commands.train import main
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.model.transformer import Batch, Model, Params
from jaxforge.step.losses import LossFunction

SMOOTHING = 0.1
"""Fraction of the target distribution that is uniform over the vocabulary."""


@jf.register_loss("smoothed_cross_entropy")
def smoothed_cross_entropy(config: TrainConfig, model: Model) -> LossFunction:
    """Return the loss -(1 - a) log p(label) - a mean_v log p(v), with a = `SMOOTHING`."""

    # B: sequences, S: tokens of a sequence, D: width of the model, V: size of the vocabulary.
    def loss(params: Params, hidden_BSD: Array, batch: Batch, loss_weights: LossWeights) -> Array:
        log_p_BSV = jax.nn.log_softmax(model.logits(params, hidden_BSD))
        valid_BS = batch["labels"] != IGNORE
        labels_BS1 = jnp.where(valid_BS, batch["labels"], 0)[..., None]
        label_BS = jnp.take_along_axis(log_p_BSV, labels_BS1, axis=-1)[..., 0]
        value_BS = -(1 - SMOOTHING) * label_BS - SMOOTHING * jnp.mean(log_p_BSV, axis=-1)
        # The token weight makes the sum over all microbatches a mean over valid tokens.
        return loss_weights.token * jnp.sum(jnp.where(valid_BS, value_BS, 0.0))

    return loss


if __name__ == "__main__":
    directory, loss = "--checkpoint.dir=runs/custom_loss", "--train.loss_fn=smoothed_cross_entropy"
    raise SystemExit(run_main(functools.partial(main, [directory, *sys.argv[1:], loss])))
