"""Experts without tokens in an update are skipped, as PyTorch skips parameters without gradient."""

import functools

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
REACHED[:, 0, 1], REACHED[:, 1, 2] = False, True  # an idle expert from the beginning, a busy one
OURS = OPTIMIZERS.names()


def values(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=s).astype(np.float32) for name, (s, _) in SHAPES.items()}


@functools.cache
def gradients():
    """Return gradients in which experts without tokens have zeros, as in the step."""
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
    """The parameters and the state after some updates."""

    @jax.jit
    def step(params, state, grads, reached):
        extra = {} if reached is None else {"reached": reached}
        updates, state = tx.update(grads, state, params, lr_scale=0.5, applied=True, **extra)
        return optax.apply_updates(params, updates), state

    params = unflatten_dict(init, sep=".")
    state = jax.jit(tx.init)(params)
    for i, of_update in enumerate(grads):
        now = None if reached is None else reached[i]
        params, state = step(params, state, unflatten_dict(of_update, sep="."), now)
    params, fields = jax.device_get((params, state[1]._asdict()))
    return flatten_dict(params, sep="."), fields


@pytest.fixture
def adam_of_optax(own_names):
    @register_optimizer("adam_of_optax")
    def build(config, schedule, axes):
        o = config.optimizer
        return from_optax(optax.adamw(schedule, *o.betas, eps=o.eps, weight_decay=0.3))


@pytest.mark.usefixtures("adam_of_optax")
@pytest.mark.parametrize("name", [*OURS, "adam_of_optax"])
def test_each_expert_is_updated_as_a_parameter_of_its_own(name):
    """The reference is the same rule, without the option, on one expert and its own updates."""
    config = config_of(name)
    params, fields = run(build_optimizer(config, AXES), values(0), gradients(), REACHED)
    optimizer = config.optimizer.model_copy(update={"skip_idle_experts": None})
    plain = config.model_copy(update={"optimizer": optimizer})
    tree = functools.partial(unflatten_dict, sep=".")

    def alone(layer, expert):
        own = lambda v: {k: v[k][layer, expert] for k in (WEIGHT, BIAS)}  # noqa: E731
        axes = {k: SHAPES[k][1][2:] for k in (WEIGHT, BIAS)}
        mine = [own(g) for g, reached in zip(gradients(), REACHED, strict=True)
                if reached[layer, expert]]  # fmt: skip
        asked = plain.model_copy(update={"optimizer": plain.optimizer.for_names(axes)})
        return run(build_optimizer(asked, tree(axes)), own(values(0)), mine)

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
    asked = plain.model_copy(update={"optimizer": plain.optimizer.for_names(axes)})
    expected, _ = run(build_optimizer(asked, tree(axes)), others, grads)
    for key, value in expected.items():
        np.testing.assert_allclose(params[key], value, atol=1e-7)


FIRST = REACHED & (REACHED.cumsum(axis=0) == 1)


@functools.cache
def wide():
    """Parameters after each update, with moments in float32."""
    return [run(build_optimizer(config_of("adamw"), AXES), values(0), gradients()[:n], REACHED)[0]
            for n in range(1, 5)]  # fmt: skip


@pytest.mark.parametrize("rows_at_once", [None, 32 * 8])
def test_moments_in_eight_bits_of_idle_experts_keep_their_bits(monkeypatch, rows_at_once):
    """And the first update of an expert is exact, as it rounds moments for the next one only."""
    if rows_at_once:
        monkeypatch.setattr(moments, "CHUNK_ELEMENTS", rows_at_once)
    tx = build_optimizer(config_of("adamw", opt_state_dtype="8bit"), AXES)
    before = values(0), None
    for n, expected in enumerate(wide()):
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


def test_moments_on_the_host_are_those_on_the_device():
    here = run(build_optimizer(config_of("adamw"), AXES), values(0), gradients(), REACHED)
    tx = build_optimizer(config_of("adamw", offload=("optimizer",)), AXES)
    there = run(tx, values(0), gradients(), REACHED)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-8)
    jax.tree.map(close, there, here)


def test_gradients_of_zeros_tell_idle_experts_where_nobody_does():
    """Updates recomputed from gradients (`replay --against`) have no counts."""
    tx = build_optimizer(config_of("adamw"), AXES)
    params, fields = run(tx, values(0), gradients())
    expected = run(tx, values(0), gradients(), REACHED)
    jax.tree.map(np.testing.assert_array_equal, (params, fields), expected)


def test_decay_patterns_that_are_found_nowhere_are_refused():
    config = config_of("adamw")
    optimizer = config.optimizer.model_copy(update={"decay_patterns": ("nowhere",)})
    with pytest.raises(UserError, match='"nowhere" matches no parameter'):
        build_optimizer(config.model_copy(update={"optimizer": optimizer}), AXES)
