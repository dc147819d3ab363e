"""Losses that torch gave for fixed logits: `tests/data/golden_loss.npz`."""

from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxforge.config.train import TrainConfig
from jaxforge.step.cross_entropy import cross_entropy
from jaxforge.step.logit_tiles import tiling

RUN = np.load(Path(__file__).parents[1] / "data" / "golden_loss.npz")


sums = jax.jit(cross_entropy, static_argnums=3)


def loss_of(logits, **config):
    """With the identity as output head, hidden states are logits."""
    head = np.eye(logits.shape[-1], dtype=logits.dtype)
    tiles = tiling(TrainConfig(**config), *RUN["labels"].shape, logits.shape[-1], None)
    return jax.device_get(sums(logits, head, RUN["labels"], tiles))


@pytest.mark.parametrize(
    "config",
    [{}, {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 4},
     {"loss_fn": "chunked_cross_entropy", "ce_vocab_chunk": 5}],
)  # fmt: skip
def test_cross_entropy_and_z_loss(config):
    loss = loss_of(RUN["logits"], **config)
    np.testing.assert_allclose(loss.total / loss.weight, RUN["ce"], rtol=1e-6)
    np.testing.assert_allclose(loss.total / loss.weight, RUN["chunk4"], rtol=1e-6)


def test_z_loss_counts_masked_positions():
    loss = loss_of(RUN["logits"])
    mean = loss.z_loss_sum / RUN["labels"].size
    np.testing.assert_allclose(0.01 * mean, RUN["z"], rtol=1e-6)


def test_bfloat16_logits_give_a_float32_loss():
    """KempnerForge's is rounded to bfloat16 token by token, where values of 8 to 16 lie 2**-4
    apart; ours is the exact loss of the rounded logits."""
    logits = RUN["logits"].astype(ml_dtypes.bfloat16)
    loss = loss_of(logits)
    exact = loss_of(logits.astype(np.float32))
    assert loss.total.dtype == np.float32
    np.testing.assert_allclose(loss.total, exact.total, rtol=1e-6)
    np.testing.assert_allclose(loss.total / loss.weight, RUN["ce_bf16"], atol=2**-4)
