"""QK-Clip: recorded logits and scaled weights compared with unfused attention in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.config.rules import check
from jaxforge.errors import UserError
from jaxforge.model.mixers.attention import Attention
from jaxforge.model.mixers.latent_attention import LatentAttention
from jaxforge.model.qk_clip import clip_logits
from jaxforge.parallel.stages import Stack
from tests.conftest import tiny_config
from tests.helpers import assert_resumes_bit_exactly, random_batches, setup
from tests.training.health.test_attention_logits import rotated

HEADS, KV, WIDTH = 4, 2, 16


def config_of(**sections):
    optimizer = {"lr": 1e-2, **sections.pop("optimizer", {})}
    scheduler = {"name": "constant", "warmup_steps": 0}
    return tiny_config(optimizer=optimizer, scheduler=scheduler, **sections)


def logits_of_first_layer(params, tokens):
    """Return the largest visible logit of each head of the first layer of a Llama."""
    layer = jax.tree.map(lambda leaf: np.asarray(leaf[0], np.float64), params["layers"])
    x = np.asarray(params["token_embedding"]["embedding"]["weight"], np.float64)[tokens]
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * layer["attention_norm"]["weight"]

    def project(name, n):
        linear = layer["attention"][f"{name}_proj"]
        return (x @ linear["weight"].T + linear.get("bias", 0)).reshape(*tokens.shape, n, -1)

    q, k = rotated(project("q", HEADS)), rotated(project("k", KV))
    scores = np.einsum("mbshw,mbthw->mbhst", q, np.repeat(k, HEADS // KV, axis=3)) / WIDTH**0.5
    visible = np.tril(np.ones((tokens.shape[-1],) * 2, bool))
    return np.max(np.where(visible, scores, -np.inf), axis=(0, 1, 3, 4))


@pytest.mark.slow
def test_heads_above_the_limit_are_scaled_to_it():
    """The update itself is that of a run without a clip; both microbatches count."""
    sections = {"model": {"n_layers": 1, "qkv_bias": True}, "train": {"grad_accum_steps": 2}}
    [batch] = random_batches(config_of(**sections), 1)
    program = setup(config_of(**sections))
    begin = jax.device_get(program.state().params)
    largest = logits_of_first_layer(begin, np.asarray(batch["input_ids"]))
    limit = float(np.median(largest))
    free, _ = program.run(program.state(), [batch])
    program = setup(config_of(optimizer={"qk_clip": limit}, **sections))
    clipped, metrics = program.run(program.state(), [batch])
    factors = np.where(largest > limit, limit / largest, 1.0)
    assert metrics["logits"]["max_logit"][0] == pytest.approx(largest.max(), rel=1e-4)
    assert metrics["logits"]["clipped_heads"][0] == np.sum(factors < 1) == HEADS // 2

    def products(state):
        """Return q and k of random inputs, by head, and their products."""
        x = np.random.default_rng(0).standard_normal((7, 64))
        attention = state.params["layers"]["attention"]
        q, k = (
            (x @ attention[name]["weight"][0].T + attention[name]["bias"][0]).reshape(7, n, WIDTH)
            for name, n in (("q_proj", HEADS), ("k_proj", KV))
        )
        return np.einsum("shw,thw->hst", q, np.repeat(k, HEADS // KV, axis=1))

    expected = products(free) * factors[:, None, None]
    np.testing.assert_allclose(products(clipped), expected, rtol=1e-3, atol=1e-6)
    for name in ("v_proj", "o_proj"):
        program, reference = (
            s.params["layers"]["attention"][name]["weight"] for s in (clipped, free)
        )
        np.testing.assert_array_equal(program, reference)
    jax.tree.map(np.testing.assert_array_equal, clipped.opt_state, free.opt_state)


def test_shared_keys_have_the_smallest_factor_of_their_heads():
    config = ModelConfig(dim=8, n_heads=4, n_kv_heads=2, vocab_size=16)
    factors = jnp.array([[1.0, 0.25, 1.0, 1.0], [0.5, 0.5, 0.0625, 1.0]])
    weights = {"q_proj": {"weight": jnp.ones((2, 8, 8))}, "k_proj": {"weight": jnp.ones((2, 4, 8))}}
    scaled = Attention.scale_logits(config, weights, factors)
    q = scaled["q_proj"]["weight"][:, ::2, 0]
    k = scaled["k_proj"]["weight"][:, ::2, 0]
    np.testing.assert_allclose(k, [[0.5, 1.0], [0.5**0.5, 0.25]], rtol=1e-6)
    np.testing.assert_allclose(q * np.repeat(k, 2, axis=1), factors, rtol=1e-6)


def test_mixers_next_to_attention_keep_their_weights():
    config = ModelConfig(
        dim=8, n_layers=1, n_heads=4, vocab_size=16, mixer_pattern=("mamba2+attention",)
    )
    weights = {name: {"weight": jnp.ones((1, 8, 8))} for name in ("q_proj", "k_proj")}
    params = {"layers": {"attention": weights, "mamba2": {"a_log": jnp.ones((1, 4))}}}
    largest = jnp.array([[2.0, 1.0, 1.0, 0.5]])
    clipped = clip_logits(config, params, largest, Stack(1), 1.0)["layers"]
    q, k = (clipped["attention"][f"{name}_proj"]["weight"][0, ::2, 0] for name in "qk")
    np.testing.assert_allclose(q * k, [0.5, 1.0, 1.0, 1.0], rtol=1e-6)
    np.testing.assert_array_equal(clipped["mamba2"]["a_log"], 1.0)


@pytest.mark.parametrize("q_rank", [None, 6])
def test_latent_attention_leaves_the_shared_rotary_key(q_rank):
    """Equations of section 2.2 of arXiv:2507.20534, with NumPy's loops over heads."""
    sizes = {"q_rank": q_rank, "kv_rank": 4, "nope_head_dim": 3, "rope_head_dim": 2,
             "value_head_dim": 5}  # fmt: skip
    config = ModelConfig(
        dim=8, n_heads=2, vocab_size=16, mixer_pattern=("latent_attention",), latent_attention=sizes
    )
    rng = np.random.default_rng(0)
    query = "q_proj" if q_rank is None else "q_b_proj"
    shapes = {query: (1, 2 * 5, q_rank or 8), "kv_b_proj": (1, 2 * 8, 4), "kv_a_proj": (1, 6, 8)}
    params = {name: {"weight": rng.standard_normal(shape)} for name, shape in shapes.items()}
    expected = jax.tree.map(np.copy, params)
    factors = np.array([[0.25, 1.0]])
    for head, factor in enumerate(factors[0]):
        q = expected[query]["weight"][0].reshape(2, 5, -1)[head]
        q[:3] *= factor**0.5
        q[3:] *= factor
        expected["kv_b_proj"]["weight"][0].reshape(2, 8, -1)[head][:3] *= factor**0.5
    program = LatentAttention.scale_logits(config, jax.tree.map(jnp.asarray, params), factors)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), program, expected)


