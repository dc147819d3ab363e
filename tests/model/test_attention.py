"""Tests of attention: visibility, gradients, choice of kernels, and the cache."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels import splash
from jaxforge.kernels.attention_backends import BACKENDS, KernelRequirements, choose_backend
from jaxforge.kernels.dot_product_attention import masked_attention
from jaxforge.kernels.scoring import PLAIN, Scoring
from jaxforge.model import remat
from jaxforge.model.transformer import Model
from tests.helpers import initial_params
from tests.model.attention_reference import (
    allowed_keys,
    naive_attention,
    random_documents,
    random_heads,
)

VOCAB, LENGTH = 64, 24
DOC_IDS = np.array([[0] * 7 + [1] * 10 + [2] * 7, [0] * 3 + [1] * 1 + [2] * 20])


@functools.cache
def toy(**options):
    """Return a model and parameters with a large std, so that attention is far from uniform."""
    config = ModelConfig(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, ffn_hidden_dim=32,
        init_std=0.3, **options,
    )  # fmt: skip
    model = Model(config)
    return model, initial_params(model)


@functools.cache
def compiled(name):
    """Return a compiled method of the model."""
    return jax.jit(getattr(toy()[0], name))


def hidden(tokens, segment_ids=None):
    return np.asarray(compiled("hidden")(toy()[1], tokens, segment_ids))


def random_tokens(seed=0, shape=(2, LENGTH)):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


XLA_BACKENDS = ("reference", "blockwise")
PACKED = pytest.mark.parametrize("packed", [False, True], ids=["causal", "documents"])


def attended(backend, q, k, v, segment_ids, scoring=PLAIN, **seen):
    """Attend in one program: a program per operation would take a megabyte."""
    attend = functools.partial(BACKENDS[backend].attend, scoring=scoring, **seen)
    return jax.jit(attend)(q, k, v, segment_ids)


SEEN = [
    (6, {}), (2, {}), (1, {}), (2, {"window": 1}), (2, {"window": 40}),
    (2, {"chunk": 1}), (2, {"chunk": 7}), (2, {"chunk": 40}),
]  # fmt: skip
"""Number of key heads, and limits of visibility."""
LENGTHS = (1, LENGTH, 81)  # one block, one block, three blocks, the last one partial


@pytest.mark.parametrize("backend", XLA_BACKENDS)
@pytest.mark.parametrize(
    ("length", "kv_heads", "seen", "packed"),
    [  # every pair of length, visibility and packing
        (length, *seen, (i + j) % 2 == 1)
        for i, length in enumerate(LENGTHS)
        for j, seen in enumerate(SEEN)
    ],
)
def test_backends_compute_softmax_over_visible_keys(backend, length, kv_heads, packed, seen):
    segment_ids = random_documents(length) if packed else None
    q, k, v = random_heads(length, kv_heads)
    computed = attended(backend, q, k, v, segment_ids, **seen)
    naive = naive_attention(q, k, v, allowed_keys(length, segment_ids, **seen))
    np.testing.assert_allclose(computed, naive, rtol=0, atol=1e-5)


masked = jax.jit(masked_attention, static_argnames="scoring")


def test_masked_attention_sees_only_masked_in_keys():
    positions = np.array([[4, 5, 6], [17, 18, 19]])
    mask = np.arange(LENGTH) <= positions[..., None]
    q, k, v = random_heads(LENGTH, 2, n_queries=3)
    computed = masked(q, k, v, mask[:, None])
    np.testing.assert_allclose(computed, naive_attention(q, k, v, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", XLA_BACKENDS)
def test_scores_of_bfloat16_heads_are_float32(backend):
    """Scores reach 30, where bfloat16 has steps of 1/8: e^(1/8) changes a weight by 13 %."""
    q, k, v = random_heads(LENGTH, 2, scale=4.0, dtype=jnp.bfloat16)
    computed = attended(backend, q, k, v, None)
    naive = naive_attention(q, k, v, allowed_keys(LENGTH))
    assert computed.dtype == jnp.bfloat16
    # One rounding of the weights and one of the result, each half a unit in the last place.
    bound = 2 * 2**-8 * float(np.abs(v).max())
    np.testing.assert_allclose(np.asarray(computed, np.float64), naive, rtol=0, atol=bound)


def values_and_gradients(
    backend, length, kv_heads, packed, window=None, *, chunk=None, scoring=PLAIN, **heads
):
    segment_ids = random_documents(length) if packed else None
    of_chunks = {} if chunk is None else {"chunk": chunk}  # cuDNN's kernel has no such argument
    attend = functools.partial(BACKENDS[backend].attend, scoring=scoring, **of_chunks)
    q, k, v = random_heads(length, kv_heads, **heads)
    weights = np.random.default_rng(2).standard_normal(q.shape)

    def loss(q, k, v):
        y = attend(q, k, v, segment_ids, window).astype(jnp.float32)
        return jnp.sum(y * weights), y

    gradients, values = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    return values, gradients


@pytest.mark.parametrize(
    ("length", "kv_heads", "packed"),
    [(LENGTH, 6, True), (LENGTH, 2, False), (LENGTH, 1, True),
     (81, 6, False), (81, 2, True), (81, 1, False)],
)  # fmt: skip
def test_blockwise_gradients_match_reference(length, kv_heads, packed):
    computed = values_and_gradients("blockwise", length, kv_heads, packed)
    reference = values_and_gradients("reference", length, kv_heads, packed)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), computed, reference)


@pytest.mark.parametrize("window", [1, 7, 40])
@PACKED
def test_blockwise_window_gradients_match_reference(packed, window):
    computed = values_and_gradients("blockwise", 81, 2, packed, window)
    reference = values_and_gradients("reference", 81, 2, packed, window)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), computed, reference)


@pytest.mark.parametrize(
    ("packed", "chunk", "scoring"),
    [  # every pair of values
        ((i + j) % 2 == 1, chunk, scoring)
        for i, chunk in enumerate((1, 7, 40))
        for j, scoring in enumerate((PLAIN, Scoring(softcap=2.0)))
    ],
    ids=str,
)
def test_blockwise_chunk_gradients_match_reference(packed, chunk, scoring):
    computed, reference = (
        values_and_gradients(backend, 81, 2, packed, chunk=chunk, scoring=scoring)
        for backend in ("blockwise", "reference")
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), computed, reference)


SCALED, CAPPED = Scoring(scale=0.7), Scoring(scale=0.7, softcap=2.0)


@pytest.mark.parametrize(
    ("packed", "window", "scoring"),
    [(False, None, CAPPED), (True, 7, CAPPED), (True, None, SCALED), (False, 7, SCALED)],
    ids=str,
)
def test_scores_are_scaled_and_capped(packed, window, scoring):
    segment_ids = random_documents(LENGTH) if packed else None
    q, k, v = random_heads(LENGTH, 2)
    allowed = allowed_keys(LENGTH, segment_ids, window)
    naive = naive_attention(q, k, v, allowed, scoring)
    for backend in XLA_BACKENDS:
        computed = attended(backend, q, k, v, segment_ids, scoring, window=window)
        np.testing.assert_allclose(computed, naive, rtol=0, atol=1e-5)
    decoded = masked(q, k, v, allowed[:, None], scoring=scoring)
    np.testing.assert_allclose(decoded, naive, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("window", "scoring"), [(None, CAPPED), (7, CAPPED), (7, SCALED)], ids=str)
def test_blockwise_capped_gradients_match_reference(window, scoring):
    computed = values_and_gradients("blockwise", 81, 2, True, window, scoring=scoring)
    reference = values_and_gradients("reference", 81, 2, True, window, scoring=scoring)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), computed, reference)


@pytest.mark.parametrize(
    ("kv_heads", "packed", "window", "chunk", "scoring", "steps"),
    [
        (6, True, None, None, PLAIN, 8),  # two rows of four tiles in a call
        (1, True, 100, None, PLAIN, 7),  # one row in a call
        pytest.param(2, False, 100, None, CAPPED, 8, marks=pytest.mark.slow),
        pytest.param(2, False, None, 100, PLAIN, 8, marks=pytest.mark.slow),
        pytest.param(2, True, None, 128, CAPPED, 8, marks=pytest.mark.slow),
        (2, True, None, 100, PLAIN, 8),  # rows do not begin with a chunk: one in a call
    ],
)
def test_splash_matches_reference(monkeypatch, kv_heads, packed, window, chunk, scoring, steps):
    """The TPU kernel is interpreted."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash, "BLOCK", 128)  # two blocks
    monkeypatch.setattr(splash, "_MOST_STEPS", steps)
    options = {"h": 128, "scoring": scoring, "chunk": chunk}
    computed = values_and_gradients("splash", 256, kv_heads, packed, window, **options)
    reference = values_and_gradients("reference", 256, kv_heads, packed, window, **options)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), computed, reference)


