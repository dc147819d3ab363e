"""Tests of attention sinks: kernels against the formula, gradients, packing, several devices.

A sink takes the fraction sigmoid(sink - lse) of the weight of a query. So the output is the output
without sinks times sigmoid(lse - sink).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.kernels import splash
from jaxforge.kernels.attention_backends import BACKENDS, attend_with_masks, opaque_kernel
from jaxforge.kernels.dot_product_attention import masked_attention
from jaxforge.kernels.masking import FULL, Mask
from jaxforge.kernels.scoring import PLAIN, Scoring
from jaxforge.model.runtime import AttentionKernels
from jaxforge.model.transformer import Model
from tests.helpers import initial_params
from tests.model.attention_reference import allowed_keys, random_documents, random_heads

LENGTH, HEADS = 81, 6
SINKS = np.array(
    [-2.0, 0.0, 1.0, 3.0, 120.0, -120.0], np.float32
)  # the last two take all and nothing
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["causal", "documents"])


def formula(q, k, v, sinks, allowed, scoring=PLAIN):
    """Attend to all keys at once, with repeated key heads."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * scoring.scale_of(q.shape[-1])
    scores = scores if scoring.softcap is None else scoring.softcap * jnp.tanh(
        scores / scoring.softcap
    )  # fmt: skip
    scores = jnp.where(allowed[:, None], scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, axis=-1)
    without = jnp.einsum("bhst,bthd->bshd", jnp.exp(scores - lse[..., None]), v)
    return without * jax.nn.sigmoid(lse - sinks[:, None]).swapaxes(1, 2)[..., None]


def with_gradients(attend, q, k, v, sinks, **options):
    """Return the output and the gradients of all inputs."""
    weights = np.random.default_rng(2).standard_normal(q.shape)

    def loss(*inputs):
        y = attend(*inputs, **options)
        return jnp.sum(y * weights), y

    gradients, y = jax.grad(loss, range(4), has_aux=True)(q, k, v, sinks)
    return y, gradients


expected_of = jax.jit(functools.partial(with_gradients, formula), static_argnames="scoring")


def results_of(attend, *inputs):
    return jax.jit(functools.partial(with_gradients, attend))(*inputs)


def assert_all_close(program, expected, atol=2e-5):
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=atol, rtol=1e-5), program, expected
    )


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(
    ("kv_heads", "seen", "scoring"),
    [
        (6, {}, PLAIN),
        (2, {}, PLAIN),
        (1, {"window": 7}, PLAIN),
        (2, {"window": 40}, Scoring(scale=0.7, softcap=2.0)),
        (2, {"chunk": 16}, PLAIN),
    ],
    ids=str,
)
@PACKED
def test_sink_kernels_and_gradients_match_formula(backend, kv_heads, seen, scoring, packed):
    segment_ids = random_documents(LENGTH) if packed else None
    allowed = allowed_keys(LENGTH, segment_ids, **seen)

    def attend(q, k, v, sinks):
        return BACKENDS[backend].attend(q, k, v, segment_ids, **seen, scoring=scoring, sinks=sinks)

    inputs = (*random_heads(LENGTH, kv_heads), SINKS)
    expected = expected_of(*inputs, allowed=allowed, scoring=scoring)
    assert np.abs(np.asarray(expected[1][3])[:4]).min() > 0.01, "sinks have gradients"
    assert_all_close(results_of(attend, *inputs), expected)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_infinitely_negative_sink_has_no_effect(backend):
    attend, heads = jax.jit(BACKENDS[backend].attend), random_heads(LENGTH, 2)
    nothing = np.full(HEADS, -np.inf, np.float32)
    np.testing.assert_allclose(
        attend(*heads, None, sinks=nothing), attend(*heads, None), rtol=0, atol=1e-6
    )


