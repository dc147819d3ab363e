"""Tests of partial attention, by tiles, against attention over all keys."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.kernels import flash, partial_attention
from jaxforge.kernels.dot_product_attention import reference_attention
from jaxforge.kernels.flash_blocks import TokenPositions
from jaxforge.kernels.partial_attention import (
    PARTIAL_KERNELS,
    BackwardInputs,
    KeyPart,
    QueryPart,
    attend_to_part,
    gradients_of_part,
)
from jaxforge.kernels.scoring import Scoring

ROWS, LENGTH, HEADS, KV_HEADS, SIZE = 2, 24, 4, 2, 8
HALF = 10  # keys of the first part; neither part is a multiple of a tile


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    monkeypatch.setattr(partial_attention, "TILE", 4)
    monkeypatch.setattr(flash, "INTERPRET", True)


@functools.cache
def drawn():
    rng = np.random.default_rng(0)
    each = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [rng.standard_normal((ROWS, LENGTH, heads, SIZE), np.float32) for heads in each]


def documents():
    ids = np.sort(np.random.default_rng(0).integers(0, 4, (ROWS, LENGTH)), axis=1)
    return ids.astype(np.int32)


CASES = {
    "causal": {},
    "packed": {"segment_ids": documents()},
    "window": {"window": 5},
    "packed, window": {"segment_ids": documents(), "window": 3},
    "capped": {"scoring": Scoring(0.3, 2.0)},
}


def whole(options):
    """Return values and gradients of the reference."""
    options = {"segment_ids": None, **options}

    def values_and_gradients(q, k, v, d_o):
        y, back = jax.vjp(lambda q, k, v: reference_attention(q, k, v, **options), q, k, v)
        return y, back(d_o)

    return jax.jit(values_and_gradients)(*drawn())


def queries(q, segment_ids=None):
    return QueryPart(q, TokenPositions(_positions(0, LENGTH), segment_ids))


def parts(k, v, segment_ids=None):
    """Return the keys in two parts."""
    ids = None if segment_ids is None else (segment_ids[:, :HALF], segment_ids[:, HALF:])
    cuts = slice(0, HALF), slice(HALF, LENGTH)
    at = [
        TokenPositions(_positions(cut.start, cut.stop), None if ids is None else ids[i])
        for i, cut in enumerate(cuts)
    ]
    return [KeyPart(k[:, cut], v[:, cut], where) for cut, where in zip(cuts, at, strict=True)]


def _positions(start, end):
    return np.tile(np.arange(start, end), (ROWS, 1))


def scoring_and_window(options):
    window = options.get("window")
    window = None if window is None else jnp.int32(window)
    return options.get("scoring", Scoring()), window


@pytest.mark.parametrize(
    ("name", "case"), [*(("tiles", case) for case in CASES), ("triton", "packed, window")]
)
def test_merged_parts_match_full_attention(name, case):
    kernel, options = PARTIAL_KERNELS[name], CASES[case]

    @jax.jit
    def in_parts(q, k, v, d_o):
        query_part, how = queries(q, options.get("segment_ids")), scoring_and_window(options)
        keys = parts(k, v, options.get("segment_ids"))
        first, second = (kernel.attend(query_part, each, *how) for each in keys)
        got = first.merged(second)
        backward_inputs = BackwardInputs(d_o, got.lse, jnp.sum(got.o * d_o, axis=-1))
        return got.o, [gradients_of_part(query_part, backward_inputs, each, *how) for each in keys]

    got, (of_first, of_second) = in_parts(*drawn())
    want, d_want = whole(options)
    np.testing.assert_allclose(got, want, atol=2e-6)
    np.testing.assert_allclose(of_first.q + of_second.q, d_want[0], atol=5e-6)
    for name, item in (("k", d_want[1]), ("v", d_want[2])):
        joined = np.concatenate([getattr(of_first, name), getattr(of_second, name)], axis=1)
        np.testing.assert_allclose(joined, item, atol=5e-6)


def test_invisible_keys_give_zero_results_and_gradients():
    @jax.jit
    def of_later_keys(q, k, v, d_o):
        query_part, later = (
            queries(q),
            KeyPart(k, v, TokenPositions(_positions(LENGTH, 2 * LENGTH))),
        )
        part = attend_to_part(query_part, later, Scoring(), None)
        backward_inputs = BackwardInputs(d_o, part.lse, jnp.zeros_like(part.lse))
        gradients = gradients_of_part(query_part, backward_inputs, later, Scoring(), None)
        return part, part.merged(part), gradients

    part, again, gradients = jax.device_get(of_later_keys(*drawn()))
    for result in (part, again):
        assert (result.o == 0).all()
        assert (result.lse == -np.inf).all()
    for gradient in gradients:
        assert (gradient == 0).all()


@pytest.mark.parametrize(
    ("documents_of", "window", "tiles"), [(LENGTH, None, 21), (LENGTH, 4, 11), (8, None, 9)]
)
def test_invisible_tiles_are_skipped(documents_of, window, tiles, monkeypatch):
    """There are 6 x 6 tiles of 4 tokens; 21 are on or below the diagonal."""
    counted = []
    scores = partial_attention.attention_scores

    def count(*args):
        jax.debug.callback(lambda: counted.append(1))
        return scores(*args)

    monkeypatch.setattr(partial_attention, "attention_scores", count)
    q, k, v, _ = drawn()
    ids = _positions(0, LENGTH) // documents_of
    window = None if window is None else jnp.int32(window)
    keys = KeyPart(k, v, TokenPositions(_positions(0, LENGTH), ids))
    attend = jax.jit(lambda *given: attend_to_part(*given, Scoring(), window))
    jax.block_until_ready(attend(queries(q, ids), keys))
    jax.effects_barrier()
    assert len(counted) == tiles