@pytest.mark.parametrize("window", [None, 300])
def test_splash_skips_tiles_of_other_documents(monkeypatch, window):
    """NaN in tiles that are masked instead of skipped would reach results and gradients."""
    monkeypatch.setattr(splash, "INTERPRET", True)
    monkeypatch.setattr(splash, "BLOCK", 128)
    ids = np.repeat([[3, 5, 9]], 256, axis=1)
    broken = (ids == 5)[..., None, None]
    rng = np.random.default_rng(0)
    inputs = (rng.standard_normal((1, ids.size, 1, 128), np.float32) for _ in range(3))
    q, k, v = (jnp.asarray(np.where(broken, np.nan, x)) for x in inputs)

    def loss(q, k, v):
        y = splash.splash_attention(q, k, v, jnp.asarray(ids), window)
        return jnp.sum(jnp.where(broken, 0, y)), y

    gradients, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(q, k, v)
    for result in (y, *gradients):
        np.testing.assert_array_equal(np.isfinite(result).all(-1), ~broken[..., 0])


def program_of_packed_rows(rows):
    """Return the program of the gradient of splash attention with four tiles in each row."""
    ids, q = jnp.zeros((rows, 1024), jnp.int32), jnp.zeros((rows, 1024, 2, 128), jnp.bfloat16)
    attend = remat.block("none", lambda q: splash.splash_attention(q, q, q, ids))
    return str(jax.make_jaxpr(jax.grad(lambda q: jnp.sum(attend(q).astype(jnp.float32))))(q))


