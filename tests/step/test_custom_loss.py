"""A loss of one's own in the place of ours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.data.packing import IGNORE
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model, project
from jaxforge.step.losses import build_loss, register_loss
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup

pytestmark = pytest.mark.usefixtures("own_names")


def plainly(config, model):
    """Cross-entropy and z-loss as a textbook has them, for JAX to differentiate."""

    def loss(params, hidden, batch, loss_weights):
        labels, logits = batch["labels"], project(hidden, model.head(params))
        lse = jax.nn.logsumexp(logits, axis=-1)
        label = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
        nats = jnp.sum(jnp.where(labels != IGNORE, lse - label, 0.0))
        weight = config.z_loss_weight * loss_weights.position
        return loss_weights.token * nats + weight * jnp.sum(lse**2)

    return loss


TRAIN = {"z_loss_weight": 1e-3, "grad_accum_steps": 2}
MIXTURE = {"datasets": [{"path": "a"}, {"path": "b"}]}


@functools.cache
def with_ours():
    """(batches, metrics) of a single device; microbatches of the first have unlike weights."""
    ours = setup(tiny_config(data=MIXTURE, train={**TRAIN, "batch_size": 4}))
    batches = random_batches(ours.config, 3)
    batches[0]["labels"][0, :, 4:] = IGNORE
    for batch in batches:
        batch["dataset_idx"] = np.array([[0, 1, 1, 0], [1, 1, 1, 0]])
    return batches, ours.run(ours.state(), batches)[1]


@pytest.mark.parametrize("grad_sync", ["update", "microbatch"])
def test_it_is_differentiated_on_a_mesh_and_over_microbatches(grad_sync):
    """And each dataset of a mixture has its cross-entropy beside it."""
    register_loss("plain")(plainly)
    train = {**TRAIN, "loss_fn": "plain", "batch_size": 2, "grad_sync": grad_sync}
    own = setup(tiny_config(data=MIXTURE, train=train, distributed={"dp_shard": 2, "tp": 2}))
    batches, a = with_ours()
    _, b = own.run(own.state(), batches)
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(a["dataset_nll"], b["dataset_nll"], rtol=1e-5)


def test_stages_are_for_losses_that_take_a_share_of_the_vocabulary():
    register_loss("whole")(plainly)
    register_loss("share", takes_vocab_share=True)(lambda config, model: plainly(config, model))
    train = {"loss_fn": "whole", "grad_accum_steps": 4}
    config = tiny_config(train=train, distributed={"dp_shard": 1, "pp": 2})
    model = build_model(config)
    with pytest.raises(UserError, match=r'"whole" wants .*distributed.pp = 2 gives .*pp = 1, or'):
        build_loss(config.train, model)
    for name in ("share", "cross_entropy", "chunked_cross_entropy"):
        build_loss(config.train.model_copy(update={"loss_fn": name}), model)


def test_a_loss_that_would_forget_the_cap_of_logits_is_refused():
    register_loss("plainly")(plainly)
    config = tiny_config(model={"final_logit_softcap": 3.0}, train={"loss_fn": "plainly"})
    with pytest.raises(UserError, match="without the cap of model"):
        build_loss(config.train, build_model(config))
