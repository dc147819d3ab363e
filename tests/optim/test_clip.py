"""Gradient clipping compared with PyTorch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.optim.chain import clip_by_global_norm, global_norm
from jaxforge.optim.optimizer import build_optimizer
from tests.conftest import tiny_config


def gradients(norm, dtype=np.float32):
    """Return a tree with this global norm."""
    rng = np.random.default_rng(0)
    shapes = {"a": (3, 8, 5), "b": {"c": (7,), "d": ()}}
    tree = jax.tree.map(rng.standard_normal, shapes, is_leaf=lambda node: isinstance(node, tuple))
    total = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree)))
    return jax.tree.map(lambda leaf: np.asarray(leaf * norm / total, dtype), tree)


norm_of = jax.jit(global_norm)


def clipped(grads, max_norm):
    tx = clip_by_global_norm(max_norm)
    return jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])(grads)


def by_torch(grads, max_norm):
    torch = pytest.importorskip("torch")
    params = [torch.nn.Parameter(torch.zeros(leaf.shape)) for leaf in jax.tree.leaves(grads)]
    for parameter, leaf in zip(params, jax.tree.leaves(grads), strict=True):
        parameter.grad = torch.from_numpy(np.array(leaf))
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm)
    return [parameter.grad.numpy() for parameter in params], float(norm)


@pytest.mark.parametrize(
    ("norm", "max_norm"),
    [(5.0, 1.0), (1.0001, 1.0), (1.0, 1.0), (0.3, 1.0), (100.0, 0.5), (1e-6, 1e-6), (3e-7, 1e-6)],
)
def test_clipping_matches_torch(norm, max_norm):
    grads = gradients(norm)
    reference, their_norm = by_torch(grads, max_norm)
    np.testing.assert_allclose(norm_of(grads), their_norm, rtol=1e-6)
    for result, expected in zip(jax.tree.leaves(clipped(grads, max_norm)), reference, strict=True):
        np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_small_gradients_are_not_clipped():
    grads = gradients(0.5)
    jax.tree.map(np.testing.assert_array_equal, clipped(grads, 1.0), grads)


def test_epsilon_affects_tiny_norms():
    np.testing.assert_allclose(norm_of(clipped(gradients(1e-6), 1e-6)), 0.5e-6, rtol=1e-5)


def test_zero_gradients_stay_zero():
    zero = jax.tree.map(np.zeros_like, gradients(1.0))
    jax.tree.map(np.testing.assert_array_equal, clipped(zero, 1.0), zero)


def test_norm_of_bfloat16_gradients_is_computed_in_float32():
    """300² + 1² + 1² ...: in bfloat16 the ones would be lost."""
    grads = {"a": np.array([300.0] + [1.0] * 9000).astype(jnp.bfloat16)}
    assert norm_of(grads).dtype == jnp.float32
    np.testing.assert_allclose(norm_of(grads), np.sqrt(300**2 + 9000), rtol=1e-5)
    assert clipped(grads, 1.0)["a"].dtype == jnp.bfloat16


def test_optimizer_clips_at_grad_clip_norm_before_the_moments():
    config = tiny_config(train={"grad_clip_norm": 0.25})
    grads = gradients(5.0)
    axes = {"a": ("layers", "embed", "mlp"), "b": {"c": ("norm",), "d": ()}}
    tx = build_optimizer(config, axes)
    _, state = jax.jit(lambda grads: tx.update(grads, tx.init(grads), grads))(grads)
    np.testing.assert_allclose(norm_of(state[1].mu), 0.1 * 0.25, rtol=1e-5)