def test_splash_joins_packed_rows():
    """A loop over rows would slice and copy all arrays."""
    assert "[2,5120,128]" in program_of_packed_rows(rows=5)


def test_splash_saves_each_packed_row_once(monkeypatch):
    """A loop that carries the results of all rows would be saved once in every iteration."""
    monkeypatch.setattr(splash, "_MOST_STEPS", 4)
    program = program_of_packed_rows(rows=5)
    assert "[5,2,1024,128]" in program
    assert "[5,5," not in program


@pytest.mark.parametrize(
    ("window", "chunk"),
    [(None, None), (1, None), (15, None), (18, None), (99, None), (None, 16), (None, 18)],
)
def test_splash_mask_tiles_match_visibility(window, chunk):
    """Tiles are computed, or known to be wholly visible or invisible."""
    length, edge = 64, 8
    mask = splash.splash_mask(length, window, chunk)
    parts = [slice(at, at + edge) for at in range(0, length, edge)]
    result = np.block([[mask[rows, columns] for columns in parts] for rows in parts])
    at = np.arange(length)
    back = at[:, None] - at
    seen = (back >= 0) & (back < (window or length))
    if chunk:
        seen &= at[:, None] // chunk == at // chunk
    np.testing.assert_array_equal(result, seen)


@pytest.mark.skipif(jax.default_backend() != "gpu", reason="these run on GPUs only")
@pytest.mark.parametrize("kernel", ["cudnn", "triton"])
@pytest.mark.parametrize(
    ("kv_heads", "window", "h"), [(6, None, 64), (2, None, 128), (1, None, 64), (2, 100, 64)]
)
@PACKED
def test_gpu_kernels_match_reference(kernel, kv_heads, packed, window, h):
    heads = {"h": h, "dtype": jnp.bfloat16, "scoring": Scoring(scale=0.2)}
    computed = values_and_gradients(kernel, 256, kv_heads, packed, window, **heads)
    reference = values_and_gradients("reference", 256, kv_heads, packed, window, **heads)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=0.02, atol=0.05), computed, reference
    )


AT = KernelRequirements("cpu", jnp.dtype("float32"), 64, 256)
TPU = AT._replace(platform="tpu")
GPU = AT._replace(platform="gpu", dtype=jnp.dtype("bfloat16"), capability="9.0")
NO_FLOAT32 = 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
NO_MASK = "not cudnn: it needs an S x S mask for packed documents"
SMALL_TILES = "its tiles need the shared memory of compute capability 8.0, 9.0, 10.0, 10.3"


