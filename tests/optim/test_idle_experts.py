"""Skipping of experts without tokens, as PyTorch skips parameters without a gradient."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.config.optimizer import OPTIMIZERS
from jaxforge.errors import UserError
from jaxforge.optim import moments
from jaxforge.optim.from_optax import from_optax
from jaxforge.optim.optimizer import build_optimizer, register_optimizer
from tests.conftest import tiny_config

SHAPES = {
    "norm": ((8,), ("norm",)),
    "layers.mlp.up_proj.weight": ((2, 32, 8), ("layers", "mlp", "embed")),
    "layers.mlp.experts.up_proj.weight": (
        (2, 3, 32, 8),
        ("layers", "experts", "mlp", "expert_embed"),
    ),
    "layers.mlp.experts.up_proj.bias": ((2, 3, 32), ("layers", "experts", "mlp")),
}
AXES = unflatten_dict({name: axes for name, (_, axes) in SHAPES.items()}, sep=".")
WEIGHT, BIAS = list(SHAPES)[2:]
UPDATES = 9
REACHED = np.random.default_rng(5).random((UPDATES, 2, 3)) < 0.5
REACHED[:, 0, 1], REACHED[:, 1, 2] = (
    False,
    True,
)  # an expert that is always idle, and one that never is
BUILTIN = [name for name in OPTIMIZERS.names() if name != "soap"]


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=s).astype(np.float32) for name, (s, _) in SHAPES.items()}


@functools.cache
def gradients():
    """Return gradients with zeros for experts without tokens, as in the step."""
    every = [values(10 + n) for n in range(UPDATES)]
    for grads, reached in zip(every, REACHED, strict=True):
        grads[WEIGHT][~reached], grads[BIAS][~reached] = 0, 0
    return every


def config_of(name, **train):
    return tiny_config(
        model={"num_experts": 3, "moe_top_k": 1},
        optimizer={
            "name": name, "lr": 1e-2, "skip_idle_experts": True,
            "no_decay_patterns": ["mlp.up_proj"], "decay_patterns": ["experts.*bias"],
        },
        scheduler={"name": "none"},
        train={"grad_clip_norm": 1e9, **train},
    )  # fmt: skip


def run(tx, init, grads, reached=None):
    """Return the parameters and the state after updates with `grads`."""

    @jax.jit
    def step(params, state, grads, reached):
        extra = {} if reached is None else {"reached": {"layers": reached}}
        updates, state = tx.update(grads, state, params, lr_scale=0.5, applied=True, **extra)
        return optax.apply_updates(params, updates), state

    params = unflatten_dict(init, sep=".")
    state = jax.jit(tx.init)(params)
    for i, update_grads in enumerate(grads):
        reached_now = None if reached is None else reached[i]
        params, state = step(params, state, unflatten_dict(update_grads, sep="."), reached_now)
    params, states = jax.device_get((params, state))
    fields = {name: field for part in states for name, field in part._asdict().items()}
    return flatten_dict(params, sep="."), fields


@pytest.fixture
def adam_of_optax(own_names):
    @register_optimizer("adam_of_optax")
    def build(config, schedule, axes):
        o = config.optimizer
        return from_optax(optax.adamw(schedule, *o.betas, eps=o.eps, weight_decay=0.3))


@pytest.mark.usefixtures("adam_of_optax")
@pytest.mark.parametrize("name", [*BUILTIN, "adam_of_optax"])
def test_experts_are_updated_like_separate_parameters(name):
    """The reference is the same rule without the option, on a single expert and its updates."""
    config = config_of(name)
    params, fields = run(build_optimizer(config, AXES), values(0), gradients(), REACHED)
    optimizer = config.optimizer.model_copy(update={"skip_idle_experts": None})

    def with_matching(names):
        """Return the config without the option and without patterns that match no parameter."""
        patterns = {
            key: tuple(p for p in getattr(optimizer, key) if any(re.search(p, n) for n in names))
            for key in ("decay_patterns", "no_decay_patterns")
        }
        return config.model_copy(update={"optimizer": optimizer.model_copy(update=patterns)})

    tree = functools.partial(unflatten_dict, sep=".")

    def alone(layer, expert):
        own = lambda v: {k: v[k][layer, expert] for k in (WEIGHT, BIAS)}  # noqa: E731
        axes = {k: SHAPES[k][1][2:] for k in (WEIGHT, BIAS)}
        expert_grads = [own(g) for g, reached in zip(gradients(), REACHED, strict=True)
                if reached[layer, expert]]  # fmt: skip
        return run(build_optimizer(with_matching(axes), tree(axes)), own(values(0)), expert_grads)

    for layer, expert in np.ndindex(2, 3):
        expected, state = alone(layer, expert)
        n = REACHED[:, layer, expert].sum()
        for key in (WEIGHT, BIAS):
            np.testing.assert_allclose(params[key][layer, expert], expected[key], atol=1e-7)
            for field, value in state.items():
                if value is None:
                    continue
                if isinstance(value, dict):
                    leaf = flatten_dict(value, sep=".").get(key)
                    if leaf is not None:
                        result = flatten_dict(fields[field], sep=".")[key][layer, expert]
                        np.testing.assert_allclose(result, leaf, rtol=1e-5, atol=1e-9)
                else:
                    result = flatten_dict(fields[f"expert_{field}"], sep=".")[key]
                    assert result[layer, expert] == value, field
            assert flatten_dict(fields["expert_updates"], sep=".")[key][layer, expert] == n
    assert fields["updates"] == UPDATES
    np.testing.assert_array_equal(params[WEIGHT][0, 1], values(0)[WEIGHT][0, 1])
    others = {k: v for k, v in values(0).items() if k not in (WEIGHT, BIAS)}
    grads = [{k: g[k] for k in others} for g in gradients()]
    axes = {k: SHAPES[k][1] for k in others}
    expected, _ = run(build_optimizer(with_matching(axes), tree(axes)), others, grads)
    for key, value in expected.items():
        np.testing.assert_allclose(params[key], value, atol=1e-7)


FIRST = REACHED & (REACHED.cumsum(axis=0) == 1)


@functools.cache
def float32_params():
    """Return the parameters after each update with float32 moments."""
    return [run(build_optimizer(config_of("adamw"), AXES), values(0), gradients()[:n], REACHED)[0]
            for n in range(1, 5)]  # fmt: skip


@pytest.mark.parametrize("rows_at_once", [pytest.param(None, marks=pytest.mark.slow), 32 * 8])
def test_idle_experts_keep_bits_of_8bit_moments(monkeypatch, rows_at_once):
    """An expert's first update is exact, because rounded moments affect only later updates."""
    if rows_at_once:
        monkeypatch.setattr(moments, "CHUNK_ELEMENTS", rows_at_once)
    tx = build_optimizer(config_of("adamw", opt_state_dtype="8bit"), AXES)
    before = values(0), None
    for n, expected in enumerate(float32_params()):
        after = run(tx, values(0), gradients()[: n + 1], REACHED)
        np.testing.assert_allclose(
            after[0][WEIGHT][FIRST[n]], expected[WEIGHT][FIRST[n]], atol=1e-6
        )
        idle = ~REACHED[n]
        np.testing.assert_array_equal(after[0][WEIGHT][idle], before[0][WEIGHT][idle])
        for name in ("mu", "nu", "mu_scales", "nu_scales"):
            now = flatten_dict(after[1][name], sep=".")[WEIGHT]
            was = flatten_dict(before[1][name], sep=".")[WEIGHT] if before[1] else 0 * now
            np.testing.assert_array_equal(now[idle], was[idle])
            assert (now[~idle] != was[~idle]).any()
        before = after


def test_idle_expert_moments_match_on_host_and_device():
    on_device = run(build_optimizer(config_of("adamw"), AXES), values(0), gradients(), REACHED)
    tx = build_optimizer(config_of("adamw", offload=("optimizer",)), AXES)
    on_host = run(tx, values(0), gradients(), REACHED)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    jax.tree.map(close, on_host, on_device)


def test_zero_gradients_identify_idle_experts():
    """Updates recomputed from gradients (`replay --against`) have no counts."""
    tx = build_optimizer(config_of("adamw"), AXES)
    params, fields = run(tx, values(0), gradients())
    expected = run(tx, values(0), gradients(), REACHED)
    jax.tree.map(np.testing.assert_array_equal, (params, fields), expected)


def test_unmatched_decay_pattern_raises_with_idle_experts():
    config = config_of("adamw")
    optimizer = config.optimizer.model_copy(update={"decay_patterns": ("nowhere",)})
    with pytest.raises(UserError, match='"nowhere" matches no parameter'):
        build_optimizer(config.model_copy(update={"optimizer": optimizer}), AXES)
