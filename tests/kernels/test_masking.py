"""Tests of masks: windows, chunks, packed documents, caches, and masks that devices select."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.kernels import masking
from jaxforge.kernels.attention_backends import BACKENDS, attend_with_masks, opaque_kernel
from jaxforge.kernels.masking import FULL, Mask
from jaxforge.kernels.scoring import Scoring
from jaxforge.model.transformer import Model
from tests.helpers import initial_params
from tests.model.attention_reference import naive_attention, random_heads

LENGTH = 81
MASKS = (Mask(chunk=16), FULL, Mask(window=9), Mask(chunk=LENGTH + 1))
DOCUMENTS = np.sort(np.random.default_rng(3).integers(4, 9, (2, LENGTH)), axis=1).astype(np.int32)
POSITIONS = np.arange(LENGTH) + np.array([[5], [30]])
LAYOUTS = {"a row": (None, None), "packed": (DOCUMENTS, None), "placed": (None, POSITIONS)}


def pairwise_visibility(mask, segment_ids, positions):
    """Return visibility [b, s, s], computed pair by pair."""
    seen = np.zeros((2, LENGTH, LENGTH), bool)
    for row in range(2):
        ids = np.zeros(LENGTH, int) if segment_ids is None else segment_ids[row]
        first = [int(np.flatnonzero(ids == ids[i])[0]) for i in range(LENGTH)]
        at = [i - first[i] for i in range(LENGTH)] if positions is None else positions[row]
        for query in range(LENGTH):
            for key in range(query + 1):
                seen[row, query, key] = (
                    ids[query] == ids[key]
                    and query - key < (mask.window or LENGTH)
                    and (mask.chunk is None or at[query] // mask.chunk == at[key] // mask.chunk)
                )
    return seen


@functools.cache
def heads():
    return random_heads(LENGTH, 2)


@functools.cache
def expected(which, layout):
    return naive_attention(*heads(), pairwise_visibility(MASKS[which], *LAYOUTS[layout]))


@pytest.fixture(autouse=True)
def opaque_backend(monkeypatch):
    """Use a kernel that is opaque to XLA."""
    kernel = opaque_kernel(BACKENDS["blockwise"].attend, lambda at: None)
    monkeypatch.setitem(BACKENDS, "opaque", kernel)


KERNELS = ("reference", "blockwise", "opaque")
KERNELS_AND_LAYOUTS = [(backend, layout) for backend in KERNELS for layout in LAYOUTS]
KNOWN = [  # every pair of backend, layout and mask
    (*of, which)
    for i, of in enumerate(KERNELS_AND_LAYOUTS)
    for which in range(len(MASKS))
    if (i // len(LAYOUTS) + i + which) % len(LAYOUTS) == 0
]


def on_four_devices(attend, which):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    mesh = jax.sharding.Mesh(devices, ("dp_shard", "tp"))  # with automatic axes
    with jax.set_mesh(mesh):
        return attend(which, *heads())


@pytest.mark.parametrize(("backend", "layout", "which"), KNOWN)
def test_static_mask_matches_pairwise_visibility(backend, layout, which):
    @functools.partial(jax.jit, static_argnums=0)
    def attend(which, *qkv):
        return attend_with_masks(
            backend, MASKS, which, *qkv, *LAYOUTS[layout], Scoring(softcap=1e6)
        )

    program = on_four_devices(attend, which)
    np.testing.assert_allclose(program, expected(which, layout), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("backend", "layout"), KERNELS_AND_LAYOUTS)
def test_traced_mask_matches_pairwise_visibility(backend, layout):
    @jax.jit
    def attend(which, *qkv):
        return attend_with_masks(backend, MASKS, which, *qkv, *LAYOUTS[layout])

    for which in range(len(MASKS)):
        program = on_four_devices(attend, np.int32(which))
        np.testing.assert_allclose(program, expected(which, layout), rtol=0, atol=1e-5)


def test_blockwise_skips_keys_of_other_chunks():
    """A block of 32 queries is multiplied with the 32 keys of its chunk only."""
    q, k, v = (jax.ShapeDtypeStruct((1, 128, 2, 8), jnp.float32),) * 3

    def products(segment_ids, chunk):
        attend = functools.partial(attend_with_masks, "blockwise", (Mask(chunk=chunk),), 0)
        result = jax.make_jaxpr(lambda q, k, v: attend(q, k, v, segment_ids))(q, k, v)
        return str(result).count("1,2,32,128]"), str(result).count("1,2,32,32]")

    assert products(None, 128)[0] > 0
    assert products(None, 32)[0] == 0
    assert products(np.zeros((1, 128), np.int32), 32)[0] == 0, (
        "packed documents skip other chunks, too"
    )


def test_chunks_match_transformers():
    """One document per row, also after left padding."""
    torch = pytest.importorskip("torch")
    masks = pytest.importorskip("transformers.masking_utils")
    config = pytest.importorskip("transformers").PreTrainedConfig(attention_chunk_size=16)
    config._attn_implementation = "eager"
    padding = np.array([0, 5])
    real = np.arange(LENGTH) >= padding[:, None]
    reference = masks.create_chunked_causal_mask(
        config, torch.zeros(2, LENGTH, 1), torch.tensor(real), past_key_values=None
    )
    positions = np.maximum(np.arange(LENGTH) - padding[:, None], 0)
    visible = jax.jit(functools.partial(masking.visible, chunk=16))
    program = np.asarray(visible(positions[:, :, None], positions[:, None]))
    for row, first in enumerate(padding):
        allowed = reference[row, 0].numpy() == 0
        np.testing.assert_array_equal(program[row, first:, first:], allowed[first:, first:])
        ids = np.asarray(masking.chunk_ids(1, LENGTH - first, 16, None))
        alone = (ids[0, :, None] == ids[0]) & np.tri(LENGTH - first, dtype=bool)
        np.testing.assert_array_equal(alone, allowed[first:, first:])


SHAPE = {"dim": 32, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64,
         "ffn_hidden_dim": 32, "init_std": 0.3, "attention_chunk_size": 4,
         "attention_pattern": ("chunked", "full"), "rope_pattern": (True, False)}  # fmt: skip


@functools.cache
def toy():
    model = Model(ModelConfig(**SHAPE))
    return SimpleNamespace(
        model=model, params=initial_params(model), hidden=jax.jit(model.hidden),
        forward=jax.jit(lambda params, batch: model.forward(params, batch)[0]),
        extend=jax.jit(model.extend), logits=jax.jit(model.logits),
    )  # fmt: skip


def tokens_of(length=24):
    return np.random.default_rng(0).integers(0, 64, (2, length))


def test_packed_document_matches_document_alone():
    """Chunks are counted from the start of the document, at any position in the row."""
    program, tokens = toy(), tokens_of()
    segment_ids = np.array([[0] * 7 + [1] * 10 + [2] * 7, [0] * 3 + [1] + [2] * 20])
    packed = np.asarray(program.hidden(program.params, tokens, segment_ids))
    for row, document in np.ndindex(2, 3):
        location = segment_ids[row] == document
        alone = np.zeros((2, 24), int)
        alone[0, : location.sum()] = tokens[row, location]
        expected = np.asarray(program.hidden(program.params, alone))[0, : location.sum()]
        np.testing.assert_allclose(packed[row, location], expected, rtol=0, atol=2e-5)


def test_chunks_follow_given_positions():
    program, tokens = toy(), tokens_of()
    whole = np.asarray(program.hidden(program.params, tokens))
    counted = np.broadcast_to(np.arange(24), (2, 24))
    for positions, same in ((counted, True), (counted + 4, True), (counted + 2, False)):
        result = program.forward(program.params, {"input_ids": tokens, "positions": positions})
        assert np.allclose(result, whole, rtol=0, atol=2e-5) == same


def test_cache_rows_have_independent_chunks():
    program, tokens = toy(), tokens_of()
    expected = np.asarray(program.logits(program.params, program.hidden(program.params, tokens)))
    cache = program.model.empty_cache(2, 24)
    for begins in ([0, 0], [7, 3], [13, 9]):
        at = np.array(begins)[:, None] + np.arange(7)
        rows = np.take_along_axis(tokens, at, 1)
        out, cache = program.extend(program.params, rows, at, cache)
        np.testing.assert_allclose(
            out, np.take_along_axis(expected, at[..., None], 1), rtol=0, atol=2e-5
        )