@pytest.mark.parametrize(
    ("asked", "at", "chosen", "why"),
    [
        ("auto", AT, "blockwise", ""),
        ("auto", GPU, "cudnn", ""),
        ("auto", GPU._replace(packed=True), "triton", NO_MASK),
        ("auto", GPU._replace(packed=True, dtype=jnp.dtype("float16")), "triton", NO_MASK),
        ("auto", GPU._replace(packed=True, capability="8.9"), "cudnn", ""),  # no Triton
        ("auto", GPU._replace(softcap=50.0), "triton", "not cudnn: it does not cap scores"),
        ("auto", GPU._replace(chunk=128), "triton", "not cudnn: it has no mask of chunks"),
        ("auto", GPU._replace(sinks=True), "triton", "not cudnn: it has no attention sinks"),
        ("auto", GPU._replace(sinks=True, capability="8.9"), "blockwise",
         f"not triton: {SMALL_TILES}"),
        ("auto", GPU._replace(head_size=256), "cudnn", ""),
        ("auto", GPU._replace(head_size=256, is_present=False), "triton", "of 8 up to 128"),
        ("auto", GPU._replace(head_size=256, capability="8.0"), "triton", "(256 on a Hopper GPU"),
        ("auto", GPU._replace(head_size=256, capability="10.0"), "triton", "this model has 256"),
        ("auto", GPU._replace(head_size=100), "triton", "multiples of 8 up to 256"),
        ("auto", GPU._replace(head_size=264), "blockwise", "not triton: head widths"),
        ("auto", GPU._replace(capability=None), "cudnn", ""),
        ("auto", GPU._replace(dtype=AT.dtype), "blockwise", f"not cudnn: {NO_FLOAT32}; not triton"),
        ("auto", TPU._replace(softcap=50.0, chunk=128, sinks=True, packed=True), "splash", ""),
        ("auto", TPU, "splash", ""),
        ("auto", TPU._replace(seq_len=100), "blockwise", "not splash: train.seq_len = 100"),
        ("flash", AT, "blockwise", ""),
        ("flash", TPU, "splash", ""),
        ("flash", GPU, "cudnn", ""),
        ("flash", GPU._replace(packed=True), "triton", NO_MASK),
        ("flash", GPU._replace(sinks=True), "triton", ""),
        ("cudnn", GPU._replace(packed=True), "cudnn", ""),
        ("triton", GPU, "triton", ""),
        ("efficient", AT, "blockwise", ""),
        ("math", AT, "reference", ""),
    ],
)  # fmt: skip
def test_choose_backend_prefers_fastest_supported(asked, at, chosen, why):
    result = choose_backend(ModelConfig(sdpa_backend=asked), at)
    assert result.name == chosen
    assert why in result.why
    assert bool(why) == bool(result.why)


@pytest.mark.parametrize(
    ("asked", "at", "message"),
    [
        ("cudnn", AT, '"cudnn" is not supported: it needs an NVIDIA GPU, and this run is on cpu'),
        ("triton", AT, '"triton" is not supported: it needs an NVIDIA GPU, and this run is on'),
        ("flash", GPU._replace(dtype=AT.dtype), NO_FLOAT32),
        ("cudnn", GPU._replace(head_size=160, is_present=False),
         "up to 128 (256 on a Hopper GPU of this machine), and this model has 160"),
        ("triton", GPU._replace(head_size=264), "at most 256, and this model has 264"),
        ("triton", GPU._replace(capability="8.6"), f"{SMALL_TILES}, and these GPUs have 8.6"),
        ("cudnn", GPU._replace(softcap=50.0),
         "it does not cap scores, and model.attn_logit_softcap = 50.0"),
        ("cudnn", GPU._replace(chunk=128),
         "no mask of chunks, and model.attention_chunk_size = 128 cuts sequences of train.seq_len "
         "= 256"),
        ("cudnn", GPU._replace(sinks=True),
         "it has no attention sinks, and model.attention_sinks = true"),
        ("splash", AT, "it needs a TPU"),
        ("splash", TPU._replace(seq_len=100), "train.seq_len = 100 is not a multiple"),
    ],
)  # fmt: skip
def test_unsupported_backend_raises(asked, at, message):
    with pytest.raises(UserError, match=re.escape(message)):
        choose_backend(ModelConfig(sdpa_backend=asked), at)


