"""AdamW compared with PyTorch's, and its state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.optim.adamw import scale_by_adam
from tests.optim.problem import rate, rule

BETAS, EPS = (0.9, 0.95), 1e-8
DECAY = {"matrix": 0.1, "norm": 0.0}
N = 200


def initial():
    rng = np.random.default_rng(0)
    matrix = rng.uniform(-1 / 8, 1 / 8, (64, 64)).astype(np.float32)  # initial values of nn.Linear
    return {"matrix": matrix, "norm": np.ones(64, np.float32)}


@functools.cache
def gradients():
    """Return gradients of widely different sizes."""
    rng = np.random.default_rng(1)
    sizes = {name: 10 ** rng.uniform(-4, 0, leaf.shape) for name, leaf in initial().items()}
    return [
        {name: (s * rng.standard_normal(s.shape)).astype(np.float32) for name, s in sizes.items()}
        for _ in range(N)
    ]


@functools.cache
def make(schedule=rate, betas=BETAS, dtype=jnp.float32):
    return rule(scale_by_adam(betas, EPS, jnp.dtype(dtype)), schedule=schedule, decay=DECAY)


def run(tx, n, params=None, **extra):
    """Return (parameters, state) after n updates."""
    init, step = programs_of(tx)
    params = initial() if params is None else params
    state = init(params)
    for grads in gradients()[:n]:
        params, state = step(params, state, grads, extra)
    return jax.device_get((params, state))


@functools.lru_cache(8)
def programs_of(tx):
    """Return jitted init and update, cached per optimizer."""

    @jax.jit
    def step(params, state, grads, extra):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.init), step


@functools.cache
def by_torch(lr, betas):
    """Return (parameters, state) after N updates at a constant rate."""
    torch = pytest.importorskip("torch")
    params = {k: torch.nn.Parameter(torch.from_numpy(v)) for k, v in initial().items()}
    groups = [{"params": [params[k]], "weight_decay": DECAY[k]} for k in params]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPS, foreach=False)
    for grads in gradients():
        for name, parameter in params.items():
            parameter.grad = torch.from_numpy(grads[name])
        optimizer.step()
    state = {name: optimizer.state[parameter] for name, parameter in params.items()}
    return {name: p.detach().numpy() for name, p in params.items()}, state


def max_difference(a, b):
    return max(jax.tree.leaves(jax.tree.map(lambda x, y: float(np.abs(x - y).max()), a, b)))


@pytest.mark.parametrize(
    "betas",
    [
        (0.9, 0.95),
        (0.9, 0.999),
    ],
)
def test_adamw_matches_torch_closer_than_optax(betas):
    lr = 1e-3
    reference, _ = by_torch(lr, betas)
    result, _ = run(make(lambda n: jnp.float32(lr), betas), N)
    mask = {name: decay > 0 for name, decay in DECAY.items()}
    optaxs, _ = run(optax.adamw(lr, *betas, EPS, weight_decay=0.1, mask=mask), N)
    assert max_difference(reference, initial()) > 0.02  # parameters have changed
    assert max_difference(result, reference) <= 5e-7
    assert max_difference(result, reference) < max_difference(optaxs, reference)


def test_moments_match_torch():
    _, reference = by_torch(1e-3, BETAS)
    _, result = run(make(), N)
    for name in DECAY:
        m, v = (reference[name][key].numpy() for key in ("exp_avg", "exp_avg_sq"))
        # Gradients of both signs cancel in m: its precision is relative to their size, sqrt(v).
        assert (np.abs(result.mu[name] - m) <= 1e-6 * np.sqrt(v)).all()
        np.testing.assert_allclose(result.nu[name], v, rtol=1e-5)
    assert result.updates == int(reference["norm"]["step"]) == N


def test_only_parameters_with_decay_shrink():
    zero = jax.tree.map(np.zeros_like, initial())
    tx = make(schedule=lambda n: jnp.float32(0.5))
    updates = jax.jit(lambda g, p: tx.update(g, tx.init(p), p)[0])(zero, initial())
    np.testing.assert_allclose(updates["matrix"], -0.05 * initial()["matrix"], rtol=1e-5)
    np.testing.assert_array_equal(updates["norm"], 0)


def test_bfloat16_moments_are_updated_in_float32():
    params, state = run(make(dtype=jnp.bfloat16), 2)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.mu, state.nu))} == {
        jnp.dtype(jnp.bfloat16)
    }
    _, first = run(make(dtype=jnp.bfloat16), 1)
    grads, before = gradients()[1], initial()  # the first update has rate 0
    for name, decay in DECAY.items():
        g, lr = grads[name].astype(np.float64), float(rate(1))
        m = 0.9 * first.mu[name].astype(np.float64) + 0.1 * g
        v = 0.95 * first.nu[name].astype(np.float64) + 0.05 * g * g
        np.testing.assert_allclose(state.mu[name].astype(np.float64), m, rtol=2**-8)
        np.testing.assert_allclose(state.nu[name].astype(np.float64), v, rtol=2**-8)
        denominator = np.sqrt(v / (1 - 0.95**2)) + EPS
        expected = before[name] * (1 - lr * decay) - lr / (1 - 0.9**2) * m / denominator
        np.testing.assert_allclose(params[name], expected, rtol=0, atol=1e-7)


def test_bfloat16_parameters_are_rounded_once():
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), initial())
    params, state = run(make(), 2, half)
    exact, _ = run(make(), 2, jax.tree.map(lambda leaf: leaf.astype(np.float32), half))
    assert {leaf.dtype for leaf in jax.tree.leaves(state.mu)} == {np.dtype(np.float32)}
    # The first update has rate 0, so the second starts from the same numbers.
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), params, exact)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_lr_scale_multiplies_the_rate(scale):
    scaled, state = run(make(), 20, lr_scale=np.float32(scale))
    expected, expected_state = run(make(lambda n: scale * rate(n)), 20)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-7), scaled, expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected_state)
    assert max_difference(scaled, run(make(), 20, lr_scale=np.float32(1))[0]) > 1e-3


def test_zero_rate_changes_only_moments_and_count():
    params, state = run(make(), 5, lr_scale=np.float32(0))
    jax.tree.map(np.testing.assert_array_equal, params, initial())
    assert state.updates == 5
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves((state.mu, state.nu)))
