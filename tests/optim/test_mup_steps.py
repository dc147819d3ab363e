"""Size of muP updates for each rule and kind of parameter, at four times the base width."""

import functools

import jax
import numpy as np
import optax
import pytest

from jaxforge.optim.from_optax import from_optax
from jaxforge.optim.optimizer import build_optimizer, register_optimizer
from tests.conftest import tiny_config

AXES = {
    "embedding": ("vocab", "embed"),
    "positions": ("positions", "embed"),
    "norm": ("norm",),
    "bias": ("layers", "heads"),
    "up": ("layers", "mlp", "embed"),
    "experts": ("layers", "experts", "expert_embed", "mlp"),
    "router": ("layers", None, "embed"),
    "head": ("vocab", "embed"),
}
SHAPES = {
    "embedding": (96, 64), "positions": (8, 64), "norm": (64,), "bias": (2, 64),
    "up": (2, 128, 64), "experts": (2, 3, 64, 128), "router": (2, 8, 64), "head": (640, 64),
}  # fmt: skip
HIDDEN = {"up", "experts"}
DECAY, RATE = 0.1, 1e-2


def optimizer(name, *, mup, **keys):
    averages = name == "schedule_free_adamw"
    keys = {"weight_decay": DECAY, "eps": 1e-20, **keys}
    return build_optimizer(
        tiny_config(
            model={"mup_base_width": 16} if mup else {},
            optimizer={"name": name, "lr": RATE, **keys},
            scheduler={"name": "none"} if averages else {"name": "constant", "warmup_steps": 0},
        ),
        AXES,
    )


@functools.cache
def updates(name, mup, decay=DECAY):
    """Return the changes of the parameters in one update."""
    rng = np.random.default_rng(0)
    make = lambda s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    params, grads = ({k: make(s) for k, s in SHAPES.items()} for _ in range(2))
    return first_update(optimizer(name, mup=mup, weight_decay=decay), grads, params)


def first_update(tx, grads, params):
    return jax.device_get(jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params))


@pytest.mark.parametrize("name", ["adamw", "lion", "schedule_free_adamw"])
def test_mup_scales_steps_of_hidden_matrices_but_not_decay(name):
    plain, wide = updates(name, False), updates(name, True)
    undecayed = updates(name, False, 0.0), updates(name, True, 0.0)
    for key in SHAPES:
        factor = 1 / 4 if key in HIDDEN else 1.0
        np.testing.assert_allclose(undecayed[1][key], factor * undecayed[0][key], atol=3e-7)
        decay_changes = [a[key] - b[key] for a, b in zip((plain, wide), undecayed, strict=True)]
        atol = 3e-7 if name != "schedule_free_adamw" else 1e-5  # the decay follows the step
        np.testing.assert_allclose(decay_changes[1], decay_changes[0], atol=atol, err_msg=key)


def test_mup_factors_of_muon():
    """Base shapes select Muon's parameters: AdamW updates the head, whose base is 640 x 16."""
    plain, wide = updates("muon", False, 0.0), updates("muon", True, 0.0)
    factors = {"embedding": 2.0, "positions": 2.0, "router": 2.0}
    for key in SHAPES.keys() - {"head"}:
        expected = factors.get(key, 1.0) * plain[key]
        np.testing.assert_allclose(wide[key], expected, atol=3e-7, err_msg=key)
    adamw = updates("adamw", False, 0.0)["head"]
    np.testing.assert_allclose(wide["head"], adamw, atol=1e-7)
    assert np.abs(plain["head"] - adamw).max() > 1e-3


def test_mup_scales_eps_with_gradients():
    """Gradients of a model four times as wide are a quarter as large; eps must shrink with them."""
    params = {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}
    results = []
    for mup, gradient in ((False, 1e-6), (True, 1e-6 / 4)):
        tx = optimizer("adamw", mup=mup, eps=1e-6, weight_decay=0.0)
        grads = {k: np.full(s, gradient, np.float32) for k, s in SHAPES.items()}
        results.append(first_update(tx, grads, params)["norm"])
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5)
    np.testing.assert_allclose(results[0], -RATE / 2, rtol=1e-5)


@pytest.mark.usefixtures("own_names")
def test_custom_rule_has_mup_factors_of_adam():
    register_optimizer("mine")(lambda config, schedule, axes: from_optax(optax.sgd(RATE)))
    plain, wide = updates("mine", False), updates("mine", True)
    for key in SHAPES:
        factor = 1 / 4 if key in HIDDEN else 1.0
        np.testing.assert_allclose(wide[key], factor * plain[key], rtol=1e-6)