@pytest.mark.parametrize("changed", [0, 11, LENGTH - 1])
def test_token_is_visible_to_itself_and_later_tokens(changed):
    tokens = random_tokens()
    other = tokens.copy()
    other[:, changed] = (other[:, changed] + 1) % VOCAB
    before, after = hidden(tokens), hidden(other)
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (np.abs(before - after).max(-1)[:, changed:] > 1e-6).all()


def test_rows_of_batch_are_independent():
    tokens = random_tokens()
    other = tokens.copy()
    other[0] = random_tokens(seed=1)[0]
    np.testing.assert_array_equal(hidden(tokens)[1], hidden(other)[1])


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_packed_documents_are_independent(changed):
    tokens = random_tokens()
    inside = changed == DOC_IDS
    other = np.where(inside, (tokens + 1) % VOCAB, tokens)
    before, after = hidden(tokens, DOC_IDS), hidden(other, DOC_IDS)
    np.testing.assert_array_equal(before[~inside], after[~inside])
    assert (np.abs(before - after).max(-1)[inside] > 1e-6).all()


def test_rows_without_segment_ids_are_one_document():
    tokens = random_tokens()
    first, later = DOC_IDS == 0, DOC_IDS > 0
    other = np.where(first, (tokens + 1) % VOCAB, tokens)
    assert (np.abs(hidden(tokens) - hidden(other)).max(-1)[later] > 1e-6).all()


def test_packed_document_matches_document_alone():
    """Positions continue from the document before; only their differences matter."""
    tokens = random_tokens()
    packed = hidden(tokens, DOC_IDS)
    for row, document in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]:
        (at,) = np.nonzero(DOC_IDS[row] == document)
        alone = np.zeros((2, LENGTH), int)  # later tokens do not matter
        alone[0, : len(at)] = tokens[row, at]
        np.testing.assert_allclose(packed[row, at], hidden(alone)[0, : len(at)], rtol=0, atol=1e-5)


def extended(tokens, chunks):
    """Return the logits of `tokens`, fed to the cache in chunks of these sizes."""
    model, params = toy()
    cache, logits, at = model.empty_cache(2, LENGTH), [], 0
    for size in chunks:
        positions = np.broadcast_to(np.arange(at, at + size), (2, size))
        chunk = tokens[:, at : at + size]
        out, cache = compiled("extend")(params, chunk, positions, cache)
        logits.append(out)
        at += size
    return np.concatenate(logits, axis=1)


def full_logits(tokens):
    return np.asarray(compiled("logits")(toy()[1], hidden(tokens)))


@pytest.mark.parametrize(
    "chunks",
    [[LENGTH], [10] + [1] * (LENGTH - 10), [1] * LENGTH, [10, 7, 7]],
    ids=["prefill", "prefill, then one by one", "one by one", "prefill, then several at once"],
)
def test_cached_logits_match_full_forward(chunks):
    tokens = random_tokens()
    full = full_logits(tokens)
    assert full.std() > 0.1
    np.testing.assert_allclose(extended(tokens, chunks), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7])
def test_cache_rows_may_have_different_positions(size):
    model, params = toy()
    tokens, lengths = random_tokens(), np.array([4, 10])
    extend = compiled("extend")
    prefill = np.broadcast_to(np.arange(10), (2, 10))
    # Row 0 has six padding tokens: they must be overwritten before they are visible.
    padded = np.where(prefill < lengths[:, None], tokens[:, :10], 0)
    _, cache = extend(params, padded, prefill, model.empty_cache(2, LENGTH))
    rows = np.arange(2)[:, None]
    for start in range(0, 14, size):
        at = lengths[:, None] + start + np.arange(size)
        logits, cache = extend(params, tokens[rows, at], at, cache)
        np.testing.assert_allclose(logits, full_logits(tokens)[rows, at], rtol=0, atol=1e-5)


def test_cache_has_compute_dtype_and_logits_are_float32():
    config = toy()[0].config
    model = Model(config, dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    cache = jax.eval_shape(lambda: model.empty_cache(2, LENGTH))
    logits, after = jax.eval_shape(model.extend, model.abstract, tokens, tokens, cache)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {jnp.dtype(jnp.bfloat16)}
    assert after["layers"].k.shape == cache["layers"].k.shape == (2, 2, 2, LENGTH, 8)
    assert jax.eval_shape(model.hidden, model.abstract, tokens).dtype == jnp.bfloat16
