"""Values of another width than queries and keys, in every attention kernel."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels import flash, partial_attention, splash
from jaxforge.kernels.attention_backends import BACKENDS, KernelRequirements, choose_backend
from jaxforge.kernels.dot_product_attention import cached_attention, masked_attention
from jaxforge.kernels.flash_blocks import TokenPositions
from jaxforge.kernels.flash_kernels import Tiles
from jaxforge.kernels.partial_attention import PARTIAL_KERNELS, BackwardInputs, KeyPart, QueryPart
from jaxforge.kernels.scoring import PLAIN, Scoring

BATCH, LENGTH, HEADS, KV_HEADS = 2, 40, 4, 2
WIDTHS = [(24, 16), (8, 24)]
"""Widths of queries and of values: narrower and wider values."""
SINKS = np.linspace(-1, 1, HEADS, dtype=np.float32)


def drawn(head, value, length=LENGTH):
    rng = np.random.default_rng(0)
    of_heads = ((HEADS, head), (KV_HEADS, head), (KV_HEADS, value), (HEADS, value))
    return [rng.standard_normal((BATCH, length, *each), np.float32) for each in of_heads]


def documents(length=LENGTH):
    ids = np.random.default_rng(1).integers(0, 3, (BATCH, length))
    return np.sort(ids, axis=1).astype(np.int32)


def softmax_attention(q, k, v, ids, scale, softcap=None, sinks=None):
    """Return the result in plain operations, differentiable by JAX."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = np.tril(np.ones((q.shape[1],) * 2, bool)) & (ids[:, :, None] == ids[:, None])
    weights = jnp.where(seen[:, None], jnp.exp(scores), 0)
    total = weights.sum(-1, keepdims=True)
    total += 0 if sinks is None else jnp.exp(sinks)[:, None, None]
    return jnp.einsum("bhst,bthv->bshv", weights / total, v, precision="highest")


def values_and_gradients(attend, q, k, v, d_o):
    y, back = jax.vjp(attend, q, k, v)
    return y, *back(d_o)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(flash, "INTERPRET", True)
    monkeypatch.setattr(flash, "tile_sizes", lambda *_: Tiles(32, 16, 4, 1))
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(partial_attention, "TILE", 16)


CASES = [
    *((name, *widths, PLAIN, None) for name in ("reference", "blockwise", "triton")
      for widths in WIDTHS),
    ("reference", 24, 16, Scoring(0.3, 2.0), SINKS),
    ("blockwise", 24, 16, Scoring(0.3, 2.0), SINKS),
    ("triton", 24, 16, Scoring(0.3, 2.0), SINKS),
    ("splash", 192, 128, PLAIN, None),
]  # fmt: skip


@pytest.mark.parametrize(("name", "head", "value", "scoring", "sinks"), CASES)
def test_kernel_supports_values_of_other_width(name, head, value, scoring, sinks):
    length = 128 if name == "splash" else LENGTH
    ids, arrays = documents(length), drawn(head, value, length)
    attend = functools.partial(BACKENDS[name].attend, segment_ids=ids, scoring=scoring)
    if sinks is not None:
        attend = functools.partial(attend, sinks=sinks)
    computed = jax.jit(functools.partial(values_and_gradients, attend))(*arrays)
    wanted = functools.partial(
        softmax_attention, ids=ids, scale=scoring.scale_of(head), softcap=scoring.softcap,
        sinks=sinks,
    )  # fmt: skip
    expected = jax.jit(functools.partial(values_and_gradients, wanted))(*arrays)
    for result, right in zip(computed, expected, strict=True):
        assert result.shape == right.shape
        np.testing.assert_allclose(result, right, rtol=0, atol=1e-4 if name == "splash" else 2e-5)


@pytest.mark.parametrize(
    ("name", "widths"), [("tiles", WIDTHS[0]), ("tiles", WIDTHS[1]), ("triton", WIDTHS[0])]
)
def test_parts_support_values_of_other_width(name, widths):
    kernel, half = PARTIAL_KERNELS[name], LENGTH // 2
    at, ids = np.tile(np.arange(LENGTH), (BATCH, 1)), documents()

    @jax.jit
    def in_parts(q, k, v, d_o):
        queries = QueryPart(q, TokenPositions(at, ids))
        keys = [KeyPart(k[:, cut], v[:, cut], TokenPositions(at[:, cut], ids[:, cut]))
                for cut in (slice(half), slice(half, None))]  # fmt: skip
        first, second = (kernel.attend(queries, each, PLAIN, None) for each in keys)
        whole = first.merged(second)
        saved = BackwardInputs(d_o, whole.lse, jnp.sum(whole.o * d_o, axis=-1))
        parts = [kernel.gradients(queries, saved, each, PLAIN, None) for each in keys]
        d_keys = zip(parts[0][1:], parts[1][1:], strict=True)
        joined = (jnp.concatenate(each, axis=1) for each in d_keys)
        return whole.o, parts[0].q + parts[1].q, *joined

    arrays = drawn(*widths)
    wanted = functools.partial(softmax_attention, ids=ids, scale=widths[0] ** -0.5)
    expected = jax.jit(functools.partial(values_and_gradients, wanted))(*arrays)
    for result, right in zip(in_parts(*arrays), expected, strict=True):
        np.testing.assert_allclose(result, right, rtol=0, atol=2e-5)


@pytest.mark.parametrize("widths", WIDTHS)
def test_masked_and_cached_attention_support_values_of_other_width(widths):
    q, k, v, _ = drawn(*widths)
    ids, causal = np.zeros((BATCH, LENGTH), int), np.tril(np.ones((LENGTH, LENGTH), bool))
    right = softmax_attention(q, k, v, ids, widths[0] ** -0.5)
    mask = np.broadcast_to(causal, (BATCH, 1, LENGTH, LENGTH))
    masked = masked_attention(q, k, v, mask)
    cached = cached_attention(q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask)
    for result in (masked, cached):
        np.testing.assert_allclose(result, right, rtol=0, atol=2e-5)


GPU = KernelRequirements("gpu", jnp.bfloat16, 128, 256, capability="9.0", is_present=False)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ((192, 128), "multiples of 8 up to 128 .* and this model has 192"),
        ((128, 192), "multiples of 8 up to 128 .* and this model has 192"),
    ],
)
def test_requirements_cover_both_widths(widths, message):
    at = GPU._replace(head_size=widths[0], value_size=widths[1])
    assert choose_backend(ModelConfig(), at).name == "triton"
    with pytest.raises(UserError, match=message):
        choose_backend(ModelConfig(sdpa_backend="cudnn"), at)
