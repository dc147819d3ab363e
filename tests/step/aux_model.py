"""Model and loss with all kinds of auxiliary outputs and with non-trainable state."""

import jax
import jax.numpy as jnp

from jaxforge.aux_outputs import AuxOutputs, Max, Mean
from jaxforge.data.packing import IGNORE
from jaxforge.model.network import Block, Transformer
from jaxforge.model.transformer import Model, register_model
from jaxforge.parallel import collectives
from jaxforge.step.losses import register_loss
from jaxforge.step.vocab_chunks import entry_ids


class AuxBlock(Block):
    """Block that adds a drift to its input and returns all auxiliary outputs of the input."""

    def __init__(self, config, declare):
        super().__init__(config, declare)
        self.drift = declare.untrained((config.dim,), ("norm",), jax.nn.initializers.zeros)

    def __call__(self, x_BSD, context, *args, **kwargs):
        drift = jax.lax.stop_gradient(self.drift[...]).astype(x_BSD.dtype)
        y_BSD, out = super().__call__(x_BSD + drift, context, *args, **kwargs)
        if context.loss_weights is None:
            return y_BSD, out
        size_BS = jnp.mean(jnp.square(x_BSD.astype(jnp.float32)), axis=-1)
        metrics = jax.lax.stop_gradient(
            {
                "size": Mean(jnp.sum(size_BS), jnp.float32(size_BS.size)),
                "peak": Max(jnp.max(jnp.abs(y_BSD.astype(jnp.float32)))),
            }
        )
        terms = {"size": 0.1 * context.loss_weights.position * jnp.sum(size_BS)}
        moment = context.loss_weights.position * jnp.sum(x_BSD.astype(jnp.float32), axis=(0, 1))
        stats = {"moment": jax.lax.stop_gradient(moment)}
        return y_BSD, out._replace(aux=AuxOutputs(terms, metrics, stats))


class AuxNetwork(Transformer):
    def __init__(self, config, declare):
        super().__init__(config, declare)
        self.layers = AuxBlock(config, declare._replace(layers=config.n_layers))


class AuxModel(Model):
    network = AuxNetwork

    def next_state(self, state, stats, progress):
        drift = state["layers"]["drift"] + 0.1 * jnp.tanh(stats["layers"]["moment"])
        return {"layers": {"drift": drift}}


def loss_with_aux(config, model):
    """Build cross-entropy and z-loss as two terms, with the accuracy as a metric.

    The loss accepts a share of the vocabulary.
    """

    def loss(params, hidden, batch, loss_weights):
        labels, logits = batch["labels"], model.logits(params, hidden)
        top = collectives.pmax(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), "vocab")
        lse = top + jnp.log(
            collectives.psum(jnp.sum(jnp.exp(logits - top[..., None]), axis=-1), "vocab")
        )
        is_valid = labels != IGNORE
        is_label = entry_ids(logits.shape[-1]) == labels[..., None]
        label = collectives.psum(jnp.sum(jnp.where(is_label, logits, 0.0), axis=-1), "vocab")
        terms = {
            "nats": loss_weights.token * jnp.sum(jnp.where(is_valid, lse - label, 0.0)),
            "lse": 1e-3 * loss_weights.position * jnp.sum(lse**2),
        }
        correct = jnp.sum(jnp.where(is_valid, label >= top, 0.0))
        accuracy = Mean(correct, jnp.sum(is_valid, dtype=jnp.float32))
        return AuxOutputs(terms, jax.lax.stop_gradient({"accuracy": accuracy}), {})

    return loss


def register():
    register_model("with_aux")(AuxModel)
    register_loss("with_aux", takes_vocab_share=True)(loss_with_aux)
