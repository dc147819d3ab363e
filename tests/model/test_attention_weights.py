"""Tests of captured attention weights against NumPy and the output of the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.eval import ATTENTION_WEIGHTS, STREAM
from jaxforge.kernels.context_parallel import to_device_order
from jaxforge.kernels.masking import Mask
from jaxforge.kernels.scoring import Scoring
from jaxforge.model import attention_weights as attention_weights_module
from jaxforge.model.attention_weights import attention_weights, max_logits
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import build_model
from jaxforge.parallel.mesh import make_mesh
from tests.conftest import tiny_config
from tests.helpers import drawn, with_random_biases

B, S, HEADS, KV, WIDTH = 2, 12, 4, 2, 8
DOCUMENTS = np.array([[1] * 5 + [2] * 7, [1] * 12])


def visible_keys(window, chunk, documents):
    """Yield the visible keys of each query of each head."""
    documents = np.ones((B, S), int) if documents is None else documents
    for b, h, i in np.ndindex(B, HEADS, S):
        seen = [j for j in range(i + 1) if documents[b, j] == documents[b, i]]
        begin = seen[0]
        seen = [j for j in seen if window is None or i - j < window]
        seen = [j for j in seen if chunk is None or (j - begin) // chunk == (i - begin) // chunk]
        yield (b, h, i), seen


def expected(q, k, *, window=None, chunk=None, documents=None, scale=None, cap=None, sinks=None):
    """Compute weights query by query, over its visible keys."""
    result = np.zeros((B, HEADS, S, S))
    for (b, h, i), seen in visible_keys(window, chunk, documents):
        scores = k[b, seen, h // (HEADS // KV)] @ q[b, i, h] * (scale or WIDTH**-0.5)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        sink_weight = 0.0 if sinks is None else np.exp(sinks[h])
        result[b, h, i, seen] = np.exp(scores) / (np.exp(scores).sum() + sink_weight)
    return result


@pytest.mark.parametrize(
    ("mask", "scoring", "documents", "has_sinks"),
    [
        (Mask(), Scoring(), None, False),
        (Mask(window=3), Scoring(), DOCUMENTS, False),
        (Mask(chunk=4), Scoring(scale=0.7), DOCUMENTS, True),
        (Mask(), Scoring(softcap=1.5), None, True),
    ],
    ids=["plain", "window", "chunk", "capped"],
)
def test_attention_weights_match_numpy(mask, scoring, documents, has_sinks):
    rng = np.random.default_rng(0)
    q = rng.standard_normal((B, S, HEADS, WIDTH)).astype(np.float32)
    k = rng.standard_normal((B, S, KV, WIDTH)).astype(np.float32)
    sinks = rng.standard_normal(HEADS).astype(np.float32) if has_sinks else None

    @jax.jit
    def weights(which, q, k, documents, sinks):
        return attention_weights([Mask(window=2), mask], which, q, k, documents, scoring, sinks)

    result = np.asarray(weights(np.int32(1), q, k, documents, sinks))
    reference = expected(q, k, window=mask.window, chunk=mask.chunk, documents=documents,
                     scale=scoring.scale, cap=scoring.softcap, sinks=sinks)  # fmt: skip
    np.testing.assert_allclose(result, reference, atol=2e-6)
    assert not np.triu(result, 1).any()
    sums = result.sum(-1)
    assert (sums < 0.999).all() if has_sinks else np.allclose(sums, 1, atol=1e-6)


def in_device_order(x, strategy):
    """Return an array [b, s, ...] in the order of two devices that share sequences."""
    if x is None or strategy is None:
        return x
    return jnp.moveaxis(to_device_order(jnp.moveaxis(x, 1, -1), strategy, 2), -1, 1)


@pytest.mark.parametrize(
    ("mask", "scoring", "documents"),
    [(Mask(), Scoring(softcap=1.5), None), (Mask(window=3), Scoring(scale=-0.7), DOCUMENTS),
     (Mask(chunk=4), Scoring(), DOCUMENTS)],
    ids=["capped", "window", "chunk"],
)  # fmt: skip
@pytest.mark.parametrize("strategy", [None, "ulysses", "ring"])
def test_max_logits_match_numpy(monkeypatch, mask, scoring, documents, strategy):
    """The soft cap comes after the logit. Blocks of 5 queries do not divide the 12 tokens."""
    monkeypatch.setattr(attention_weights_module, "_QUERIES", 5)
    rng = np.random.default_rng(1)
    q = rng.standard_normal((B, S, HEADS, WIDTH)).astype(np.float32)
    k = rng.standard_normal((B, S, KV, WIDTH)).astype(np.float32)

    def largest(which, *inputs):
        *inputs, positions = (in_device_order(x, strategy) for x in inputs)
        return max_logits([Mask(window=2), mask], which, *inputs, scoring, positions, strategy)

    config = tiny_config(distributed={"cp": 1 if strategy is None else 2})
    with jax.set_mesh(make_mesh(config, jax.devices()[: config.distributed.cp])):
        positions = np.broadcast_to(np.arange(S), (B, S))
        result = jax.jit(largest)(np.int32(1), q, k, documents, positions)
    reference = np.full((B, HEADS), -np.inf)
    for (b, h, i), seen in visible_keys(mask.window, mask.chunk, documents):
        logits = k[b, seen, h // (HEADS // KV)] @ q[b, i, h] * (scoring.scale or WIDTH**-0.5)
        reference[b, h] = max(reference[b, h], logits.max())
    np.testing.assert_allclose(result, reference, rtol=1e-5)


@pytest.mark.parametrize("save", ["none", "selective", "full"])
def test_captured_weights_reproduce_attention_output(save):
    """Weights times values equal the output of the first layer; capturing changes nothing else."""
    config = tiny_config(
        model={"attention_sinks": True, "sliding_window": 5},
        train={"activation_checkpointing": save},
    )
    model = build_model(config)
    params = with_random_biases(drawn(config))
    tokens = np.random.default_rng(1).integers(0, 256, (B, S))

    def capture(points):
        def forward(params, tokens):
            hidden, out = model.forward(params, {"input_ids": tokens}, capture=Capture(points))
            return hidden, out.activations

        return jax.device_get(jax.jit(forward)(params, tokens))

    hidden, plain = capture(STREAM)
    same, seen = capture((*STREAM, ATTENTION_WEIGHTS))
    assert set(plain) == set(STREAM)
    np.testing.assert_array_equal(hidden, same)
    for name in STREAM:
        np.testing.assert_array_equal(seen[name], plain[name])
    weights = seen[ATTENTION_WEIGHTS]
    assert weights.shape == (2, B, 4, S, S)
    assert weights.dtype == np.float32
    layer = jax.tree.map(lambda leaf: leaf[0], params["layers"])
    x = params["token_embedding"]["embedding"]["weight"][tokens]
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + config.model.norm_eps)
    x = x * layer["attention_norm"]["weight"]
    v = (x @ layer["attention"]["v_proj"]["weight"].T).reshape(B, S, 2, 1, 16)
    y = np.einsum("bhst,bthd->bshd", weights[0], np.repeat(v, 2, 3).reshape(B, S, 4, 16))
    added = y.reshape(B, S, -1) @ layer["attention"]["o_proj"]["weight"].T
    np.testing.assert_allclose(seen["attention"][0], added, rtol=1e-3, atol=1e-6)
