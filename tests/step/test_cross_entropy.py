"""Custom gradient of the loss, and its memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.aux_outputs import LossWeights
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.step.cross_entropy import weighted_loss
from jaxforge.step.logit_tiles import Tiling, tiling

BATCH, LENGTH, DIM, VOCAB = 2, 24, 16, 50
SCALES = LossWeights(jnp.float32(0.3), jnp.float32(0.02))


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.standard_normal((BATCH, LENGTH, DIM)), dtype)
    head = jnp.asarray(rng.standard_normal((VOCAB, DIM)), jnp.float32)
    labels = rng.integers(0, VOCAB, (BATCH, LENGTH))
    labels[0, :5] = IGNORE
    return hidden, head, jnp.asarray(labels)


def plain_loss(hidden, head, labels, softcap=None):
    """Compute the loss by its formula, for autodiff."""
    logits = hidden @ head.T
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    lse = jax.nn.logsumexp(logits, axis=-1)
    label_values = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    nats = jnp.where(labels == IGNORE, 0.0, lse - label_values)
    return SCALES.token * jnp.sum(nats) + SCALES.position * jnp.sum(lse**2)


@pytest.mark.parametrize(
    "tiles",
    [
        Tiling(24, 50), Tiling(8, 50), Tiling(7, 50), Tiling(24, 25), Tiling(24, 16), Tiling(24, 1),
        Tiling(7, 50, softcap=3.0), Tiling(24, 16, softcap=3.0),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_match_formula(tiles):
    hidden, head, labels = inputs()

    def computed(h, w):
        return 3.0 * weighted_loss(tiles, h, w, labels, SCALES).value

    def plain(h, w):
        return 3.0 * plain_loss(h, w, labels, tiles.softcap)

    computed, plain = (
        jax.jit(jax.value_and_grad(loss, (0, 1)))(hidden, head) for loss in (computed, plain)
    )
    for a, b in zip(jax.tree.leaves(computed), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tiles", [Tiling(24, 50), Tiling(7, 50), Tiling(24, 16)], ids=str)
def test_loss_sums_by_dataset_match_numpy(tiles):
    """The three datasets have three, none and one sequences."""
    hidden, head, labels = (np.asarray(x) for x in inputs())
    hidden, labels = np.tile(hidden, (2, 1, 1)), np.tile(labels, (2, 1))
    dataset_mask = np.eye(3, dtype=bool)[[0, 0, 2, 0]]

    @jax.jit
    @functools.partial(jax.value_and_grad, has_aux=True)
    def loss(h, mask=None):
        result = weighted_loss(tiles, h, head, labels, SCALES, mask)
        return result.value, result.by_dataset

    (value, nats), gradient = loss(hidden, dataset_mask)
    logits = (hidden @ head.T).astype(np.float64)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    label_values = np.take_along_axis(log_p, np.maximum(labels, 0)[..., None], -1)[..., 0]
    rows = -np.sum(np.where(labels == IGNORE, 0.0, label_values), axis=-1)
    np.testing.assert_allclose(nats, [rows[0] + rows[1] + rows[3], 0, rows[2]], rtol=1e-5)
    (plain_value, plain_nats), plain_gradient = loss(hidden)
    assert plain_nats is None
    for a, b in ((value, plain_value), (gradient, plain_gradient)):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("tiles", [Tiling(8, 50), Tiling(24, 16)], ids=str)
def test_gradients_have_dtypes_of_hidden_states_and_head(tiles):
    hidden, head, labels = inputs(jnp.bfloat16)
    gradient = jax.grad(lambda h, w: weighted_loss(tiles, h, w, labels, SCALES).value, (0, 1))
    d_hidden, d_head = jax.eval_shape(gradient, hidden, head)
    assert (d_hidden.dtype, d_head.dtype) == (jnp.bfloat16, jnp.float32)


def temporary_bytes(vocab, **train):
    config = TrainConfig(loss_fn="chunked_cross_entropy", **train)
    tiles = tiling(config, 1, 512, vocab, None)
    shapes = [((1, 512, 64), "float32"), ((vocab, 64), "float32"), ((1, 512), "int32")]
    loss = jax.value_and_grad(lambda *xs: weighted_loss(tiles, *xs, SCALES).value, (0, 1))
    lowered = jax.jit(loss).lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    return lowered.compile().memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_vocabulary():
    small, large = (temporary_bytes(vocab, ce_vocab_chunk=4096) for vocab in (16_384, 131_072))
    assert large < 1.05 * small
    assert large < 4 * 512 * 4096 * 4  # a few arrays of one chunk


def test_default_vocab_chunk_is_128_mib_of_logits():
    config = TrainConfig(loss_fn="chunked_cross_entropy")
    assert tiling(config, 4, 1024, 131_072, None) == Tiling(1024, 8192)
    assert tiling(config, 4, 1024, 5000, None) == Tiling(1024, 5000)


def test_plain_loss_uses_tile_size_of_platform():
    assert tiling(TrainConfig(), 8, 256, 4096, None) == Tiling(256, 4096)
    assert tiling(TrainConfig(), 8, 256, 4096, 1 << 22) == Tiling(128, 4096)
    assert tiling(TrainConfig(ce_chunk_size=16), 8, 256, 4096, None) == Tiling(256, 4096)
