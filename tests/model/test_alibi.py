"""Tests of ALiBi: slopes against transformers, kernels against the formula, and their refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels.attention_backends import (
    BACKENDS,
    KernelRequirements,
    attend_with_masks,
    choose_backend,
)
from jaxforge.kernels.dot_product_attention import cached_attention
from jaxforge.kernels.masking import FULL, Mask
from jaxforge.kernels.scoring import PLAIN, Scoring, alibi_bias, alibi_slopes
from tests.model.attention_reference import allowed_keys, random_documents, random_heads

LENGTH, HEADS = 81, 6


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 20, 112])
def test_slopes_match_transformers(heads):
    transformers = pytest.importorskip("transformers")
    slopes = alibi_slopes(heads)
    mpt = transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor(heads, 2)
    np.testing.assert_allclose(slopes, -mpt[:, 0, 0].numpy(), rtol=1e-6)  # one token back
    bloom = transformers.models.bloom.modeling_bloom._get_alibi_slopes(heads, "cpu")
    np.testing.assert_allclose(slopes, bloom.numpy(), rtol=1e-6)
    mpt = transformers.models.mpt.modeling_mpt.build_mpt_alibi_tensor(heads, 2, alibi_bias_max=16)
    np.testing.assert_allclose(alibi_slopes(heads, 16.0), -mpt[:, 0, 0].numpy(), rtol=1e-6)


def formula(q, k, v, slopes, allowed, scoring=PLAIN):
    """Attend to all keys at once, with repeated key heads."""
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k) * scoring.scale_of(q.shape[-1])
    if scoring.softcap is not None:
        scores = scoring.softcap * jnp.tanh(scores / scoring.softcap)
    tokens = np.arange(q.shape[1])
    scores -= slopes[:, None, None] * (tokens[:, None] - tokens)
    weights = jax.nn.softmax(jnp.where(allowed[:, None], scores, -jnp.inf), axis=-1)
    return jnp.einsum("bhst,bthd->bshd", weights, v)


def with_gradients(attend, *inputs):
    weights = np.random.default_rng(2).standard_normal(inputs[0].shape)

    def loss(*inputs):
        y = attend(*inputs)
        return jnp.sum(y * weights), y

    gradients, y = jax.jit(jax.grad(loss, range(3), has_aux=True))(*inputs)
    return y, gradients


def assert_all_close(ours, expected):
    compare = functools.partial(np.testing.assert_allclose, atol=2e-5, rtol=1e-5)
    jax.tree.map(compare, ours, expected)


@pytest.mark.parametrize("backend", ["reference", "blockwise"])
@pytest.mark.parametrize(
    ("kv_heads", "seen", "scoring", "packed"),
    [
        pytest.param(6, {}, PLAIN, False, marks=pytest.mark.slow),
        (2, {}, PLAIN, True),
        pytest.param(1, {"window": 7}, PLAIN, True, marks=pytest.mark.slow),
        (2, {"window": 40}, Scoring(scale=0.7, softcap=2.0), False),
        (2, {"chunk": 16}, PLAIN, True),
    ],
    ids=str,
)
def test_kernels_and_gradients_match_formula(backend, kv_heads, seen, scoring, packed):
    segment_ids = random_documents(LENGTH) if packed else None
    allowed, slopes = allowed_keys(LENGTH, segment_ids, **seen), alibi_slopes(HEADS)

    def attend(q, k, v):
        return BACKENDS[backend].attend(
            q, k, v, segment_ids, **seen, scoring=scoring, slopes=jnp.asarray(slopes)
        )

    inputs = random_heads(LENGTH, kv_heads)
    expected = with_gradients(lambda *x: formula(*x, slopes, allowed, scoring), *inputs)
    assert_all_close(with_gradients(attend, *inputs), expected)
    plain = BACKENDS[backend].attend(*inputs, segment_ids, **seen, scoring=scoring)
    assert np.abs(np.asarray(plain) - expected[0]).max() > 0.1


def test_cached_attention_counts_distance_from_positions():
    """Rows of a batch are at different positions."""
    q, k, v = random_heads(LENGTH, 2, n_queries=3)
    positions, slopes = np.array([[4, 5, 6], [17, 18, 19]]), alibi_slopes(HEADS)
    mask = np.arange(LENGTH) <= positions[..., None]
    bias = alibi_bias(slopes, positions, np.arange(LENGTH)[None])
    cache = (jnp.swapaxes(x, 1, 2) for x in (k, v))
    ours = jax.jit(cached_attention)(q, *cache, mask[:, None], bias=bias)
    for row in range(2):
        whole = jnp.zeros((1, LENGTH, HEADS, 8)).at[0, positions[row]].set(q[row])
        expected = formula(whole, k[row : row + 1], v[row : row + 1], slopes, allowed_keys(LENGTH))
        np.testing.assert_allclose(ours[row], expected[0, positions[row]], rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_known", [True, False])
def test_devices_apply_slopes_of_their_heads(is_known):
    """Heads are split over two devices, and rows over two."""
    masks, slopes = (FULL, Mask(window=9)), alibi_slopes(HEADS)
    inputs, segment_ids = random_heads(LENGTH, 2), random_documents(LENGTH)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("dp_shard", "tp"))
    which = 1 if is_known else jnp.int32(1)

    def attend(q, k, v):
        return attend_with_masks(
            "blockwise", masks, which, q, k, v, segment_ids, slopes=jnp.asarray(slopes)
        )

    allowed = allowed_keys(LENGTH, segment_ids, 9)
    with jax.set_mesh(mesh):
        ours = with_gradients(attend, *inputs)
    assert_all_close(ours, with_gradients(lambda *x: formula(*x, slopes, allowed), *inputs))


@pytest.mark.parametrize(
    ("platform", "kernel", "capability"),
    [("gpu", "cudnn", "9.0"), ("gpu", "triton", "9.0"), ("tpu", "splash", None)],
)
def test_kernels_without_alibi_are_refused(platform, kernel, capability):
    at = KernelRequirements(
        platform, jnp.bfloat16, 64, 1024, capability=capability, is_present=False, alibi=True
    )
    choice = choose_backend(ModelConfig(), at)
    assert choice.name == "blockwise"
    assert f"not {kernel}: it has no ALiBi" in choice.why
    with pytest.raises(UserError, match=r'no ALiBi, and model\.position_embedding = "alibi"'):
        choose_backend(ModelConfig(sdpa_backend=kernel), at)
