"""Tests of flash attention for GPUs, interpreted: reference, partial keys, skipped blocks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.kernels import flash
from jaxforge.kernels.dot_product_attention import reference_attention
from jaxforge.kernels.flash_blocks import TokenPositions, block_ranges, block_visibility
from jaxforge.kernels.flash_kernels import Tiles
from jaxforge.kernels.scoring import Scoring
from jaxforge.parallel import targets

CLOSE = functools.partial(np.testing.assert_allclose, rtol=0, atol=2e-5)
TILES = Tiles(32, 16, 4, 1)  # small, so that short sequences have many blocks
CAPPED = Scoring(scale=0.7, softcap=2.0)
FOUR_SINKS = np.arange(4, dtype=np.float32)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(flash, "INTERPRET", True)
    monkeypatch.setattr(flash, "tile_sizes", lambda kernel, *_: TILES)


def random_heads(length, heads, h, batch=2):
    rng = np.random.default_rng(0)
    shapes = [(batch, length, n, h) for n in (*heads, heads[1])]
    return [rng.standard_normal(shape, np.float32) for shape in shapes]


def random_documents(length, batch=2):
    ids = np.random.default_rng(1).integers(0, 5, (batch, length))
    return np.sort(ids, axis=1).astype(np.int32)


def values_and_gradients(attend, q, k, v, sinks=None, **options):
    weights = np.random.default_rng(2).standard_normal(q.shape)

    def loss(q, k, v, sinks):
        y = attend(q, k, v, sinks=sinks, **options)
        return jnp.sum(y * weights), y

    of = (0, 1, 2) if sinks is None else (0, 1, 2, 3)
    return jax.jit(jax.grad(loss, of, has_aux=True))(q, k, v, sinks)


@pytest.mark.parametrize(
    ("heads", "h", "length", "packed", "window", "options"),
    [
        pytest.param((4, 4), 16, 96, False, None, {}, marks=pytest.mark.slow),
        pytest.param((2, 1), 256, 64, True, 20, {}, marks=pytest.mark.slow),
        ((4, 1), 16, 50, False, 1, {}),
        # heads are padded to 32
        ((4, 2), 24, 110, True, 40, {"scoring": Scoring(softcap=2.0), "sinks": FOUR_SINKS}),
        ((2, 2), 16, 110, True, None, {"chunk": 30}),
        ((2, 2), 16, 7, False, None, {"sinks": -np.ones(2, np.float32)}),  # less than a block
    ],
)
def test_flash_attention_matches_reference(heads, h, length, packed, window, options):
    qkv, ids = random_heads(length, heads, h), random_documents(length) if packed else None
    computed, reference = (
        values_and_gradients(attend, *qkv, segment_ids=ids, window=window, **options)
        for attend in (flash.flash_attention, reference_attention)
    )
    jax.tree.map(CLOSE, computed, reference)


@pytest.mark.parametrize("programs", [0, 10**6])
def test_head_gradients_are_summed_in_or_after_kernel(monkeypatch, programs):
    monkeypatch.setattr(flash, "PROGRAMS", programs)
    qkv = random_heads(64, (6, 2), 16)
    loss = lambda *qkv: jnp.sum(flash.flash_attention(*qkv, None))  # noqa: E731
    is_summed_after = "2,64,2,3,16]" in str(jax.make_jaxpr(jax.grad(loss))(*qkv))
    assert is_summed_after == (programs > 0)
    computed, reference = (
        values_and_gradients(attend, *qkv, segment_ids=random_documents(64))
        for attend in (flash.flash_attention, reference_attention)
    )
    jax.tree.map(CLOSE, computed, reference)


def chunks(x, size):
    return [x[:, at : at + size] for at in range(0, x.shape[1], size)]


FORWARD = jax.jit(flash.forward, static_argnames=("scoring", "dtype"))
BACKWARD = jax.jit(flash.backward, static_argnames=("scoring", "dtype"))


def test_merged_key_parts_match_reference():
    """Parts are in any order, visible or not, as in a ring; the window is traced."""
    length, size, window, scoring = 96, 48, 60, CAPPED
    q, k, v = random_heads(length, (4, 2), 16)
    order = np.random.default_rng(3).permutation(6).repeat(16) * 16 + np.tile(np.arange(16), 6)
    at, ids = np.tile(np.arange(length), (2, 1)), random_documents(length)
    d_y = np.random.default_rng(2).standard_normal(q.shape, np.float32)

    @jax.jit
    def whole(q, k, v, d_y):
        attend = functools.partial(reference_attention, segment_ids=ids, window=window)
        y, pull = jax.vjp(functools.partial(attend, scoring=scoring), q, k, v)
        return y, *pull(d_y)

    expected = [np.asarray(each)[:, order] for each in whole(q, k, v, d_y)]
    q, k, v, at, ids, d_y = (x[:, order] for x in (q, k, v, at, ids, d_y))
    queries = TokenPositions(at, ids)
    keys = [TokenPositions(*each) for each in zip(chunks(at, size), chunks(ids, size), strict=True)]
    kv = list(zip(chunks(k, size), chunks(v, size), keys, strict=True))

    result = [map(np.asarray, FORWARD(q, k, v, queries, t, window, scoring)) for k, v, t in kv]
    outputs, sums = zip(*result, strict=True)
    lse = np.logaddexp(*sums)
    shares = [np.exp(item - lse).swapaxes(1, 2)[..., None] for item in sums]
    y = outputs[0] * shares[0] + outputs[1] * shares[1]
    delta = flash.compute_delta(y, d_y)
    gradients = [BACKWARD(q, k, v, queries, t, lse, delta, d_y, window, scoring) for k, v, t in kv]
    dq = gradients[0][0] + gradients[1][0]
    dk, dv = (np.concatenate([item[i] for item in gradients], axis=1) for i in (1, 2))
    for computed, reference_result in zip((y, dq, dk, dv), expected, strict=True):
        CLOSE(computed, reference_result)


def test_blind_queries_return_zeros():
    q, k, v = random_heads(32, (2, 1), 16)
    at = np.tile(np.arange(32), (2, 1))
    earlier = (
        TokenPositions(at),
        TokenPositions(at + 20),
    )  # the first 20 queries see no key, the others 12
    y, lse = FORWARD(q, k, v, *earlier)
    assert (np.asarray(y)[:, :20] == 0).all()
    assert (np.asarray(lse)[..., :20] == -np.inf).all()
    assert np.isfinite(np.asarray(lse)[..., 20:]).all()
    gradients = BACKWARD(q, k, v, *earlier, lse, flash.compute_delta(y, q), q)
    assert all(np.isfinite(x).all() for x in gradients)
    assert (np.asarray(gradients[0])[:, :20] == 0).all()
    assert (np.asarray(gradients[1])[:, 12:] == 0).all()
    assert (np.asarray(gradients[1])[:, :12] != 0).all()


def test_flash_results_are_rounded_once():
    q, k, v = (x.astype(jnp.bfloat16) for x in random_heads(32, (2, 1), 16))
    at = TokenPositions(np.tile(np.arange(32), (2, 1)))
    y, lse = FORWARD(q, k, v, at, at)
    assert (y.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    exact, _ = FORWARD(q, k, v, at, at, dtype=jnp.float32)
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(exact).astype(jnp.bfloat16), y)
    delta = flash.compute_delta(y, q)
    backward = functools.partial(flash.backward, dtype=jnp.float32)
    of_sums = jax.eval_shape(backward, q, k, v, at, at, lse, delta, q)
    assert {x.dtype for x in of_sums} == {jnp.dtype("float32")}


def visits(positions, documents=None, window=None, block=4):
    ids = None if documents is None else np.array([documents], np.int32)
    tokens = TokenPositions(np.array([positions], np.int32), ids)
    return visited(tokens, tokens, block, window)[0].tolist()


@functools.partial(jax.jit, static_argnums=2)
def _visited(queries, keys, block, window):
    return block_ranges(*block_visibility(queries, keys, (block, block), window))


def visited(queries, keys, block=4, window=None):
    return np.asarray(_visited(queries, keys, block, window))


@pytest.mark.parametrize(
    ("positions", "documents", "window", "expected"),
    [  # per block: first, first whole, end of whole, end
        (range(12), None, None, [[0, 1, 1, 1], [0, 0, 1, 2], [0, 0, 2, 3]]),
        (range(12), None, 5, [[0, 1, 1, 1], [0, 2, 2, 2], [1, 3, 3, 3]]),
        (range(12), None, 6, [[0, 1, 1, 1], [0, 2, 2, 2], [0, 3, 3, 3]]),  # 8 sees 3
        (range(12), None, 7, [[0, 1, 1, 1], [0, 2, 2, 2], [0, 3, 3, 3]]),  # 7 does not see 0
        (range(12), None, 8, [[0, 1, 1, 1], [0, 0, 1, 2], [0, 1, 2, 3]]),
        (range(12), [0] * 4 + [1] * 8, None, [[0, 1, 1, 1], [1, 2, 2, 2], [1, 1, 2, 3]]),
        (range(12), [0] * 6 + [1] * 6, None, [[0, 1, 1, 1], [0, 2, 2, 2], [1, 3, 3, 3]]),
        ([4, 5, 6, 7, 0, 1, 2, 3], None, None, [[0, 1, 2, 2], [1, 2, 2, 2]]),  # any order
    ],
)
def test_block_ranges_skip_invisible_and_unmask_whole_blocks(
    positions, documents, window, expected
):
    assert visits(positions, documents, window) == expected


def test_earlier_queries_visit_no_key_block():
    early = TokenPositions(np.arange(8)[None], np.zeros((1, 8), np.int32))
    late = TokenPositions(np.arange(8, 16)[None], np.zeros((1, 8), np.int32))
    assert visited(early, late).tolist() == [[[0] * 4] * 2]
    other = late._replace(documents=late.documents + 1)
    assert visited(other, early).tolist() == [[[0] * 4] * 2]


@pytest.mark.skipif(
    not targets.has_gpu_compiler(),
    reason="needs XLA's compiler for GPUs: make test-gpu-compiler",
)
@pytest.mark.parametrize(
    ("h", "value"), [(64, 64), (80, 80), (128, 128), (256, 256), (192, 128)], ids=str
)
def test_flash_attention_compiles_for_h100(monkeypatch, h, value):
    monkeypatch.undo()
    jax.config.update("jax_enable_compilation_cache", False)
    item = jax.sharding.SingleDeviceSharding(targets.gpus("h100")[0])
    heads = ((8, h), (2, h), (2, value))
    shapes = [*(((1, 1024, *each), jnp.bfloat16) for each in heads), ((1, 1024), jnp.int32)]
    qkv = [jax.ShapeDtypeStruct(*shape, sharding=item) for shape in shapes]

    def loss(q, k, v, ids):
        return jnp.sum(flash.flash_attention(q, k, v, ids, 300).astype(jnp.float32))

    try:
        text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(*qkv).compile().as_text()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert all(f'name = "flash_{kernel}"' in text for kernel in ("forward", "dq", "dkv"))
    assert "1024,1024]" not in text
