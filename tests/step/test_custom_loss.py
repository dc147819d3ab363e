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
from tests.step.telling import telling_loss

pytestmark = pytest.mark.usefixtures("own_names")


def plainly(config, model):
    """Cross-entropy and z-loss as a textbook has them, for JAX to differentiate."""

    def loss(params, hidden, batch, loss_weights):
        labels, logits = batch["labels"], model.logits(params, hidden)
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


def test_custom_loss_is_differentiated_on_a_mesh():
    """Each dataset of a mixture also has its cross-entropy.

    Another loss of one's own is reduced per update in test_aux_outputs.py.
    """
    register_loss("plain")(plainly)
    train = {**TRAIN, "loss_fn": "plain", "batch_size": 2, "grad_sync": "microbatch"}
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
    with pytest.raises(UserError, match=r'"whole" needs .*distributed.pp = 2 gives .*pp = 1, or'):
        build_loss(config.train, model)
    for name in ("share", "cross_entropy", "chunked_cross_entropy"):
        build_loss(config.train.model_copy(update={"loss_fn": name}), model)


CAPPED = {"final_logit_softcap": 0.05}  # initial logits reach about 0.5


@functools.cache
def capped_by_ours():
    """(batches, metrics) of a single device, whose gradient is written out."""
    train = {"z_loss_weight": 1e-3, "grad_accum_steps": 4, "batch_size": 4}
    ours = setup(tiny_config(model=CAPPED, train=train))
    batches = random_batches(ours.config, 3)
    return batches, ours.run(ours.state(), batches)[1]


@pytest.mark.parametrize(
    ("loss", "axes"),
    [("plain", {"dp_shard": 1}), ("telling", {"pp": 2, "dp_shard": 2, "tp": 2})],
)
def test_loss_makes_the_logits_that_the_model_caps(loss, axes):
    """On every mesh, and where each pipeline stage has a share of them."""
    register_loss("plain")(plainly)
    register_loss("telling", takes_vocab_share=True)(telling_loss)
    groups = axes["dp_shard"]
    train = {"loss_fn": loss, "z_loss_weight": 1e-3, "grad_accum_steps": 4}
    config = tiny_config(model=CAPPED, train={**train, "batch_size": 4 // groups}, distributed=axes)
    own = setup(config)
    batches, expected = capped_by_ours()
    _, result = own.run(own.state(), batches)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-4)


def test_nobody_makes_logits_and_forgets_the_cap():
    """A loss as it was written before the cap is no loss without it: it fails."""
    with pytest.raises(TypeError, match="softcap"):
        project(jnp.ones((2, 3)), jnp.ones((4, 3)))
