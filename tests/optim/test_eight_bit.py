"""Moments in eight bits: how far off they are, never zero, the same in parts and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxforge.config.optimizer import BUILT_IN
from jaxforge.optim import moments
from jaxforge.optim.eight_bit import BLOCK, ROOT, SIGNED, Packed, pack, scales_shape, unpack
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from tests.conftest import tiny_config

SHAPES = {"matrix": (64, 24), "layers": {"tall": (3, 96, 16), "norm": (3, 16)}}
AXES = {
    "matrix": ("vocab", "embed"),
    "layers": {"tall": ("layers", "mlp", "embed"), "norm": ("layers", "norm")},
}
ADAM_AT_MOST = 1.2  # |m| / √v with the default betas, whatever the gradients: Cauchy-Schwarz
STEPS = 30


def drawn(seed, kind):
    rng = np.random.default_rng(seed)
    make = lambda shape: kind(rng, shape).astype(np.float32)  # noqa: E731
    return jax.tree.map(make, SHAPES, is_leaf=lambda n: isinstance(n, tuple))


def normal(rng, shape):
    return rng.standard_normal(shape)


def heavy_tailed(rng, shape):
    """Return samples without a variance; most rows are zero."""
    return rng.standard_t(1.1, shape) * (rng.uniform(size=(*shape[:-1], 1)) < 0.3)


@functools.partial(jax.jit, static_argnums=1)
def packed_and_unpacked(x, kind, u):
    like = Packed(jnp.zeros(x.shape, kind), jnp.zeros(scales_shape(x.shape), jnp.uint8))
    packed = pack(x, u, like)
    return packed, unpack(packed)


@pytest.mark.parametrize(("kind", "top"), [(SIGNED, 127), (ROOT, 255)])
def test_packed_numbers_are_within_quantization_step(kind, top):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((4 * BLOCK, 8)) * 10 ** rng.uniform(-12, 3, (4 * BLOCK, 8))
    x[BLOCK : 2 * BLOCK, 3] = 0
    x = (np.square(x) if kind == ROOT else x).astype(np.float32)
    u = rng.uniform(0, 1, x.shape).astype(np.float32)
    packed, result = jax.device_get(packed_and_unpacked(x, kind, u))
    size, back = (np.sqrt(np.abs(a)) if kind == ROOT else np.abs(a) for a in (x, result))
    largest = size.reshape(4, BLOCK, 8).max(axis=1)
    scales = np.where(largest > 0, 2.0 ** (np.asarray(packed.scales, np.float64) - 127), 0)
    assert np.all((largest <= scales) & (scales < 2 * largest + (largest == 0)))
    whole = np.repeat(np.maximum(scales, 1e-30), BLOCK, axis=0)
    assert np.abs(np.sqrt(size / whole) - np.sqrt(back / whole)).max() <= 1.001 / top
    assert np.all(np.sign(result) == np.sign(x)) if kind == ROOT else np.all(result * x >= 0)


def test_packing_is_unbiased():
    x = np.full((BLOCK, 4096), 0.3, np.float32)
    x[0] = 1
    u = np.random.default_rng(0).uniform(0, 1, x.shape).astype(np.float32)
    packed, _ = packed_and_unpacked(x, SIGNED, u)
    q = np.asarray(packed.values, np.float64)[1:]
    assert abs(q.mean() - 127 * np.sqrt(0.3)) < 4 * 0.5 / np.sqrt(q.size)


def run(name, retained, gradients):
    """Return parameters, and the largest change of an element in each update."""
    averages = name == "schedule_free_adamw"
    config = tiny_config(
        optimizer={"name": name, "lr": 1e-2, "weight_decay": 0.0},
        scheduler={"name": "none" if averages else "constant", "warmup_steps": 0},
        train={"opt_state_dtype": retained},
    )
    tx = build_optimizer(config, AXES)

    @jax.jit
    def step(params, state, grads):
        updates, new = tx.update(grads, state, params)
        largest = jnp.max(jnp.stack([jnp.max(jnp.abs(u)) for u in jax.tree.leaves(updates)]))
        return optax.apply_updates(params, updates), new, largest

    params = drawn(0, normal)
    state, sizes = jax.jit(tx.init)(params), []
    first = jax.tree.structure(state)
    for n in range(STEPS):
        params, state, largest = step(params, state, gradients(n))
        sizes.append(float(largest))
    assert jax.tree.structure(state) == first
    return jax.device_get(params), sizes


def bias(n):
    """Return noise with a nonzero mean."""
    return jax.tree.map(lambda a, b: 0.01 * (a + 3 * b), drawn(7, normal), drawn(n + 10, normal))


@pytest.mark.parametrize("name", [name for name in BUILT_IN if BUILT_IN[name].updates_by_rows])
def test_training_with_8bit_moments_stays_close_to_float32(name):
    """Changes of parameters differ by a few per cent from those with float32 moments."""
    start = drawn(0, normal)
    (wide, _), (computed, _) = (run(name, retained, bias) for retained in ("float32", "8bit"))
    method, off = (
        np.concatenate([(a - b).ravel() for a, b in zip(*map(jax.tree.leaves, pair), strict=True)])
        for pair in ((wide, start), (computed, wide))
    )
    assert 0 < np.linalg.norm(off) < 0.1 * np.linalg.norm(method)


def test_update_size_is_bounded_with_8bit_moments():
    """Rounding to the smallest quantization step leaves √v at least a quarter of its value."""
    _, sizes = run("adamw", "8bit", lambda n: drawn(n, heavy_tailed))
    assert max(sizes) < 4 * ADAM_AT_MOST * 1e-2


def test_chunks_and_meshes_change_no_bit(monkeypatch):
    params = jax.tree.map(jnp.asarray, drawn(0, normal))
    g = drawn(1, normal)["layers"]["tall"]

    def run_twice(mesh_config=None):
        retained = moments.EightBit(AXES, 5)
        info = moments.param_infos(params, retained)["layers"]["tall"]
        m, v = (
            moments.join_scales(*moments.init_moments(params, retained, kind))["layers"]["tall"]
            for kind in (SIGNED, ROOT)
        )
        moment_update = moments.MomentUpdate(retained, jnp.int32(3))
        rule = lambda _, g, m, v: (g - m, m + g, v + g * g)  # noqa: E731
        update = jax.jit(functools.partial(moment_update.apply, rule, info))
        if mesh_config is None:
            return jax.device_get(update(*update(jnp.asarray(g), m, v)))
        mesh = make_mesh(mesh_config, jax.devices()[:6])
        like = {"x": jax.ShapeDtypeStruct(g.shape, jnp.float32)}
        at = param_shardings(like, {"x": AXES["layers"]["tall"]}, mesh)["x"]
        with jax.set_mesh(mesh):
            return jax.device_get(update(*update(*jax.device_put((jnp.asarray(g), m, v), at))))

    whole = run_twice()
    monkeypatch.setattr(moments, "CHUNK_ELEMENTS", 2 * BLOCK * 16)
    split = {"dp_shard": 2, "tp": 3}
    for other in (run_twice(), run_twice(tiny_config(distributed=split))):
        jax.tree.map(np.testing.assert_array_equal, whole, other)
    _, m, v = whole
    assert m.values.dtype == np.int8
    assert v.scales.shape == (3, 3, 16)
