"""Custom losses."""

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
from tests.step.aux_model import loss_with_aux

pytestmark = pytest.mark.usefixtures("own_names")


def textbook_loss(config, model):
    """Build cross-entropy and z-loss from plain operations, differentiated by JAX."""

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
def builtin_results():
    """Return (batches, metrics) of a single device; the first microbatches differ in weight."""
    program = setup(tiny_config(data=MIXTURE, train={**TRAIN, "batch_size": 4}))
    batches = random_batches(program.config, 3)
    batches[0]["labels"][0, :, 4:] = IGNORE
    for batch in batches:
        batch["dataset_idx"] = np.array([[0, 1, 1, 0], [1, 1, 1, 0]])
    return batches, program.run(program.state(), batches)[1]


def test_custom_loss_is_differentiated_on_a_mesh():
    """Losses by dataset of a mixture match, too.

    test_aux_outputs.py reduces another custom loss per update.
    """
    register_loss("plain")(textbook_loss)
    train = {**TRAIN, "loss_fn": "plain", "batch_size": 2, "grad_sync": "microbatch"}
    own = setup(tiny_config(data=MIXTURE, train=train, distributed={"dp_shard": 2, "tp": 2}))
    batches, a = builtin_results()
    _, b = own.run(own.state(), batches)
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-5)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-4)
    np.testing.assert_allclose(a["dataset_nll"], b["dataset_nll"], rtol=1e-5)


def test_pipeline_requires_loss_with_vocab_share():
    register_loss("whole")(textbook_loss)
    register_loss("share", takes_vocab_share=True)(
        lambda config, model: textbook_loss(config, model)
    )
    train = {"loss_fn": "whole", "grad_accum_steps": 4}
    config = tiny_config(train=train, distributed={"dp_shard": 1, "pp": 2})
    model = build_model(config)
    with pytest.raises(UserError, match=r'"whole" needs .*distributed.pp = 2 gives .*pp = 1, or'):
        build_loss(config.train, model)
    for name in ("share", "cross_entropy", "chunked_cross_entropy"):
        build_loss(config.train.model_copy(update={"loss_fn": name}), model)


CAPPED = {"final_logit_softcap": 0.05}  # initial logits reach about 0.5


@functools.cache
def builtin_capped_results():
    """Return (batches, metrics) of a single device with the custom gradient."""
    train = {"z_loss_weight": 1e-3, "grad_accum_steps": 4, "batch_size": 4}
    program = setup(tiny_config(model=CAPPED, train=train))
    batches = random_batches(program.config, 3)
    return batches, program.run(program.state(), batches)[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "axes"),
    [
        ("plain", {"dp_shard": 1}),
        pytest.param("with_aux", {"pp": 2, "dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_custom_loss_uses_soft_capped_logits(loss, axes):
    """Also with pipeline stages, each with a share of the logits."""
    register_loss("plain")(textbook_loss)
    register_loss("with_aux", takes_vocab_share=True)(loss_with_aux)
    groups = axes["dp_shard"]
    train = {"loss_fn": loss, "z_loss_weight": 1e-3, "grad_accum_steps": 4}
    config = tiny_config(model=CAPPED, train={**train, "batch_size": 4 // groups}, distributed=axes)
    own = setup(config)
    batches, expected = builtin_capped_results()
    _, result = own.run(own.state(), batches)
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(result[name], expected[name], rtol=1e-4)


def test_project_requires_softcap():
    """A loss that was written before the soft cap fails and does not ignore it."""
    with pytest.raises(TypeError, match="softcap"):
        project(jnp.ones((2, 3)), jnp.ones((4, 3)))
