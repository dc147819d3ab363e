"""Sparse attention: selection, results and gradients against torch, meshes, memory and rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from jaxforge.aux_outputs import LossWeights, metric_value
from jaxforge.config import rules
from jaxforge.config.eval import ATTENTION_WEIGHTS, MAX_LOGITS
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels import sparse_attention
from jaxforge.kernels.scoring import PLAIN
from jaxforge.kernels.sparse_attention import Index, Selection, select_largest
from jaxforge.model.flops import causal_flops_per_token, matrix_elements
from jaxforge.model.indexer import COVERAGE, LOSS
from jaxforge.model.layer import Capture, Context, LayerSettings
from jaxforge.model.linear import Declare, parameter_keys
from jaxforge.model.mixers.latent_attention import LatentAttention
from jaxforge.model.plan import build_layer_plan
from jaxforge.model.rope import rotations
from jaxforge.model.runtime import Runtime
from jaxforge.model.transformer import Model
from tests.conftest import tiny_config
from tests.helpers import (
    assert_resumes_bit_exactly,
    loss_and_gradient,
    random_batches,
    setup,
)

torch = pytest.importorskip("torch")

BATCH, LENGTH, HEADS, DIM = 2, 14, 3, 10
LATENT = {"q_rank": 8, "kv_rank": 8, "nope_head_dim": 6, "rope_head_dim": 4, "value_head_dim": 5,
          # With few heads, scores of tokens that no head likes are equally 0.
          "index_heads": 12, "index_head_dim": 6, "index_top_k": 4,
          "index_loss_weight": 0.7}  # fmt: skip


@pytest.mark.parametrize("k", [1, 7, 30, 49, 50, 60])
def test_selection_equals_that_of_a_stable_sort(k):
    scores = np.random.default_rng(0).standard_normal((5, 50)).astype(np.float32)
    scores[0, :20], scores[1, 3:], scores[2, ::2] = 0.0, -np.inf, -0.0
    scores[3] = np.round(scores[3])
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, np.argsort(-scores, axis=-1, kind="stable")[:, :k], True, axis=-1)
    np.testing.assert_array_equal(jax.jit(select_largest, static_argnums=1)(scores, k), chosen)


def mixer_of(**keys):
    """Return a mixer of a float64 model with random norms."""
    model = ModelConfig(
        dim=DIM, n_layers=1, n_heads=HEADS, vocab_size=16, mixer_pattern=("latent_attention",),
        latent_attention={**LATENT, **keys}, init_std=0.6, max_seq_len=64,
    )  # fmt: skip
    mixer = LatentAttention(model, Declare(parameter_keys(jax.random.key(0)), jnp.float64))
    rng = np.random.default_rng(0)
    for _, variable in nnx.iter_graph(mixer):
        if isinstance(variable, nnx.Param) and variable[...].ndim == 1:
            variable[...] = jnp.asarray(rng.uniform(0.5, 1.5, variable[...].shape))
    return mixer


def run(mixer, x, segment_ids, padding):
    """Return outputs of a mixer, and the gradients of Σ y c and the loss."""
    plan = build_layer_plan(mixer.config)
    angles = rotations(plan.ropes, np.arange(LENGTH)[None])
    weights = LossWeights(jnp.float64(1.0), jnp.float64(1 / np.sum(~padding)))
    context = Context(None, segment_ids, angles, weights, padding)
    capture = Capture((ATTENTION_WEIGHTS, MAX_LOGITS))
    settings = LayerSettings(plan.layers[0], plan, Runtime(), capture)
    graph, params = nnx.split(mixer)

    @functools.partial(jax.value_and_grad, argnums=(0, 1), has_aux=True)
    def loss(params, x):
        out = nnx.merge(graph, params)(x, context, settings=settings)
        return jnp.sum(out.y * factors()) + out.aux.loss, out

    (_, out), (of_params, of_x) = jax.jit(loss)(params, x)
    flat = {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(of_params)}
    return out, flat, of_x


def factors():
    return np.random.default_rng(3).standard_normal((BATCH, LENGTH, DIM))


def rms_norm(x, weight):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-6) * weight


def turned(x):
    """Rotate pairs (i, i + n/2) of the last dimension of [b, tokens, ..., n]."""
    half = x.shape[-1] // 2
    # Frequencies and angles are float32 in the model.
    steps = np.arange(0, 2 * half, 2, dtype=np.float32) / (2 * half)
    angles = np.arange(LENGTH, dtype=np.float32)[:, None] / np.float32(10000.0) ** steps
    angles = angles.astype(np.float64).reshape(LENGTH, *[1] * (x.ndim - 3), half)
    cos, sin = torch.from_numpy(np.cos(angles)), torch.from_numpy(np.sin(angles))
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def of_paper(p, x, sizes, segment_ids, padding):
    """Return y, KL, coverage and weights of heads by equations 1 to 4 of arXiv:2512.02556."""
    latent = rms_norm(x @ p["q_a_proj.weight"].T, p["q_a_norm.weight"])
    q = (latent @ p["q_b_proj.weight"].T).unflatten(-1, (HEADS, -1))
    shared = x @ p["kv_a_proj.weight"].T
    c = rms_norm(shared[..., : sizes.kv_rank], p["kv_a_norm.weight"])
    both = (c @ p["kv_b_proj.weight"].T).unflatten(-1, (HEADS, -1))
    nope = sizes.nope_head_dim
    scores = torch.einsum("bshn,bthn->bhst", q[..., :nope], both[..., :nope])
    key = turned(shared[..., sizes.kv_rank :])
    scores = scores + torch.einsum("bshr,btr->bhst", turned(q[..., nope:]), key)
    scores = scores * sizes.query_head_dim**-0.5
    seen = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None]
    if segment_ids is not None:
        ids = torch.from_numpy(segment_ids)
        seen = seen & (ids[:, :, None] == ids[:, None])
    seen = seen.expand(BATCH, -1, -1)
    # The indexer, whose inputs are detached.
    rope, heads = sizes.rope_head_dim, sizes.index_heads
    index_q = (latent.detach() @ p["indexer.q_proj.weight"].T).unflatten(-1, (heads, -1))
    index_k = torch.nn.functional.layer_norm(
        x.detach() @ p["indexer.k_proj.weight"].T, (sizes.index_head_dim,),
        p["indexer.k_norm.weight"], p["indexer.k_norm.bias"], 1e-6,
    )  # fmt: skip
    index_q = torch.cat([turned(index_q[..., :rope]), index_q[..., rope:]], -1)
    index_k = torch.cat([turned(index_k[..., :rope]), index_k[..., rope:]], -1)
    products = torch.relu(torch.einsum("bsji,bti->bsjt", index_q, index_k))
    weights = x.detach() @ p["indexer.weights_proj.weight"].T
    index = torch.einsum("bsj,bsjt->bst", weights, products)
    index = index / (heads * sizes.index_head_dim) ** 0.5
    order = torch.sort(index.masked_fill(~seen, -torch.inf), descending=True, stable=True).indices
    chosen = torch.zeros_like(seen).scatter(-1, order[..., : sizes.index_top_k], True) & seen
    attended = seen if sizes.index_warm_up else chosen
    attention = torch.softmax(scores.masked_fill(~attended[:, None], -torch.inf), dim=-1)
    y = torch.einsum("bhst,bthv->bshv", attention, both[..., nope:]).flatten(2)
    p_bar = attention.mean(1).detach()
    log_q = torch.log_softmax(index.masked_fill(~attended, -torch.inf), dim=-1)
    kl = torch.where(attended, torch.xlogy(p_bar, p_bar) - p_bar * log_q, 0).sum(-1)
    all_keys = torch.softmax(scores.masked_fill(~seen[:, None], -torch.inf), dim=-1)
    coverage = (all_keys * chosen[:, None]).sum(-1).mean(1)
    real = torch.from_numpy(~padding)
    return y @ p["o_proj.weight"].T, kl[real].mean(), coverage[real].mean(), attention


@pytest.mark.parametrize(
    ("keys", "is_packed"),
    [
        ({}, True),
        ({"index_warm_up": True}, True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (({}, False), ({"index_top_k": 99}, False))
        ),
    ],
    ids=str,
)
def test_results_and_gradients_equal_those_of_torch(keys, is_packed, monkeypatch):
    """Queries are computed in parts and in blocks of 3, and scores are float32."""
    monkeypatch.setattr(sparse_attention, "_QUERIES", 3)
    rng = np.random.default_rng(1)
    x, padding = rng.standard_normal((BATCH, LENGTH, DIM)), np.zeros((BATCH, LENGTH), bool)
    ids = np.sort(rng.integers(0, 3, (BATCH, LENGTH)), axis=1) if is_packed else None
    padding[1, -3:] = is_packed
    with jax.enable_x64(True):
        mixer = mixer_of(**keys)
        out, gradients, of_x = run(mixer, x, ids, padding)
    state = nnx.to_flat_state(nnx.state(mixer, nnx.Param))
    p = {".".join(map(str, path)): torch.tensor(np.asarray(leaf[...]), requires_grad=True)
         for path, leaf in state}  # fmt: skip
    x_torch = torch.tensor(x, requires_grad=True)
    y, kl, coverage, attention = of_paper(p, x_torch, mixer.sizes, ids, padding)
    loss = (y * torch.from_numpy(factors())).sum() + mixer.sizes.index_loss_weight * kl
    loss.backward()
    assert_close(out.y, y)
    assert_close(metric_value(out.aux.metrics[LOSS]), kl)
    assert_close(out.aux.loss, mixer.sizes.index_loss_weight * kl)
    assert_close(metric_value(out.aux.metrics[COVERAGE]), coverage)
    assert_close(out.captured[ATTENTION_WEIGHTS], attention)
    assert_close(of_x, x_torch.grad)
    assert gradients.keys() == p.keys()
    for name, gradient in gradients.items():
        assert_close(gradient, p[name].grad)
    assert coverage.item() < 0.95 or mixer.sizes.index_top_k > LENGTH


def assert_close(result, expected):
    expected = expected.detach().numpy()
    scale = np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(result), expected, rtol=0, atol=1e-5 * scale)


def test_memory_grows_with_the_length_and_not_with_its_square():
    def temporary(length):
        heads = jax.ShapeDtypeStruct((1, length, 4, 8), jnp.float32)
        weights = jax.ShapeDtypeStruct((1, length, 4), jnp.float32)
        key = jax.ShapeDtypeStruct((1, length, 8), jnp.float32)

        def loss(q, k, v, index):
            at = jnp.arange(length)[None], None
            selection = Selection(64, is_warm_up=False, measures=True)
            out = sparse_attention.sparse_attention(q, k, v, index, at, selection, PLAIN)
            return jnp.sum(out.y) + jnp.sum(out.divergence)

        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))
        program = step.lower(heads, heads, heads, Index(heads, weights, key)).compile()
        return program.memory_analysis().temp_size_in_bytes

    assert temporary(16384) < 2.5 * temporary(8192)


# Models and meshes

EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 16, "moe_first_dense_layers": 1,
           "moe_router": "sigmoid_topk", "moe_bias_update": "sign",
           "moe_bias_update_rate": 0.1}  # fmt: skip
MODEL = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": None, "vocab_size": 64,
    "ffn_hidden_dim": 32, "init_std": 0.1, "mixer_pattern": ("latent_attention",),
    "latent_attention": {**LATENT, "q_rank": 16, "kv_rank": 16, "index_heads": 16},
}  # fmt: skip


def job(model=(), latent=(), train=(), **mesh):
    groups = mesh.get("dp_shard", 1) * mesh.get("ep", 1)
    table = {**MODEL, **dict(model)}
    table["latent_attention"] = {**table["latent_attention"], **dict(latent)}
    return tiny_config(
        model=table,
        train={"batch_size": 4 // groups, "seq_len": 24, "grad_accum_steps": 2, **dict(train)},
        distributed={"dp_shard": 1, **mesh},
        scheduler={"name": "none"},
    )


def packed_batches(section, n):
    batches, rng = random_batches(section, n), np.random.default_rng(0)
    return [
        {**batch, "segment_ids": np.sort(rng.integers(0, 2, batch["labels"].shape), axis=-1)}
        for batch in batches
    ]


def values(section):
    """Return the loss of a packed batch, and all gradients."""
    return loss_and_gradient(setup(section), packed_batches(section, 1)[0])


@functools.cache
def alone(model, latent=()):
    return values(job(model, latent))


RING = {"dp_shard": 2, "cp": 2, "tp": 2, "cp_strategy": "ring"}


@pytest.mark.parametrize(
    ("model", "grad_sync", "mesh"),
    [
        ({}, "update", RING),
        *(pytest.param(*keys, marks=pytest.mark.slow) for keys in (
            ({}, "microbatch", RING),
            ({}, "microbatch", {"cp": 4, "cp_strategy": "ulysses"}),
            ({}, "update", {"dp_shard": 4, "tp": 2}),
            ({}, "update", {"pp": 2, "tp": 2}),
            ({}, "update", {"pp": 2, "cp": 2, "cp_strategy": "ulysses"}),
            (EXPERTS, "update", {"dp_shard": 2, "ep": 2, "tp": 2}),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_gradients_do_not_depend_on_the_mesh(model, grad_sync, mesh):
    losses, gradients = values(job(model, train={"grad_sync": grad_sync}, **mesh))
    expected_losses, expected = alone(tuple(model.items()))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(gradients, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.slow
@pytest.mark.parametrize("saved", ["none", pytest.param("full", marks=pytest.mark.slow)])
def test_warm_up_trains_the_indexer_alone(saved, tmp_path):
    """Everything else stays, the divergence falls, and a resumed run is bit-identical."""
    train = {"activation_checkpointing": saved}
    program = setup(job(EXPERTS, {"index_warm_up": True}, train, ep=2))
    batch, state = packed_batches(program.config, 1), program.state()
    params, routers = jax.device_get((state.params, state.model_state))
    state, metrics = program.run(state, 3 * batch)
    assert np.all(np.diff(metrics["losses"][LOSS]) < 0)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.model_state), routers)
    trained = flatten_dict(jax.device_get(state.params))
    changed = {
        path for path, before in flatten_dict(params).items()
        if not np.array_equal(trained[path], before)
    }  # fmt: skip
    assert changed == {path for path in trained if "indexer" in path}
    assert_resumes_bit_exactly(program, state, batch, tmp_path)


def test_indexer_without_loss_is_frozen():
    frozen = {name for name in NAMES if job(latent={"index_loss_weight": 0}).freezes(name)}
    assert frozen == {name for name in NAMES if "indexer" in name}
    assert not any(map(job().freezes, NAMES))


NAMES = ("layers.latent_attention.indexer.q_proj.weight", "layers.latent_attention.q_b_proj.weight",
         "layers.mlp.up_proj.weight", "mtp.0.latent_attention.indexer.k_norm.bias")  # fmt: skip


def test_decoding_step_reads_the_selected_tokens_only():
    """A step scores 4096 keys of the indexer, and attends to the latents of 8 tokens."""
    latent = {**MODEL["latent_attention"], "index_top_k": 8}
    network = Model(ModelConfig(**{**MODEL, "n_layers": 1, "latent_attention": latent}))
    cache = jax.eval_shape(lambda: network.empty_cache(1, 4096))
    token = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    text = str(jax.make_jaxpr(network.extend)(network.abstract, token, token, cache))
    assert "f32[1,16,4096]" in text  # scores of the indexer
    assert "f32[1,1,4,1,8]" in text  # scores of heads
    assert "f32[1,1,4,1,4096]" not in text


# Sizes and rules


def test_flops_count_selected_keys_and_all_scores_of_the_indexer():
    """DeepSeek-V3.2 with 2048 of 16384 keys: k - k² / 2S of them on average."""
    model = {"mixer_pattern": ("latent_attention",), "dim": 7168, "n_layers": 1, "n_heads": 128}
    plain, sparse = (
        ModelConfig(**model, latent_attention={"q_rank": 1536, "index_heads": heads})
        for heads in (0, 64)
    )
    index = 1536 * 64 * 128 + 7168 * (128 + 64)
    assert matrix_elements(sparse, 3, 0) - matrix_elements(plain, 3, 0) == index
    length, pairs = 16384, 2048 - 2048**2 // (2 * 16384)
    causal = causal_flops_per_token(sparse, length) - 6 * matrix_elements(sparse, 3, 0)
    assert causal == 6 * (128 * (192 + 128) * pairs + 64 * 128 * length // 2)


@pytest.mark.parametrize(
    ("latent", "keys", "message"),
    [
        ({"q_rank": None}, {}, "index_heads = 12 requires q_rank"),
        ({"index_head_dim": 2}, {}, "index_head_dim = 2 must be at least rope_head_dim = 4"),
        ({"index_warm_up": True, "index_loss_weight": 0}, {}, "index_warm_up = true trains noth"),
        ({}, {"sliding_window": 8}, "sliding_window = 8 is not supported with latent_attention.i"),
        ({}, {"attention_chunk_size": 8}, "attention_chunk_size = 8 is not supported"),
        ({}, {"mup_base_width": 8}, "mup_base_width = 8 is not supported"),
    ],
)  # fmt: skip
def test_impossible_settings_are_problems(latent, keys, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig(
            mixer_pattern=("latent_attention",), latent_attention={**LATENT, **latent}, **keys
        )


@pytest.mark.parametrize("backend", ["cudnn", "splash", "reference"])
def test_kernels_that_attend_to_all_keys_are_refused(backend):
    with pytest.raises(UserError, match=f'sdpa_backend = "{backend}" cannot attend to the keys'):
        setup(job({"sdpa_backend": backend}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"latent_attention": {"rope_head_dim": 4}}}, "has no effect without"),
        ({"lora": {"rank": 2}, "model": {}}, "lora.rank = 2 would freeze them"),
    ],
)  # fmt: skip
def test_new_indexers_without_use_are_refused(sections, message):
    checkpoint = {"load_path": "base", "exclude_from_loading": ("indexer",)}
    config = tiny_config(**sections | {"model": MODEL | sections["model"]}, checkpoint=checkpoint)
    with pytest.raises(UserError, match=message):
        rules.check(config, 1)