@pytest.mark.parametrize(
    ("kv_heads", "seen", "packed"), [(6, {}, False), (2, {"window": 100}, True)], ids=str
)
def test_splash_sinks_and_gradients_match_formula(monkeypatch, kv_heads, seen, packed):
    """The TPU kernel is interpreted."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash, "BLOCK", 128)
    segment_ids = random_documents(256) if packed else None

    def attend(q, k, v, sinks):
        return BACKENDS["splash"].attend(q, k, v, segment_ids, **seen, sinks=sinks)

    inputs = (*random_heads(256, kv_heads, h=128), SINKS)
    allowed = allowed_keys(256, segment_ids, **seen)
    expected = expected_of(*inputs, allowed=allowed)
    assert_all_close(results_of(attend, *inputs), expected, atol=5e-4)


def test_masked_attention_applies_sinks():
    mask = np.arange(LENGTH) <= np.array([[4, 5, 6], [17, 18, 19]])[..., None]
    q, k, v = random_heads(LENGTH, 2, n_queries=3)
    program = jax.jit(masked_attention)(q, k, v, mask[:, None], sinks=SINKS)
    expected = jax.jit(formula)(q, k, v, SINKS, mask)
    np.testing.assert_allclose(program, expected, rtol=0, atol=1e-5)


MASKS = (FULL, Mask(window=9))


@pytest.mark.parametrize(
    ("backend", "is_known", "packed"),
    [  # every pair of values
        (backend, is_known, (i + j) % 2 == 1)
        for i, backend in enumerate(("reference", "blockwise", "opaque"))
        for j, is_known in enumerate((True, False))
    ],
)
def test_devices_apply_sinks_of_their_heads(monkeypatch, backend, is_known, packed):
    """Heads are split over two devices, and rows over two."""
    kernel = opaque_kernel(BACKENDS["blockwise"].attend, lambda at: None)
    monkeypatch.setitem(BACKENDS, "opaque", kernel)
    segment_ids = random_documents(LENGTH) if packed else None
    inputs = (*random_heads(LENGTH, 2), SINKS)
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("dp_shard", "tp"))  # with automatic axes

    @functools.partial(jax.jit, static_argnums=0 if is_known else ())
    def gradients_of(which, *inputs):
        def attend(q, k, v, sinks):
            return attend_with_masks(backend, MASKS, which, q, k, v, segment_ids, sinks=sinks)

        return with_gradients(attend, *inputs)

    for which, mask in enumerate(MASKS):
        allowed = allowed_keys(LENGTH, segment_ids, mask.window)
        with jax.set_mesh(mesh):
            program = gradients_of(which if is_known else np.int32(which), *inputs)
        assert_all_close(program, expected_of(*inputs, allowed=allowed))


SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64,
         "ffn_hidden_dim": 32}  # fmt: skip


def test_model_declares_sink_per_head_if_configured():
    program = Model(ModelConfig(**SHAPE, attention_sinks=True))
    plain = Model(ModelConfig(**SHAPE))
    added = program.abstract["layers"]["attention"].pop("sinks")
    assert added.shape == (2, 4)
    assert program.axes["layers"]["attention"].pop("sinks") == ("layers", "heads")
    assert program.abstract == plain.abstract


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
def test_each_layer_applies_its_own_sinks(backend):
    """Sinks of -inf have no effect; a finite sink of any layer and head has one."""
    config = ModelConfig(**SHAPE, attention_sinks=True)
    model = Model(config)
    model.runtime = model.runtime._replace(attention=AttentionKernels(backend))
    hidden = jax.jit(model.hidden)
    params = initial_params(model)
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    attention = params["layers"]["attention"]
    nothing = np.full((2, 4), -np.inf, np.float32)
    attention["sinks"] = nothing
    before = hidden(params, tokens)
    plain = Model(ModelConfig(**SHAPE))
    without = {k: v for k, v in attention.items() if k != "sinks"}
    bare = {**params, "layers": {**params["layers"], "attention": without}}
    np.testing.assert_allclose(before, jax.jit(plain.hidden)(bare, tokens), rtol=0, atol=1e-6)
    for location in np.ndindex(2, 4):
        attention["sinks"] = nothing.copy()
        attention["sinks"][location] = 5.0
        assert np.abs(np.asarray(hidden(params, tokens)) - before).max() > 1e-6
