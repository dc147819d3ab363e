"""Tests of layers of several kinds: periods, visibility, and the scan."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig, Rope
from jaxforge.config.reading.load import make_config
from jaxforge.errors import UserError
from jaxforge.kernels.masking import FULL, Mask
from jaxforge.model.layer import LayerSettings
from jaxforge.model.plan import (
    LayerKind,
    LayerPlan,
    Period,
    build_layer_plan,
    shortest_period,
)
from jaxforge.model.runtime import Runtime
from jaxforge.model.transformer import Model
from jaxforge.parallel.stages import Stack
from tests.helpers import initial_params

LENGTH, VOCAB = 24, 64
SHAPE = {"dim": 32, "n_heads": 4, "n_kv_heads": 2, "vocab_size": VOCAB, "ffn_hidden_dim": 32,
         "init_std": 0.3, "sliding_window": 5}  # fmt: skip
PERIODIC = {"n_layers": 6, "attention_pattern": ("sliding", "sliding", "full")}
LEADING = {
    "n_layers": 9,
    "attention_pattern": ("full", "full", *("sliding", "sliding", "full") * 2, "sliding"),
    "rope_pattern": (True, True, False),
    "local_rope_theta": 100.0,
}
CHUNKED = {  # a leading layer, a period of four, and a remainder: all three kinds
    "n_layers": 10,
    "attention_pattern": ("sliding", *("chunked", "chunked", "chunked", "full") * 2, "sliding"),
    "rope_pattern": (True, True, True, True, False, True, True, True, False, True),
    "attention_chunk_size": 4,
}
MIXED = {  # fewer layers with all kinds of masks and ropes
    "n_layers": 6,
    "attention_pattern": ("sliding", *("chunked", "full") * 2, "sliding"),
    "rope_pattern": (True, True, False, True, False, True),
    "local_rope_theta": 100.0,
    "attention_chunk_size": 4,
}
PLANS = pytest.mark.parametrize("layers", [PERIODIC, MIXED], ids=["period", "mixed"])


@pytest.mark.parametrize(
    ("kinds", "period"),
    [
        ("a", (0, 1, 1)),
        ("aaaa", (0, 1, 4)),
        ("abab", (0, 2, 2)),
        ("aabaabaa", (0, 3, 2)),  # the last two start another group
        ("abbbb", (1, 1, 4)),
        ("aaaab", (0, 1, 4)),
        ("aababab", (1, 2, 3)),
        ("aaabccccc", (4, 1, 5)),
        ("abc", (0, 1, 1)),
    ],
)
def test_shortest_period_compiles_fewest_layers(kinds, period):
    assert shortest_period(tuple(kinds)) == Period(*period)


def test_layer_kinds_follow_config():
    plan = build_layer_plan(ModelConfig(**SHAPE, **LEADING))
    windows = [plan.masks[kind.mask] for kind in plan.layers]
    assert windows == [Mask(n) for n in (None, None, 5, 5, None, 5, 5, None, 5)]
    full, local = Rope(10000.0, None, 8), Rope(100.0, None, 8)
    ropes = [plan.ropes[kind.rope] for kind in plan.layers]
    assert ropes == [full, full, None, local, full, None, local, full, None]
    for window in (None, 7):
        plan = build_layer_plan(ModelConfig(n_layers=3, head_dim=8, sliding_window=window))
        expected = LayerPlan((Mask(window),), (full,), (LayerKind(0, 0),) * 3, ("layers",) * 3)
        assert plan == expected


def test_layers_of_three_kinds_form_period():
    plan = build_layer_plan(ModelConfig(**SHAPE, **CHUNKED))
    chunked, sliding = Mask(chunk=4), Mask(window=5)
    masks = [plan.masks[kind.mask] for kind in plan.layers]
    assert masks == [sliding, *[chunked, chunked, chunked, FULL] * 2, sliding]
    assert plan.period == Period(1, 4, 2)
    plan = build_layer_plan(ModelConfig(**SHAPE, **MIXED))
    assert plan.period == Period(1, 2, 2)
    assert (len(plan.masks), len(plan.ropes)) == (3, 3)
    everywhere = build_layer_plan(ModelConfig(n_layers=3, attention_chunk_size=4))
    assert everywhere.masks == (chunked,)


def test_padding_rows_have_an_existing_kind():
    plan = build_layer_plan(ModelConfig(**SHAPE, **PERIODIC))
    *rows, in_bf16 = plan.kinds_by_row(Stack(6, 4))
    assert in_bf16 is None
    kinds = [LayerKind(*row) for row in zip(*rows, strict=True)]
    assert [kind for kind, layer in zip(kinds, Stack(6, 4).rows(), strict=True) if layer >= 0] == [
        *plan.layers
    ]
    assert len(kinds) == 8
    assert set(kinds) <= set(plan.layers)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"attention_pattern": ["sliding"]}, "requires sliding_window"),
        ({"attention_pattern": ["full"], "sliding_window": 4}, "sliding_window = 4 has no effect"),
        ({"local_rope_theta": 100.0}, "has no effect without sliding_window"),
        ({"attention_pattern": ["silding"]}, "silding"),
        ({"attention_pattern": ["chunked"]}, "requires attention_chunk_size"),
        (
            {"attention_pattern": ["full"], "attention_chunk_size": 4},
            "chunk_size = 4 has no effect",
        ),
        ({"sliding_window": 4, "attention_chunk_size": 4}, "apply to different layers"),
    ],
)
def test_conflicting_layer_kinds_raise(keys, message):
    with pytest.raises(UserError, match=message):
        make_config({"model": keys})


@functools.cache
def toy(**options):
    model = Model(ModelConfig(**SHAPE, **options))
    return model, initial_params(model)


def random_tokens():
    return np.random.default_rng(0).integers(0, VOCAB, (2, LENGTH))


def run_layer(model, params, x, context, kind):
    settings = LayerSettings(kind, model.plan, model.runtime)
    return model.module("layers", params)(x, context, settings=settings)


def one_by_one(model, params, tokens, segment_ids=None):
    """Run the layers one by one, by the plan."""
    x = model.embed_tokens(params, tokens)
    context = model.context(x, segment_ids=segment_ids)
    for i, kind in enumerate(model.plan.layers):
        layer = jax.tree.map(lambda leaf, i=i: leaf[i], params["layers"])
        x, _ = run_layer(model, layer, x, context, kind)
    return model.final_norm(params, x)


def total(run, params):
    """Return a value that depends on every layer, and its gradient."""
    return jax.jit(jax.value_and_grad(lambda params: jnp.sum(jnp.sin(run(params)))))(params)


@functools.cache
def total_of_one_by_one(**layers):
    model, params = toy(**layers)
    return total(lambda params: one_by_one(model, params, random_tokens()), params)


@pytest.mark.parametrize(
    ("save", "unroll", "layers"),
    [  # both plans, with several policies and numbers of unrolled layers
        ("none", 1, MIXED), ("full", 3, PERIODIC),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("none", 6, PERIODIC), ("full", 1, MIXED), ("selective", 1, PERIODIC),
            ("selective", 6, MIXED))),
    ],
    ids=lambda value: {id(MIXED): "mixed", id(PERIODIC): "period"}.get(id(value)),
)  # fmt: skip
def test_scan_matches_layers_one_by_one(save, unroll, layers):
    model, params = toy(**layers)
    scanned = Model(model.config, runtime=Runtime(save=save, unroll=unroll))
    result = total(lambda params: scanned.hidden(params, random_tokens()), params)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
        result,
        total_of_one_by_one(**layers),
    )


def program(n_layers):
    model = Model(ModelConfig(**SHAPE, **PERIODIC | {"n_layers": n_layers}))
    tokens = jax.ShapeDtypeStruct((2, LENGTH), jnp.int32)
    gradient = jax.grad(lambda params, tokens: jnp.sum(model.hidden(params, tokens)))
    return jax.jit(gradient).lower(model.abstract, tokens).as_text().splitlines()


def test_program_size_does_not_grow_with_periods():
    """One group of layers is compiled."""
    assert len(program(6)) == len(program(60))


@PLANS
def test_layer_output_changes_only_within_window(layers):
    """In a single layer; through other layers, earlier tokens have an effect."""
    model, params = toy(**layers)
    sliding = model.plan.masks.index(Mask(5))
    i, kind = next((i, k) for i, k in enumerate(model.plan.layers) if k.mask == sliding)

    @jax.jit
    def run(params, change):
        layer = jax.tree.map(lambda leaf: leaf[i], params["layers"])
        x = model.embed_tokens(params, random_tokens()).at[:, 3].add(change)
        return run_layer(model, layer, x, model.context(x), kind)[0]

    before, after = (np.asarray(run(params, change)) for change in (0.0, 1.0))
    changed = (np.abs(before - after).max(-1) > 1e-6).all(0)
    assert np.flatnonzero(changed).tolist() == [3, 4, 5, 6, 7]


@functools.cache
def programs_of(**layers):
    """Return programs for the logits of all tokens, and of a chunk with a cache."""
    model, _ = toy(**layers)
    full = jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))
    return full, jax.jit(model.extend)


@PLANS
@pytest.mark.parametrize("chunks", [[10, 7, 7], [10] + [1] * (LENGTH - 10)], ids=len)
def test_cached_logits_match_full_forward(layers, chunks):
    model, params = toy(**layers)
    tokens = random_tokens()
    full, extend = programs_of(**layers)
    cache, logits, at = model.empty_cache(2, LENGTH), [], 0
    for size in chunks:
        positions = np.broadcast_to(np.arange(at, at + size), (2, size))
        out, cache = extend(params, tokens[:, at : at + size], positions, cache)
        logits.append(out)
        at += size
    np.testing.assert_allclose(
        np.concatenate(logits, axis=1), full(params, tokens), rtol=0, atol=2e-5
    )
