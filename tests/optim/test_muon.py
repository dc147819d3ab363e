"""Muon compared with its formulas, its selection of parameters, and meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import keystr

from jaxforge.model.transformer import Model
from jaxforge.optim.adamw import scale_by_adam
from jaxforge.optim.muon import Variant, orthogonal, rms_scale, scale_by_muon
from jaxforge.optim.optimizer import build_optimizer
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup
from tests.optim import problem
from tests.torch_names import to_torch

BETAS, EPS, MOMENTUM, STEPS, ADAM_RATIO = (0.9, 0.95), 1e-8, 0.95, 5, 3.0
N = 50
FOR_ADAMW = {"longer", "norm", "layers.flat", "layers.norm"}


FACTORS = jax.tree_util.tree_map_with_path(
    lambda path, _: ADAM_RATIO if keystr(path, simple=True, separator=".") in FOR_ADAMW else 1.0,
    problem.DECAY,
)
"""Learning rates are factors on Muon's."""


def make(dtype=jnp.float32, **options):
    dtype = jnp.dtype(dtype)
    direction = scale_by_muon(
        scale_by_adam(BETAS, EPS, dtype), axes=problem.AXES, momentum=MOMENTUM, ns_steps=STEPS,
        storage=dtype, **options,
    )  # fmt: skip
    return problem.rule(direction, factors=FACTORS)


