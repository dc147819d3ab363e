"""Latent attention: both forms against sums in NumPy, size of the cache, meshes, and its rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxforge.config.eval import ATTENTION_WEIGHTS, MAX_LOGITS
from jaxforge.config.mixers import LatentAttentionConfig
from jaxforge.config.model import ModelConfig
from jaxforge.model.decoding import Decoder
from jaxforge.model.flops import causal_flops_per_token, matrix_elements
from jaxforge.model.layer import NO_CAPTURE, Capture, Context, LayerSettings
from jaxforge.model.linear import Declare, parameter_keys
from jaxforge.model.mixers import latent_attention
from jaxforge.model.mixers.latent_attention import LatentAttention
from jaxforge.model.plan import build_layer_plan
from jaxforge.model.rope import rotations
from jaxforge.model.runtime import Runtime
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, active_parameter_count, parameter_count
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from tests.conftest import tiny_config
from tests.helpers import drawn, random_batches, setup

BATCH, LENGTH, HEADS, DIM = 2, 12, 3, 10
LATENT = {"kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 5}


def config(q_rank=7, **keys):
    latent = {**LATENT, "q_rank": q_rank}
    return ModelConfig(
        dim=DIM, n_layers=1, n_heads=HEADS, vocab_size=16, mixer_pattern=("latent_attention",),
        latent_attention=latent, init_std=0.6, max_seq_len=64, **keys,
    )  # fmt: skip


def mixer_of(model, dtype=jnp.float64):
    """Return the mixer with random norms and biases."""
    mixer = LatentAttention(model, Declare(parameter_keys(jax.random.key(0)), dtype))
    rng = np.random.default_rng(0)
    for _, variable in nnx.iter_graph(mixer):
        if isinstance(variable, nnx.Param) and variable[...].ndim == 1:
            variable[...] = jnp.asarray(rng.uniform(0.5, 1.5, variable[...].shape), dtype)
    return mixer


def random_input():
    return np.random.default_rng(1).standard_normal((BATCH, LENGTH, DIM))


def run(mixer, x, cache=None, positions=None, segment_ids=None, capture=NO_CAPTURE):
    """Run a mixer in one program."""
    plan = build_layer_plan(mixer.config)
    at = np.broadcast_to(np.arange(x.shape[1]) if positions is None else positions, x.shape[:2])
    settings = LayerSettings(plan.layers[0], plan, Runtime(), capture)

    @jax.jit
    def mix(x, cache, at, segment_ids):
        turned = rotations(plan.ropes, at)
        context = Context(None if cache is None else at, segment_ids, turned)
        return mixer(x, context, cache, settings=settings)

    return mix(x, cache, at, segment_ids)


def rms_norm(x, weight, eps=1e-6):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def turned(x, positions, theta=10000.0):
    """Rotate pairs (i, i + n/2) of the last dimension of [..., tokens, n]."""
    half = x.shape[-1] // 2
    # Frequencies and angles are float32 in the model.
    frequencies = 1 / np.float32(theta) ** (
        np.arange(0, 2 * half, 2, dtype=np.float32) / (2 * half)
    )
    angles = positions[:, None].astype(np.float32) * frequencies.astype(np.float32)
    cos, sin = np.cos(angles.astype(np.float64)), np.sin(angles.astype(np.float64))
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def expected(mixer, x, segment_ids=None):
    """Return the result of section 2.1 of DeepSeek-V2, with weights and largest scores by head."""
    array = lambda module, name: np.asarray(getattr(module, name)[...], np.float64)  # noqa: E731
    weight = lambda name: array(getattr(mixer, name), "weight")  # noqa: E731
    bias = lambda name: array(getattr(mixer, name), "bias") if mixer.config.qkv_bias else 0  # noqa: E731
    sizes, positions = mixer.sizes, np.arange(x.shape[1])
    nope, value = sizes.nope_head_dim, sizes.value_head_dim
    if sizes.q_rank is None:
        q = x @ weight("q_proj").T
    else:
        latent = rms_norm(x @ weight("q_a_proj").T + bias("q_a_proj"), weight("q_a_norm"))
        q = latent @ weight("q_b_proj").T
    shared = x @ weight("kv_a_proj").T + bias("kv_a_proj")
    c = rms_norm(shared[..., : sizes.kv_rank], weight("kv_a_norm"))
    r = turned(shared[..., sizes.kv_rank :], positions)
    width = nope + sizes.rope_head_dim
    outputs, all_weights, largest = [], [], []
    for head in range(mixer.config.n_heads):
        of_head = q[..., head * width : (head + 1) * width]
        rows = weight("kv_b_proj")[head * (nope + value) : (head + 1) * (nope + value)]
        k, v = c @ rows[:nope].T, c @ rows[nope:].T
        scores = of_head[..., :nope] @ k.swapaxes(1, 2)
        scores = scores + turned(of_head[..., nope:], positions) @ r.swapaxes(1, 2)
        seen = np.tril(np.ones((x.shape[1],) * 2, bool))[None]
        if segment_ids is not None:
            seen = seen & (segment_ids[:, :, None] == segment_ids[:, None])
        scores = np.where(seen, scores * width**-0.5, -np.inf)
        weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
        outputs.append(weights @ v)
        all_weights.append(weights)
        largest.append(scores.max((1, 2)))
    bias_of_o = array(mixer.o_proj, "bias") if mixer.config.o_bias else 0
    y = np.concatenate(outputs, axis=-1) @ weight("o_proj").T + bias_of_o
    return y, np.stack(all_weights, axis=1), np.stack(largest, axis=1)


CAPTURED = (ATTENTION_WEIGHTS, MAX_LOGITS)
CASES = [{}, {"q_rank": None}, {"qkv_bias": True, "o_bias": True}]


@pytest.mark.parametrize("keys", CASES, ids=str)
def test_result_equals_sums_of_the_paper(keys):
    """Angles and scores are float32 in every kernel."""
    with jax.enable_x64(True):
        mixer, x = mixer_of(config(**keys)), random_input()
        ids = np.sort(np.random.default_rng(2).integers(0, 3, (BATCH, LENGTH)), axis=1)
        for segment_ids in (None, ids):
            out = run(mixer, x, segment_ids=segment_ids, capture=Capture(CAPTURED))
            results = out.y, *(out.captured[name] for name in CAPTURED)
            for program, reference_result in zip(
                results, expected(mixer, x, segment_ids), strict=True
            ):
                np.testing.assert_allclose(
                    program, reference_result, rtol=0, atol=4e-6 * np.abs(reference_result).max()
                )


@pytest.mark.parametrize("q_rank", [7, None])
def test_absorbed_form_equals_decompressed_form(q_rank, monkeypatch):
    """In float64 both forms differ by rounding only."""
    with jax.enable_x64(True):
        mixer, x = mixer_of(config(q_rank)), random_input()
        results = {}
        for absorbs in (True, False):
            monkeypatch.setattr(latent_attention, "absorbs", lambda *_, a=absorbs: a)
            cache = LatentAttention.empty_cache(mixer.config, BATCH, LENGTH, jnp.float64)
            outputs = []
            for at in np.split(np.arange(LENGTH), [8, 9]):
                out = run(mixer, x[:, at], cache, at)
                cache = out.cache
                outputs.append(out.y)
            results[absorbs] = np.concatenate(outputs, axis=1)
        largest = np.abs(results[False]).max()
        np.testing.assert_allclose(results[True], results[False], rtol=0, atol=1e-10 * largest)
        whole = run(mixer, x).y
        np.testing.assert_allclose(results[True], whole, rtol=0, atol=2e-6 * largest)


def test_single_tokens_are_absorbed_and_prompts_are_not():
    """DeepSeek-V3: per head, 512 · 256 multiply-adds decompress a key; 1088 or 320 score it."""
    sizes = LatentAttentionConfig()
    assert latent_attention.absorbs(sizes, 1, 2)
    assert latent_attention.absorbs(sizes, 1, 100_000)
    assert latent_attention.absorbs(sizes, 100, 4096)  # 100 · 4096 · 768 < 3996 · 131,072
    assert not latent_attention.absorbs(sizes, 4096, 4096)
    assert not latent_attention.absorbs(sizes, 200, 4096)


def test_cache_has_as_many_values_as_in_the_paper():
    """DeepSeek-V2, table 1: (512 + 64) values per token and layer, whatever the number of heads."""
    for heads in (16, 128):
        model = ModelConfig(n_heads=heads, n_layers=3, mixer_pattern=("latent_attention",))
        cache = jax.eval_shape(lambda m=model: Model(m, dtype=jnp.bfloat16).empty_cache(2, 100))
        leaves = jax.tree.leaves(cache)
        assert sum(leaf.size for leaf in leaves) == 3 * 2 * 100 * (512 + 64)
        assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}


def test_absorbed_step_reads_no_decompressed_keys():
    """A decoding step of 4096 tokens has no array of keys of all heads."""
    sizes = {"kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "value_head_dim": 8}
    model = ModelConfig(
        dim=16, n_layers=1, n_heads=4, vocab_size=16, mixer_pattern=("latent_attention",),
        latent_attention=sizes, ffn_hidden_dim=16,
    )  # fmt: skip
    network = Model(model)
    cache = jax.eval_shape(lambda: network.empty_cache(1, 4096))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    text = str(jax.make_jaxpr(network.extend)(network.abstract, token, token, cache))
    assert "4096,20]" in text
    assert "4096,4," not in text


# Meshes

EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 16, "moe_first_dense_layers": 1,
           "moe_router": "sigmoid_topk", "moe_bias_update": "sign"}  # fmt: skip
MODEL = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": None, "vocab_size": 64,
    "ffn_hidden_dim": 32, "mixer_pattern": ("latent_attention",),
    "latent_attention": {"q_rank": 16, "kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4,
                         "value_head_dim": 6},
}  # fmt: skip


INDEXER = {"index_heads": 16, "index_head_dim": 6, "index_top_k": 4}


def of_mesh(grad_sync="update", experts=False, strategy="auto", **distributed):
    dp = np.prod([distributed.get(axis, 1) for axis in ("dp_shard", "dp_replicate", "ep")])
    return tiny_config(
        model={**MODEL, **(EXPERTS if experts else {})},
        train={"batch_size": int(8 // dp), "seq_len": 32, "grad_sync": grad_sync},
        distributed={"dp_shard": 1, "cp_strategy": strategy, **distributed},
    )


@functools.cache
def of_one_device(experts):
    program = setup(of_mesh(experts=experts))
    return program.run(program.state(), packed_batches(program.config))


def packed_batches(config):
    """Return three batches of rows of several documents."""
    batches, rng = random_batches(config, 3), np.random.default_rng(0)
    return [
        {**batch, "segment_ids": np.sort(rng.integers(0, 3, batch["labels"].shape), axis=-1)}
        for batch in batches
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"dp_shard": 2, "cp": 2, "tp": 2},
        *(pytest.param(keys, marks=pytest.mark.slow) for keys in (
            {"dp_shard": 4, "tp": 2, "grad_sync": "microbatch"},
            {"cp": 4, "tp": 2, "strategy": "ring"},
            {"cp": 4, "strategy": "ulysses", "grad_sync": "microbatch"},
            {"dp_shard": 2, "ep": 2, "tp": 2, "experts": True},
            {"pp": 2, "tp": 2, "dp_shard": 2},
        )),
    ],
    ids=str,
)  # fmt: skip
def test_losses_do_not_depend_on_the_mesh(keys):
    program = setup(of_mesh(**keys))
    state, metrics = program.run(program.state(), packed_batches(program.config))
    reference_state, reference = of_one_device(keys.get("experts", False))
    np.testing.assert_allclose(metrics["loss"], reference["loss"], rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], reference["grad_norm"], rtol=1e-4)
    if "pp" in keys:
        return
    for leaf, other in zip(
        jax.tree.leaves(state.params), jax.tree.leaves(reference_state.params), strict=True
    ):
        np.testing.assert_allclose(leaf, other, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("indexer", [{}, INDEXER], ids=["all keys", "selected keys"])
@pytest.mark.parametrize("axes", [{"dp_shard": 2, "tp": 2}, {"dp_shard": 4}], ids=str)
def test_decoding_does_not_depend_on_the_mesh(axes, indexer):
    """Tokens of the absorbed form travel to the shards of the matrices."""
    latent = {**MODEL["latent_attention"], **indexer}
    section = tiny_config(model={**MODEL, "init_std": 0.3, "latent_attention": latent})
    model, params = Model(section.model), drawn(section)
    prompts = [[5, 9, 33], [7, 1, 60, 2, 8, 44, 21], [50], list(range(20))]
    greedy = Sampling(temperature=0.0)
    alone = Decoder(model, params, 12, greedy).complete(prompts, range(4))
    mesh = make_mesh(tiny_config(distributed=axes), jax.devices()[:4])
    placed = jax.device_put(params, param_shardings(model.abstract, model.axes, mesh))
    with jax.set_mesh(mesh):
        spread = Decoder(model, placed, 12, greedy, mesh=mesh).complete(prompts, range(4))
    assert spread == alone
    assert len({tuple(completion.tokens) for completion in alone}) == 4


# Sizes

V3 = {
    "dim": 7168, "n_layers": 61, "n_heads": 128, "vocab_size": 129280, "ffn_hidden_dim": 18432,
    "mixer_pattern": ("latent_attention",), "latent_attention": {"q_rank": 1536},
    "num_experts": 256,
    "moe_top_k": 8, "moe_first_dense_layers": 3, "moe_expert_dim": 2048, "moe_shared_experts": 1,
    "moe_router": "sigmoid_topk", "moe_bias_update": "sign",
}  # fmt: skip
LITE = {
    "dim": 2048, "n_layers": 27, "n_heads": 16, "vocab_size": 102400, "ffn_hidden_dim": 10944,
    "mixer_pattern": ("latent_attention",), "num_experts": 64, "moe_top_k": 6,
    "moe_first_dense_layers": 1,
    "moe_expert_dim": 1408, "moe_shared_experts": 2, "moe_shared_expert_dim": 2816,
}  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "total", "active"),
    [(V3, 671.026404352e9, 37.55e9), (LITE, 15.706484224e9, 2.66e9)],
    ids=["V3", "V2-Lite"],
)
def test_parameters_are_those_of_the_published_weights(keys, total, active):
    """The published weights of V3 without its further layer; 2.66 has embedding and head."""
    model = Model(ModelConfig(**keys))
    assert parameter_count(model.abstract) == total
    assert active_parameter_count(model) == pytest.approx(active, rel=1e-3)


def test_flops_count_both_widths():
    """A layer of V3 has 187,105,280 elements, and 128 · (192 + 128) multiply-adds per pair."""
    config = ModelConfig(**{**V3, "n_layers": 1, "num_experts": 0, "moe_shared_experts": 0,
                            "moe_first_dense_layers": 0, "moe_bias_update": None})  # fmt: skip
    attention = 7168 * 1536 + 1536 * 24576 + 7168 * 576 + 512 * 32768 + 16384 * 7168
    assert attention == 187_105_280
    matrices = matrix_elements(config, 3, 8)
    assert matrices == attention + 3 * 7168 * 18432 + 7168 * 129280
    causal = causal_flops_per_token(config, 4096)
    assert causal == 6 * matrices + 3 * 128 * (192 + 128) * 4096


# Rules


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"head_dim": 8}, 'head_dim = 8 is not possible with mixer "latent_attention"'),
        ({"n_kv_heads": 2}, "n_kv_heads = 2 is not possible"),
        ({"qk_norm": True}, "qk_norm = true is not possible"),
        ({"attention_sinks": True}, "attention_sinks = true is not possible"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not possible"),
        ({"latent_attention": {"rope_head_dim": 3}}, "rope_head_dim = 3 must be even"),
        ({"mixer_pattern": ("attention", "latent_attention")},
         "choose one of them"),
    ],
)  # fmt: skip
def test_impossible_settings_are_problems(keys, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{"mixer_pattern": ("latent_attention",), **keys})


def test_width_need_not_be_a_multiple_of_heads():
    assert ModelConfig(dim=100, n_heads=3, mixer_pattern=("latent_attention",)).head_size == 192


def test_shards_divide_the_ranks():
    """8 devices split 32 channels, but not a latent of 12."""
    latent = {**MODEL["latent_attention"], "kv_rank": 12}
    section = tiny_config(
        model={**MODEL, "latent_attention": latent},
        distributed={"dp_shard": 8},
        train={"batch_size": 1},
    )
    mesh = make_mesh(section, jax.devices()[:8])
    assert (mesh.shape["dp_shard"], mesh.shape["dp_replicate"]) == (4, 2)
