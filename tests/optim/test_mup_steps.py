"""muP: how far each rule goes in a parameter of each kind, four times as wide as the base."""

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
def moved(name, mup, decay=DECAY):
    """Return the size of one update."""
    rng = np.random.default_rng(0)
    make = lambda s: rng.standard_normal(s).astype(np.float32)  # noqa: E731
    params, grads = ({k: make(s) for k, s in SHAPES.items()} for _ in range(2))
    return first_update(optimizer(name, mup=mup, weight_decay=decay), grads, params)


def first_update(tx, grads, params):
    return jax.device_get(jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(grads, params))


@pytest.mark.parametrize("name", ["adamw", "lion", "schedule_free_adamw"])
def test_hidden_matrices_go_a_quarter_of_the_way_and_decay_as_ever(name):
    plain, wide = moved(name, False), moved(name, True)
    undecayed = moved(name, False, 0.0), moved(name, True, 0.0)
    for key in SHAPES:
        factor = 1 / 4 if key in HIDDEN else 1.0
        np.testing.assert_allclose(undecayed[1][key], factor * undecayed[0][key], atol=3e-7)
        of_decay = [a[key] - b[key] for a, b in zip((plain, wide), undecayed, strict=True)]
        atol = 3e-7 if name != "schedule_free_adamw" else 1e-5  # it decays after the step
        np.testing.assert_allclose(of_decay[1], of_decay[0], atol=atol, err_msg=key)


def test_muon_goes_as_far_in_hidden_matrices_and_further_in_others():
    """Muon's parameters are chosen by base shape: the head, 640 by 16 there, is AdamW's."""
    plain, wide = moved("muon", False, 0.0), moved("muon", True, 0.0)
    factors = {"embedding": 2.0, "positions": 2.0, "router": 2.0}
    for key in SHAPES.keys() - {"head"}:
        expected = factors.get(key, 1.0) * plain[key]
        np.testing.assert_allclose(wide[key], expected, atol=3e-7, err_msg=key)
    adamw = moved("adamw", False, 0.0)["head"]
    np.testing.assert_allclose(wide["head"], adamw, atol=1e-7)
    assert np.abs(plain["head"] - adamw).max() > 1e-3


def test_eps_falls_as_gradients_do():
    """A model four times as wide has gradients a quarter as large; eps must not begin to count."""
    params = {k: np.zeros(s, np.float32) for k, s in SHAPES.items()}
    updates = []
    for mup, gradient in ((False, 1e-6), (True, 1e-6 / 4)):
        tx = optimizer("adamw", mup=mup, eps=1e-6, weight_decay=0.0)
        grads = {k: np.full(s, gradient, np.float32) for k, s in SHAPES.items()}
        updates.append(first_update(tx, grads, params)["norm"])
    np.testing.assert_allclose(updates[1], updates[0], rtol=1e-5)
    np.testing.assert_allclose(updates[0], -RATE / 2, rtol=1e-5)


@pytest.mark.usefixtures("own_names")
def test_rule_of_ones_own_has_the_factors_of_adam():
    register_optimizer("mine")(lambda config, schedule, axes: from_optax(optax.sgd(RATE)))
    plain, wide = moved("mine", False), moved("mine", True)
    for key in SHAPES:
        factor = 1 / 4 if key in HIDDEN else 1.0
        np.testing.assert_allclose(wide[key], factor * plain[key], rtol=1e-6)
