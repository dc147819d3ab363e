"""SOAP compared with the paper's algorithm, in NumPy and one matrix at a time, and on meshes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.config.rules import check
from jaxforge.errors import UserError
from jaxforge.optim.chain import merged, scale_by_factors
from jaxforge.optim.soap import (
    Preconditioning,
    _first_bases,
    _next_bases,
    scale_by_soap,
    without_first_update,
)
from tests.conftest import tiny_config
from tests.helpers import assert_resumes_bit_exactly, random_batches, setup
from tests.optim import problem

BETAS, EPS, BETA, FREQUENCY, LARGEST = (0.9, 0.95), 1e-8, 0.9, 4, 12
SHAPES = {
    "square": ((2, 12, 12), ("layers", "heads", "embed")),
    "experts": ((2, 3, 8, 8), ("layers", "experts", "mlp", "embed")),
    "tall": ((40, 6), ("vocab", "embed")),  # only columns have a basis
    "wide": ((2, 6, 13), ("layers", "embed", "mlp")),  # only rows
    "cube": ((2, 12, 3, 4), ("layers", "heads", "mlp", "embed")),
    "large": ((13, 14), ("vocab", "embed")),  # no basis
    "norm": ((2, 5), ("layers", "norm")),
}
AXES = {name: axes for name, (_, axes) in SHAPES.items()}
DECAY = {name: 0.1 * (name != "norm") for name in SHAPES}


def rate(n):
    return 1e-2 * jnp.minimum((n + 1) / 4, 1.0)


def values(seed):
    """Return an array per parameter, with directions of different sizes in each matrix."""
    rng = np.random.default_rng(seed)
    return {
        name: (rng.standard_normal(shape) * np.linspace(0.5, 2, shape[-1])).astype(np.float32)
        for name, (shape, _) in SHAPES.items()
    }


def rows_of(name):
    return next(i for i, axis in enumerate(AXES[name]) if axis not in ("layers", "experts"))


def matrices(name, array):
    """Return the matrices of a parameter, or a vector per layer as a matrix of a single row."""
    rows = array.shape[rows_of(name)] if name != "norm" else 1
    count = int(np.prod(array.shape[: rows_of(name)]))
    return np.asarray(array, np.float64).reshape(count, rows, -1)


class Reference:
    """Algorithm 3 of arXiv:2409.11321 for one matrix, with the authors' details.

    The first update only sets the bases, and Adam's bias is corrected for the later ones. Bases
    change after each `FREQUENCY` of those, and the second moment follows their order.
    """

    def __init__(self, w, has_basis):
        self.w, self.bases, self.k = w, [np.eye(n) for n in w.shape], 0
        self.m, self.v = np.zeros_like(w), np.zeros_like(w)
        self.grams, self.has_basis = [np.zeros((n, n)) for n in w.shape], has_basis

    def update(self, g, lr, decay):
        if self.k:
            b1, b2 = BETAS
            left, right = self.bases
            self.m = b1 * self.m + (1 - b1) * g
            self.v = b2 * self.v + (1 - b2) * (left.T @ g @ right) ** 2
            m = left.T @ self.m @ right / (1 - b1**self.k)
            n = left @ (m / (np.sqrt(self.v / (1 - b2**self.k)) + EPS)) @ right.T
            self.w = self.w * (1 - lr * decay) - lr * n
        for axis, outer in enumerate((g @ g.T, g.T @ g)):
            if not self.has_basis[axis]:
                continue
            self.grams[axis] = gram = BETA * self.grams[axis] + (1 - BETA) * outer
            if self.k == 0:
                self.bases[axis] = np.linalg.eigh(gram)[1]
            elif self.k % FREQUENCY == 0:
                q = self.bases[axis]
                order = np.argsort(-np.diag(q.T @ gram @ q))
                self.v = np.take(self.v, order, axis)
                self.bases[axis] = np.linalg.qr(gram @ q[:, order])[0]
        self.k += 1


def reference(n):
    """Return the matrices of every parameter after n updates, and their `Reference`s."""
    begin, result = values(0), {}
    for name, array in begin.items():
        has_basis = [name != "norm" and size <= LARGEST for size in matrices(name, array)[0].shape]
        result[name] = [Reference(w, has_basis) for w in matrices(name, array)]
    for k in range(n):
        for name, g in values(k + 1).items():
            for one_matrix, g_of_matrix in zip(result[name], matrices(name, g), strict=True):
                one_matrix.update(g_of_matrix, float(rate(k)), DECAY[name])
    return result


def program(n, dtype=jnp.float32, put=lambda tree: tree, factors=None, **options):
    """Return parameters and state after n updates of arrays that `put` places on devices."""
    preconditioning = Preconditioning(BETA, FREQUENCY, LARGEST)
    direction = scale_by_soap(AXES, BETAS, EPS, jnp.dtype(dtype), preconditioning)
    if factors is not None:
        direction = merged([direction, scale_by_factors(lambda _: factors)])
    last = without_first_update()
    tx = problem.rule(direction, last, schedule=rate, decay=DECAY, **options)
    update = jax.jit(tx.update)
    params = put(values(0))
    state = jax.jit(tx.init)(params)
    for k in range(n):
        updates, state = update(put(values(k + 1)), state, params)
        params = jax.tree.map(jnp.add, params, updates)
    return jax.device_get((params, state))


def test_updates_match_the_algorithm_of_the_paper():
    n = 25
    params, state = program(n)
    assert state.updates == n
    for name, expected in reference(n).items():
        result = matrices(name, params[name])
        moments = matrices(name, state.mu[name])
        for i, matrix in enumerate(expected):
            np.testing.assert_allclose(result[i], matrix.w, atol=2e-4, err_msg=name)
            np.testing.assert_allclose(moments[i], matrix.m, atol=1e-5, err_msg=name)
    assert set(state.row_basis) == {"square", "experts", "wide", "cube"}
    assert set(state.column_basis) == {"square", "experts", "tall", "cube"}
    assert state.row_basis["experts"].shape == (2, 3, 8, 8)
    assert state.column_basis["cube"].shape == (2, 12, 12)


def test_first_update_changes_only_bases():
    params, state = program(1)
    jax.tree.map(np.testing.assert_array_equal, params, values(0))
    assert not any(leaf.any() for leaf in jax.tree.leaves((state.mu, state.nu)))
    g = values(1)["square"].astype(np.float64)
    q = state.row_basis["square"].astype(np.float64)
    diagonal = np.swapaxes(q, 1, 2) @ g @ np.swapaxes(g, 1, 2) @ q
    off = diagonal - diagonal * np.eye(12)
    assert np.abs(off).max() < 1e-4 * np.abs(diagonal).max()


def test_factors_multiply_steps_but_not_decay():
    factors = {name: 0.25 if name == "square" else 1.0 for name in SHAPES}
    (scaled, _), (whole, _) = program(2, factors=factors), program(2)
    after_decay = values(0)["square"] * (1 - float(rate(1)) * DECAY["square"])
    steps = (params["square"] - after_decay for params in (scaled, whole))
    np.testing.assert_allclose(next(steps), 0.25 * next(steps), atol=1e-6)
    np.testing.assert_array_equal(scaled["tall"], whole["tall"])


def test_cautious_decay_leaves_out_elements_that_move_away_from_zero():
    (cautious, _), (whole, _) = program(2, is_cautious=True), program(2)
    begin = values(0)["square"]
    after_decay = begin * (1 - float(rate(1)) * DECAY["square"])
    agrees = (after_decay - whole["square"]) * begin >= 0
    np.testing.assert_allclose(cautious["square"][agrees], whole["square"][agrees], atol=1e-6)
    away = whole["square"] + begin - after_decay
    np.testing.assert_allclose(cautious["square"][~agrees], away[~agrees], atol=1e-6)
    assert 0 < agrees.mean() < 1


def test_decompositions_depend_on_those_before():
    """Independent ones hang on CPUs with few threads (docs/upstream.md)."""
    grams, bases = (
        tuple({name: jnp.eye(4) for name in ("a", "b")} for _ in range(2)) for _ in range(2)
    )
    grams[0]["a"] = jnp.full((4, 4), jnp.nan)
    nu = {name: jnp.ones((4, 4)) for name in ("a", "b")}
    for change in (_first_bases, _next_bases):
        for by_name in change(grams, bases, nu)[0]:
            assert all(np.isnan(basis).any() for basis in by_name.values())


def test_bfloat16_moments_have_float32_bases():
    params, state = program(3, jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.mu, state.nu))} == {
        np.dtype(jnp.bfloat16)
    }
    assert state.row_gram["square"].dtype == state.row_basis["square"].dtype == np.float32
    exact, _ = program(3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-3), params, exact)


def test_sharded_updates_match_single_device():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def put(tree):
        def sharding(name, shape):
            is_split = [i >= rows_of(name) and size % 2 == 0 for i, size in enumerate(shape)]
            names = iter(("a", "b", None))
            return NamedSharding(mesh, P(*(next(names) if split else None for split in is_split)))

        return {name: jax.device_put(x, sharding(name, x.shape)) for name, x in tree.items()}

    sharded, whole = program(9, put=put), program(9)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), sharded[0], whole[0])


def config_of(**sections):
    optimizer = {
        "name": "soap", "lr": 3e-3, "soap": {"precondition_frequency": 2, "max_precond_dim": 64},
    }  # fmt: skip
    model = {"vocab_size": 96, "n_layers": 2, "n_kv_heads": 4, "ffn_hidden_dim": 64}
    scheduler = {"name": "constant", "warmup_steps": 0}
    return tiny_config(model=model, optimizer=optimizer, scheduler=scheduler, **sections)


@functools.cache
def on_mesh(**distributed):
    dp = distributed.get("dp_shard", 1)
    program = setup(
        config_of(train={"batch_size": 8 // dp}, distributed={"dp_shard": 1, **distributed})
    )
    return program, *program.run(program.state(), random_batches(program.config, 6))


@pytest.mark.slow
def test_run_on_mesh_shards_bases():
    _, _, metrics = on_mesh()
    program, sharded, sharded_metrics = on_mesh(dp_shard=2, tp=2)
    # Eigenvectors of eigenvalues near 0 are arbitrary: they depend on rounding.
    np.testing.assert_allclose(sharded_metrics["loss"], metrics["loss"], rtol=1e-3)
    assert jax.tree.map(lambda a: a.sharding, sharded) == program.shardings
    soap_state = sharded.opt_state[1]
    for tree, name, shard in (
        (soap_state.row_basis, "q_proj", (2, 32, 32)),
        (soap_state.column_gram, "k_proj", (2, 32, 32)),
    ):
        matrix = tree["layers"]["attention"][name]["weight"]
        assert matrix.sharding.shard_shape(matrix.shape) == shard
    embedding = soap_state.column_gram["token_embedding"]["embedding"]["weight"]
    assert embedding.sharding.shard_shape(embedding.shape) == (64, 32)


def test_run_resumes_bit_exactly(tmp_path):
    """The checkpoint is between the first bases and their first change."""
    program, batches = setup(config_of()), random_batches(config_of(), 4)
    state, _ = program.run(program.state(), batches[:2])
    assert_resumes_bit_exactly(program, state, batches[2:], tmp_path)


@pytest.mark.parametrize(
    "sections",
    [
        {"train": {"opt_state_dtype": "8bit"}},
        {"train": {"offload": ["optimizer"]}},
    ],
    ids=str,
)
def test_other_storage_of_moments_is_refused(sections):
    with pytest.raises(UserError, match=r'does not support optimizer\.name = "soap"'):
        check(tiny_config(optimizer={"name": "soap"}, **sections), 1)


def test_idle_experts_are_refused():
    with pytest.raises(ValueError, match='skip_idle_experts = true does not support name = "soap"'):
        OptimizerConfig(name="soap", skip_idle_experts=True)