@functools.cache
def on_mesh(limit=None, **distributed):
    """Return results of three steps in which heads are above the limit.

    Plain gradients, since other rules amplify the rounding of a mesh.
    """
    dp = distributed.get("dp_shard", 1)
    program = setup(
        config_of(
            model={"n_layers": 3},
            optimizer={"name": "optax.sgd", "lr": 0.1, "qk_clip": limit},
            train={"batch_size": 4 // dp, "grad_accum_steps": 2},
            distributed={"dp_shard": 1, **distributed},
        )
    )
    return program, *program.run(program.state(), batches_of_all_meshes(3))


def batches_of_all_meshes(n):
    return random_batches(tiny_config(train={"batch_size": 4, "grad_accum_steps": 2}), n)


@pytest.mark.parametrize(
    "distributed",
    [
        {"dp_shard": 2, "tp": 2},
        pytest.param({"dp_shard": 2, "cp": 2, "cp_strategy": "ring"}, marks=pytest.mark.slow),
        pytest.param({"tp": 2, "cp": 2, "cp_strategy": "ulysses"}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"pp": 2, "cp": 2}, marks=pytest.mark.slow),
    ],
    ids=["dp, tp", "dp, ring", "tp, ulysses", "pp, tp", "pp, cp"],
)
def test_clip_does_not_depend_on_the_mesh(distributed):
    _, state, metrics = on_mesh(0.05)
    program, sharded, on_devices = on_mesh(0.05, **distributed)
    for name in ("max_logit", "clipped_heads"):
        np.testing.assert_allclose(on_devices["logits"][name], metrics["logits"][name], rtol=1e-4)
    assert min(metrics["logits"]["clipped_heads"]) > 2
    q, k = (sharded.params["layers"]["attention"][f"{name}_proj"]["weight"] for name in "qk")
    rows = program.model.stack.unstack
    for ours_of, reference in ((q, "q_proj"), (k, "k_proj")):
        expected = state.params["layers"]["attention"][reference]["weight"]
        np.testing.assert_allclose(rows(ours_of), expected, atol=2e-5)
    assert jax.tree.map(lambda a: a.sharding, sharded) == program.shardings


def test_run_resumes_bit_exactly(tmp_path):
    program, _, _ = on_mesh(0.05)
    batches = batches_of_all_meshes(4)
    state, _ = program.run(program.state(), batches[:2])
    assert_resumes_bit_exactly(program, state, batches[2:], tmp_path)


def test_bad_step_does_not_clip():
    program, state, _ = on_mesh(0.05)
    state = jax.tree.map(jnp.copy, state)
    weight = state.params["output_head"]["proj"]["weight"]
    state.params["output_head"]["proj"]["weight"] = weight.at[0, 0].set(jnp.nan)
    before = jax.device_get(state.params)
    after, _ = program.run(state, batches_of_all_meshes(1))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(after.params))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"qk_norm": True}}, "model.qk_norm = true, which normalizes"),
        ({"model": {"clip_qkv": 8.0}}, "model.clip_qkv = 8.0, which limits queries and keys"),
        ({"lora": {"rank": 2}}, "lora.rank = 2, which does not train"),
    ],
    ids=str,
)
def test_runs_whose_logits_do_not_follow_the_weights_are_refused(sections, message):
    with pytest.raises(UserError, match=message):
        check(config_of(optimizer={"qk_clip": 100}, **sections), 2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"mixer_pattern": ("mamba2",)}}, "no layer of the model has attention logits"),
        ({"optimizer": {"freeze_patterns": ["q_proj"]}}, "layers.attention.q_proj.weight is froz"),
    ],
    ids=str,
)
def test_models_without_scaled_logits_are_refused(sections, message):
    optimizer = {"qk_clip": 100, **sections.pop("optimizer", {})}
    with pytest.raises(UserError, match=message):
        setup(config_of(optimizer=optimizer, **sections))
