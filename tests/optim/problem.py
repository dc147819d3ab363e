"""Parameters of every kind, gradients, and a NumPy reference loop."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

from jaxforge.optim.chain import decay_weights, merged, scale_by_rate, with_rate

WEIGHT_DECAY = 0.1
SHAPES = {
    "square": ((16, 16), ("heads", "embed")),
    "long": ((80, 8), ("vocab", "embed")),  # ten times as long as wide
    "longer": ((81, 8), ("vocab", "embed")),
    "norm": ((16,), ("norm",)),
    "layers": {
        "wide": ((3, 8, 24), ("layers", "embed", "mlp")),
        "tall": ((3, 24, 8), ("layers", "mlp", "embed")),
        "flat": ((3, 4, 41), ("layers", "heads", "embed")),
        "cube": ((3, 4, 2, 6), ("layers", "heads", "mlp", "embed")),
        "norm": ((3, 8), ("layers", "norm")),
    },
}


def tree(f):
    return jax.tree.map(lambda pair: f(*pair), SHAPES, is_leaf=lambda n: isinstance(n, tuple))


AXES = tree(lambda shape, axes: axes)
DECAY = tree(lambda shape, axes: WEIGHT_DECAY if len(set(axes) - {"layers"}) > 1 else 0.0)


def initial():
    rng = np.random.default_rng(0)
    return tree(lambda shape, _: rng.uniform(-1 / 8, 1 / 8, shape).astype(np.float32))


@functools.cache
def gradients(n):
    """Return gradients of widely different sizes; some rows are always zero."""
    rng = np.random.default_rng(1)
    sizes = tree(lambda shape, _: 10 ** rng.uniform(-3, 0, shape))
    sizes["long"][5:9] = 0
    make = lambda s: (s * rng.standard_normal(s.shape)).astype(np.float32)  # noqa: E731
    return [jax.tree.map(make, sizes) for _ in range(n)]


def rate(n):
    """Return the rate of a warm-up and a slow decay; 0 in the first update."""
    return 1e-3 * jnp.minimum(n / 10, 1 - n / 400)


def rule(direction, *further, schedule=rate, decay=None, factors=None, is_cautious=False):
    """Return a direction with its rate and weight decay as one transform.

    Args:
        direction: the direction.
        *further: links after the weight decay.
        schedule: learning rate by the number of updates.
        decay: weight decay of every parameter.
        factors: factors on the learning rate of every parameter.
        is_cautious: whether the decay is cautious.
    """
    decay = DECAY if decay is None else decay
    if factors is None:
        factors = jax.tree.map(lambda _: 1.0, decay)
    decays = jax.tree.map(lambda d, factor: d * factor, decay, factors)
    scale = scale_by_rate(lambda tree: {name: factors[name] for name in tree})
    end = decay_weights(lambda tree: {name: decays[name] for name in tree}, is_cautious=is_cautious)
    return with_rate(schedule, merged([direction, scale, end, *further]))


def run(tx, n, params=None, lr_scale=1.0):
    """Return (parameters, state) after n updates of all or of the given parameters."""
    init, step = programs_of(tx)
    params = initial() if params is None else params
    state = init(params)
    for grads in gradients(n):
        selected = {name: grads[name] for name in params}
        params, state = step(params, state, selected, np.float32(lr_scale))
    return jax.device_get((params, state))


@functools.lru_cache(8)
def programs_of(tx):
    """Return jitted init and update, cached per optimizer."""

    @jax.jit
    def step(params, state, grads, lr_scale):
        updates, state = tx.update(grads, state, params, lr_scale=lr_scale)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.init), step


def matrices(tree):
    """Yield ((path, layer), array) of each layer of each leaf, in the order of jax.tree.leaves."""
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    for path, leaf in zip(paths, leaves, strict=True):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        for i, layer in enumerate(leaf if name.startswith("layers.") else [leaf]):
            yield (name, i), layer


def reference(update, n, dtype=np.float64):
    """Return parameters and states after n updates of each layer separately, as in PyTorch.

    `update(p, g, state, k, decay)` receives float64 arrays and the number k of the update, from 1.
    It returns the new p and changes the dict `state`, which is stored in `dtype` between updates.
    """
    params = {key: p.astype(np.float64) for key, p in matrices(initial())}
    states = {key: {} for key in params}
    for k, grads in enumerate(gradients(n), 1):
        for key, g in matrices(grads):
            decay = WEIGHT_DECAY if params[key].ndim > 1 else 0.0
            state = states[key]
            params[key] = update(params[key], g.astype(np.float64), state, k, decay)
            for name, value in state.items():
                state[name] = np.asarray(value).astype(dtype).astype(np.float64)
    return params, states


def adamw_update(p, g, state, k, lr, decay, betas, eps):
    """Apply the rule of torch.optim.AdamW."""
    (b1, b2), zero = betas, np.zeros_like(p)
    state["mu"] = b1 * state.get("mu", zero) + (1 - b1) * g
    state["nu"] = b2 * state.get("nu", zero) + (1 - b2) * g * g
    denominator = np.sqrt(state["nu"]) / np.sqrt(1 - b2**k) + eps
    return p * (1 - lr * decay) - lr / (1 - b1**k) * state["mu"] / denominator


def assert_params(params, expected, atol):
    for key, layer in matrices(params):
        np.testing.assert_allclose(layer, expected[key], rtol=0, atol=atol, err_msg=str(key))


def assert_moments(moments, states, name, rtol, keys=None):
    """Check that moments agree to `rtol` of the largest; `keys` lists the expected moments."""
    result = dict(matrices(moments))
    assert result.keys() == (set(states) if keys is None else keys)
    for key, moment in result.items():
        expected = states[key][name]
        worst = np.abs(moment.astype(np.float64) - expected).max()
        assert worst <= rtol * np.abs(expected).max(), (key, name)


BFLOAT16 = ml_dtypes.bfloat16