def newton_schulz(g, steps=STEPS):
    """Orthogonalize with products on the left for every shape."""
    x = g / (np.linalg.norm(g) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def uses_muon(shape):
    """Return whether KempnerForge uses Muon, by the shape of a layer's parameter."""
    if len(shape) < 2:
        return False
    m, n = shape[0], int(np.prod(shape[1:]))
    return max(m, n) / min(m, n) <= 10


def update(p, g, state, k, decay):
    lr = float(problem.rate(k - 1))
    if not uses_muon(p.shape):
        return problem.adamw_update(p, g, state, k, ADAM_RATIO * lr, decay, BETAS, EPS)
    b = MOMENTUM * state.get("momentum", np.zeros_like(p)) + g
    state["momentum"] = b
    m, n = len(p), p.size // len(p)
    u = newton_schulz(b.reshape(m, n)) * np.sqrt(max(1, m / n))
    return p * (1 - lr * decay) - lr * u.reshape(p.shape)


def test_fifty_updates_match_formulas():
    expected, states = problem.reference(update, N)
    params, state = problem.run(make(), N)
    problem.assert_params(params, expected, atol=2e-6)
    adamw_keys = {key for key in states if key[0] in FOR_ADAMW}
    problem.assert_moments(state.momentum, states, "momentum", 1e-6, states.keys() - adamw_keys)
    problem.assert_moments(state.mu, states, "mu", 1e-6, adamw_keys)
    problem.assert_moments(state.nu, states, "nu", 1e-5, adamw_keys)
    assert state.updates == N


def test_normuon_with_look_ahead_matches_the_paper():
    """Algorithm 1 of arXiv:2510.05491: each step has a root mean square of 0.2."""
    variant = Variant(nesterov=True, beta2=0.9, scale=rms_scale)

    def normuon(p, g, state, k, decay):
        lr = float(problem.rate(k - 1))
        if not uses_muon(p.shape):
            return problem.adamw_update(p, g, state, k, ADAM_RATIO * lr, decay, BETAS, EPS)
        b = state["momentum"] = MOMENTUM * state.get("momentum", np.zeros_like(p)) + g
        o = newton_schulz((g + MOMENTUM * b).reshape(len(p), -1))
        v = state["rows"] = 0.9 * state.get("rows", np.zeros(len(p))) + 0.1 * (o * o).mean(axis=1)
        o = o / (np.sqrt(v)[:, None] + 1e-8)
        o *= 0.2 * np.sqrt(o.size) / np.linalg.norm(o)
        return p * (1 - lr * decay) - lr * o.reshape(p.shape)

    expected, states = problem.reference(normuon, 20)
    params, state = problem.run(make(variant=variant), 20)
    problem.assert_params(params, expected, atol=2e-6)
    muon_keys = {key for key in states if key[0] not in FOR_ADAMW}
    problem.assert_moments(state.row_nu, states, "rows", 1e-5, muon_keys)


def test_bfloat16_moments_are_updated_in_float32():
    expected, states = problem.reference(update, 5, problem.BFLOAT16)
    params, state = problem.run(make(dtype=jnp.bfloat16), 5)
    moments = jax.tree.leaves((state.momentum, state.mu, state.nu))
    assert {leaf.dtype for leaf in moments} == {np.dtype(problem.BFLOAT16)}
    problem.assert_params(params, expected, atol=1e-6)
    adamw_keys = {key for key in states if key[0] in FOR_ADAMW}
    problem.assert_moments(state.momentum, states, "momentum", 2**-8, states.keys() - adamw_keys)


orthogonal_of = jax.jit(orthogonal, static_argnums=1)


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (16, 16), (40, 4), (1, 7), (7, 1)])
def test_matrices_are_orthogonalized_separately(shape):
    rng = np.random.default_rng(0)
    g = rng.standard_normal((3, *shape)) * np.array([1e-6, 1.0, 1e4])[:, None, None]
    program = np.asarray(orthogonal_of(g.astype(np.float32), STEPS))
    for layer, matrix in zip(program, g, strict=True):
        np.testing.assert_allclose(layer, newton_schulz(matrix), atol=1e-5)
    values = np.linalg.svd(program[1], compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_number_of_newton_schulz_iterations():
    g = np.random.default_rng(0).standard_normal((1, 8, 8), np.float32)
    for steps in (1, 3):
        expected = newton_schulz(g[0].astype(np.float64), steps)
        program = np.asarray(orthogonal_of(g, steps))
        np.testing.assert_allclose(program[0], expected, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [
        {},
        {"tie_embeddings": True, "norm_type": "layernorm", "qk_norm": True},
        {"vocab_size": 640},
        {"vocab_size": 641},
        {"n_heads": 32, "n_kv_heads": 1},  # k_proj [2, 64]
        {"ffn_hidden_dim": 1024},
    ],
    ids=str,
)
def test_muon_selects_same_parameters_as_kempnerforge(model):
    """The selection depends only on shapes, and includes embedding and output head."""
    config = tiny_config(model=model, optimizer={"name": "muon"})
    model = Model(config.model)
    _, state, *_ = jax.eval_shape(build_optimizer(config, model.axes).init, model.abstract)
    by_muon, in_mu, in_nu = (
        set(names(moments)) for moments in (state.momentum, state.mu, state.nu)
    )
    assert in_mu == in_nu
    assert by_muon | in_mu == set(names(model.abstract))
    assert not by_muon & in_mu
    flags = [np.full(leaf.shape, name in by_muon) for name, leaf in names(model.abstract).items()]
    flags = jax.tree.unflatten(jax.tree.structure(model.abstract), flags)
    for name, flag in to_torch(flags).items():
        assert (flag == uses_muon(flag.shape)).all(), name


def names(tree):
    return {jax.tree_util.keystr(p): leaf for p, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def test_muon_adam_lr_changes_only_the_peak():
    def final_params(**keys):
        config = tiny_config(
            optimizer={"name": "muon", "lr": 1e-2, "weight_decay": 0.0, **keys},
            train={"grad_clip_norm": 1e9},
        )
        axes = {name: problem.AXES[name] for name in begin}
        return problem.run(build_optimizer(config, axes), 3, begin)[0]

    begin = {name: problem.initial()[name] for name in ("square", "norm")}
    same_lr, other_lr = final_params(), final_params(muon={"adam_lr": 1e-3})
    np.testing.assert_array_equal(same_lr["square"], other_lr["square"])
    changes = [params["norm"] - begin["norm"] for params in (same_lr, other_lr)]
    np.testing.assert_allclose(changes[1], changes[0] / 10, rtol=1e-3)
    # Rates are 0, 1/4 and 1/2 of the peak: Adam's change is at most their sum.
    assert 0.3e-3 < np.abs(changes[1]).max() < 0.8e-3


@functools.cache
def on_mesh(**distributed):
    dp = distributed.get("dp_shard", 1) * distributed.get("dp_replicate", 1)
    program = setup(
        tiny_config(
            model={"vocab_size": 768, "n_layers": 1},  # AdamW updates the embedding
            optimizer={"name": "muon"},
            train={"batch_size": 8 // dp},
            distributed={"dp_shard": 1, **distributed},
        )
    )
    return program, *program.run(program.state(), random_batches(program.config, 6))


def test_sharded_muon_matches_single_device():
    """Newton-Schulz iterations on each shard would give entirely different directions."""
    mesh = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    _, state, metrics = on_mesh()
    program, sharded, sharded_metrics = on_mesh(**mesh)
    np.testing.assert_allclose(sharded_metrics["loss"], metrics["loss"], rtol=1e-5)
    np.testing.assert_allclose(sharded_metrics["grad_norm"], metrics["grad_norm"], rtol=1e-4)
    for leaf, other in zip(
        jax.tree.leaves((sharded.params, sharded.opt_state)),
        jax.tree.leaves((state.params, state.opt_state)),
        strict=True,
    ):
        np.testing.assert_allclose(leaf, other, atol=2e-4 * max(1e-3, float(np.abs(other).max())))
    assert jax.tree.map(lambda a: a.sharding, sharded) == program.shardings
    moments = sharded.opt_state[1]
    embedding = moments.mu["token_embedding"]["embedding"]["weight"]
    q_proj = moments.momentum["layers"]["attention"]["q_proj"]["weight"]
    assert embedding.sharding.shard_shape(embedding.shape) == (384, 64 // mesh["dp_shard"])
    assert q_proj.sharding.shard_shape(q_proj.shape) == (1, 32, 64 // mesh["dp_shard"])
