"""Who sees whom: causality, documents, the cache; and the softmax itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.model.attention import BACKENDS, Visible
from jaxforge.model.transformer import Model

VOCAB, LENGTH = 64, 24
DOC_IDS = np.array([[0] * 7 + [1] * 10 + [2] * 7, [0] * 3 + [1] * 1 + [2] * 20])


@functools.cache
def toy(**options):
    """A model with its parameters, initialised widely so that attention is far from uniform."""
    config = ModelConfig(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, ffn_hidden_dim=32,
        init_std=0.3, **options,
    )  # fmt: skip
    model = Model(config)
    return model, model.init(jax.random.key(0))


@functools.cache
def compiled():
    model, _ = toy()
    return jax.jit(model.hidden), jax.jit(model.extend)


def hidden(tokens, doc_ids=None):
    return np.asarray(compiled()[0](toy()[1], tokens, doc_ids))


def random_tokens(seed=0, shape=(2, LENGTH)):
    return np.random.default_rng(seed).integers(0, VOCAB, shape)


def naive_attention(q, k, v, allowed):
    """One query at a time in float64; head i shares the keys of its group."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    out = np.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b, i, head in np.ndindex(*q.shape[:3]):
        keys, values = k[b, :, head // group], v[b, :, head // group]
        seen = allowed[b, i]
        scores = keys[seen] @ q[b, i, head] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[b, i, head] = weights / weights.sum() @ values[seen]
    return out


def allowed_keys(visible, n_queries, n_keys, batch=2):
    allowed = np.zeros((batch, n_queries, n_keys), bool)
    for b, i, j in np.ndindex(*allowed.shape):
        at = i if visible.positions is None else visible.positions[b, i]
        same = visible.doc_ids is None or visible.doc_ids[b, i] == visible.doc_ids[b, j]
        allowed[b, i, j] = j <= at and same
    return allowed


VISIBLE = {
    "causal": Visible(),
    "documents": Visible(doc_ids=DOC_IDS),
    "positions": Visible(positions=np.array([[4, 5, 6], [17, 18, 19]])),
}


def random_heads(n_queries, kv_heads, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = [(2, n_queries, 6, 8), (2, LENGTH, kv_heads, 8), (2, LENGTH, kv_heads, 8)]
    return [jnp.asarray(scale * rng.standard_normal(shape), dtype) for shape in shapes]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("kind", "kv_heads"),
    [("causal", 2), ("documents", 6), ("documents", 2), ("documents", 1), ("positions", 2)],
)
def test_backends_are_softmax_over_the_visible_keys(backend, kind, kv_heads):
    visible = VISIBLE[kind]
    n_queries = 3 if kind == "positions" else LENGTH
    q, k, v = random_heads(n_queries, kv_heads)
    ours = BACKENDS[backend](q, k, v, jax.tree.map(jnp.asarray, visible))
    naive = naive_attention(q, k, v, allowed_keys(visible, n_queries, LENGTH))
    np.testing.assert_allclose(ours, naive, rtol=0, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scores_of_bfloat16_heads_are_float32(backend):
    """Scores reach 30 here, where bfloat16 counts in eighths: e^(1/8) is 13 % of a weight."""
    q, k, v = random_heads(LENGTH, 2, scale=4.0, dtype=jnp.bfloat16)
    ours = BACKENDS[backend](q, k, v, Visible())
    naive = naive_attention(q, k, v, allowed_keys(Visible(), LENGTH, LENGTH))
    assert ours.dtype == jnp.bfloat16
    # One rounding of the weights and one of the result, each half a unit in the last place.
    bound = 2 * 2**-8 * float(jnp.max(jnp.abs(v)))
    np.testing.assert_allclose(np.asarray(ours, np.float64), naive, rtol=0, atol=bound)


@pytest.mark.parametrize("changed", [0, 11, LENGTH - 1])
def test_a_token_is_seen_by_itself_and_later_ones_only(changed):
    tokens = random_tokens()
    other = tokens.copy()
    other[:, changed] = (other[:, changed] + 1) % VOCAB
    before, after = hidden(tokens), hidden(other)
    np.testing.assert_array_equal(before[:, :changed], after[:, :changed])
    assert (np.abs(before - after).max(-1)[:, changed:] > 1e-6).all()


def test_rows_of_a_batch_do_not_see_each_other():
    tokens = random_tokens()
    other = tokens.copy()
    other[0] = random_tokens(seed=1)[0]
    np.testing.assert_array_equal(hidden(tokens)[1], hidden(other)[1])


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_documents_do_not_see_each_other(changed):
    tokens = random_tokens()
    inside = changed == DOC_IDS
    other = np.where(inside, (tokens + 1) % VOCAB, tokens)
    before, after = hidden(tokens, DOC_IDS), hidden(other, DOC_IDS)
    np.testing.assert_array_equal(before[~inside], after[~inside])
    assert (np.abs(before - after).max(-1)[inside] > 1e-6).all()


def test_without_document_ids_they_do():
    tokens = random_tokens()
    first, later = DOC_IDS == 0, DOC_IDS > 0
    other = np.where(first, (tokens + 1) % VOCAB, tokens)
    assert (np.abs(hidden(tokens) - hidden(other)).max(-1)[later] > 1e-6).all()


def test_a_packed_document_is_what_it_is_alone():
    """Its positions go on from the document before, but only their differences matter."""
    tokens = random_tokens()
    packed = hidden(tokens, DOC_IDS)
    for row, document in [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]:
        (at,) = np.nonzero(DOC_IDS[row] == document)
        alone = np.zeros((2, LENGTH), int)  # causal: what comes after does not matter
        alone[0, : len(at)] = tokens[row, at]
        np.testing.assert_allclose(packed[row, at], hidden(alone)[0, : len(at)], rtol=0, atol=1e-5)


def extended(tokens, pieces):
    """Logits of `tokens`, fed to the cache in pieces of these sizes."""
    model, params = toy()
    cache, logits, at = model.empty_cache(2, LENGTH), [], 0
    for size in pieces:
        positions = np.broadcast_to(np.arange(at, at + size), (2, size))
        piece = tokens[:, at : at + size]
        out, cache = compiled()[1](params, piece, positions, cache)
        logits.append(out)
        at += size
    return np.concatenate(logits, axis=1)


def full_logits(tokens):
    model, params = toy()
    return np.asarray(model.logits(params, hidden(tokens)))


@pytest.mark.parametrize(
    "pieces",
    [[LENGTH], [10] + [1] * (LENGTH - 10), [1] * LENGTH, [10, 7, 7]],
    ids=["prefill", "prefill, then one by one", "one by one", "prefill, then several at once"],
)
def test_the_cache_gives_the_logits_of_the_full_forward(pieces):
    tokens = random_tokens()
    full = full_logits(tokens)
    assert full.std() > 0.1
    np.testing.assert_allclose(extended(tokens, pieces), full, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 7])
def test_rows_of_a_cache_may_stand_at_different_positions(size):
    model, params = toy()
    tokens, lengths = random_tokens(), np.array([4, 10])
    extend = compiled()[1]
    prefill = np.broadcast_to(np.arange(10), (2, 10))
    # Row 0 holds six tokens too many: they must be overwritten before they are seen.
    padded = np.where(prefill < lengths[:, None], tokens[:, :10], 0)
    _, cache = extend(params, padded, prefill, model.empty_cache(2, LENGTH))
    rows = np.arange(2)[:, None]
    for start in range(0, 14, size):
        at = lengths[:, None] + start + np.arange(size)
        logits, cache = extend(params, tokens[rows, at], at, cache)
        np.testing.assert_allclose(logits, full_logits(tokens)[rows, at], rtol=0, atol=1e-5)


def test_the_cache_keeps_the_dtype_of_the_computation_and_logits_are_float32():
    config = toy()[0].config
    model = Model(config, dtype=jnp.bfloat16)
    tokens = jax.ShapeDtypeStruct((2, 5), jnp.int32)
    cache = jax.eval_shape(lambda: model.empty_cache(2, LENGTH))
    logits, after = jax.eval_shape(model.extend, model.abstract, tokens, tokens, cache)
    assert logits.dtype == jnp.float32
    assert {leaf.dtype for leaf in after} == {jnp.dtype(jnp.bfloat16)}
    assert after.k.shape == cache.k.shape == (2, 2, LENGTH, 2, 8)
    assert jax.eval_shape(model.hidden, model.abstract, tokens).dtype == jnp.bfloat16
