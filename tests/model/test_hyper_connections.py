"""Hyper-connections: coefficients, updates against torch, meshes, decoding, resuming, rules."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge.config import rules
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.hyper_connections import doubly_stochastic
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model
from tests.conftest import tiny_config
from tests.helpers import (
    assert_resumes_bit_exactly,
    initial_params,
    loss_and_gradient,
    random_batches,
    setup,
)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4  # noqa: E402

KINDS = ("dynamic", "manifold")
MODEL = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64,
         "ffn_hidden_dim": 48, "init_std": 0.1, "residual_streams": 3}  # fmt: skip
both = pytest.mark.parametrize("kind", KINDS)


def model_of(kind, **keys):
    return ModelConfig(**{**MODEL, "hyper_connections": kind, **keys})


def randomized(params, seed=0):
    """Return parameters with random values where initial ones are constant."""
    rng = np.random.default_rng(seed)
    flat = flatten_dict(jax.tree.map(np.asarray, params))
    for path, leaf in flat.items():
        if "connection" in path[1] or path[0] == "stream_head":
            flat[path] = leaf + rng.normal(0, 0.3, leaf.shape).astype(np.float32)
    return unflatten_dict(flat)


class Dynamic(torch.nn.Module):
    """Hyper-connection of arXiv:2409.19606, by its equations 10 to 13."""

    def __init__(self, p):
        super().__init__()
        for name, value in p.items():
            self.register_parameter(name, torch.nn.Parameter(torch.tensor(value)))

    def forward(self, streams):
        normed = streams / torch.sqrt((streams**2).mean(-1, keepdim=True) + 1e-5) * self.norm
        values = torch.tanh(normed @ self.proj.T)
        alpha = self.read_bias + self.scale[0] * values[..., 0]
        shares = self.share_bias + self.scale[0] * values[..., 1:-1]
        beta = self.factor_bias + self.scale[1] * values[..., -1]
        return beta, shares, torch.einsum("bsn,bsnd->bsd", alpha, streams)


class Theirs(torch.nn.Module):
    """Llama of transformers with hyper-connections: its own, or those of DeepSeek V4."""

    def __init__(self, kind, model, params):
        super().__init__()
        n = model.residual_streams
        config = transformers.LlamaConfig(
            vocab_size=model.vocab_size, hidden_size=model.dim, intermediate_size=model.ffn_dim,
            num_hidden_layers=model.n_layers, num_attention_heads=4, num_key_value_heads=2,
            rms_norm_eps=1e-5, attn_implementation="eager",
        )  # fmt: skip
        self.network, self.kind, self.n = transformers.LlamaForCausalLM(config), kind, n
        of_v4 = transformers.DeepseekV4Config(
            hidden_size=model.dim, hc_mult=n, rms_norm_eps=1e-5, num_hidden_layers=1
        )
        layers = flatten_dict(params["layers"], sep=".")
        with torch.no_grad():
            for name, weight in self.network.named_parameters():
                weight.copy_(torch.tensor(tensor_of(name, params)))
            self.connections = torch.nn.ModuleList()
            for i in range(model.n_layers):
                for part in ("attention_connection", "mlp_connection"):
                    names = (name for name in layers if name.startswith(part))
                    p = {name.split(".")[1]: layers[name][i] for name in names}
                    self.connections.append(
                        Dynamic(p) if kind == "dynamic" else of_manifold(of_v4, p)
                    )
            if kind == "manifold":
                self.head = v4.DeepseekV4HyperHead(of_v4)
                p = flatten_dict(params["stream_head"])
                self.head.hc_fn.copy_(torch.tensor(p["proj", "weight"]))
                self.head.hc_base.copy_(torch.tensor(p["read_bias",]))
                self.head.hc_scale.copy_(torch.tensor(p["scale",]))

    def forward(self, tokens):
        inner = self.network.model
        x = inner.embed_tokens(tokens)
        streams = x.unsqueeze(2).repeat(1, 1, self.n, 1)
        length = tokens.shape[1]
        angles = inner.rotary_emb(x, torch.arange(length)[None])
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        connections = iter(self.connections)
        for layer in inner.layers:
            attend = functools.partial(
                layer.self_attn, position_embeddings=angles, attention_mask=mask
            )
            for norm, part in (
                (layer.input_layernorm, lambda x, attend=attend: attend(x)[0]),
                (layer.post_attention_layernorm, layer.mlp),
            ):
                beta, shares, read = next(connections)(streams)
                y = part(norm(read))
                mixed = torch.einsum("bsji,bsjd->bsid", shares, streams)
                streams = (mixed + beta.unsqueeze(-1) * y.unsqueeze(2)).contiguous()
        x = self.head(streams) if self.kind == "manifold" else streams.sum(2)
        return self.network.lm_head(inner.norm(x))


def of_manifold(config, p):
    connection = v4.DeepseekV4HyperConnection(config)
    connection.fn.copy_(torch.tensor(p["proj"]))
    biases = p["read_bias"], p["factor_bias"], p["share_bias"].reshape(-1)
    connection.base.copy_(torch.tensor(np.concatenate(biases)))
    connection.scale.copy_(torch.tensor(p["scale"]))
    return connection


def tensor_of(name, params):
    """Return the value of a parameter of transformers' Llama."""
    parts = {"embed_tokens": params["token_embedding"]["embedding"]["weight"],
             "lm_head": params["output_head"]["proj"]["weight"],
             "model.norm": params["norm"]["weight"]}  # fmt: skip
    for part, value in parts.items():
        if part in name and "layers" not in name:
            return value
    _, _, i, *path, _ = name.split(".")
    layers = params["layers"]
    ours = {
        "input_layernorm": layers["attention_norm"],
        "post_attention_layernorm": layers["mlp_norm"],
    }
    module = ours[path[0]] if len(path) == 1 else layers[
        "attention" if path[0] == "self_attn" else "mlp"][path[1]]  # fmt: skip
    return module["weight"][int(i)]


def job(kind, model=(), train=(), **mesh):
    groups = mesh.get("dp_shard", 1) * mesh.get("ep", 1)
    return tiny_config(
        model={**MODEL, "hyper_connections": kind, **dict(model)},
        train={"batch_size": 4 // groups, "seq_len": 24, **dict(train)},
        optimizer={"lr": 1e-3, "weight_decay": 0.0, "betas": (0.9, 0.95), "eps": 1e-6},
        distributed={"dp_shard": 1, **mesh},
        scheduler={"name": "none"},
    )


@pytest.mark.parametrize("kind", [pytest.param("dynamic", marks=pytest.mark.slow), "manifold"])
def test_ten_updates_match_torch(kind):
    native = setup(job(kind, train={"grad_clip_norm": 1.0}))
    params = randomized(jax.device_get(native.state().params))
    network = Theirs(kind, native.config.model, params)
    rng = np.random.default_rng(1)
    inputs, labels = (rng.integers(0, 64, (10, 4, 24)) for _ in range(2))
    batches = [
        {"input_ids": i[None], "labels": x[None]} for i, x in zip(inputs, labels, strict=True)
    ]
    _, metrics = native.run(native.init_from({"params": params}), batches)
    optimizer = torch.optim.AdamW(
        network.parameters(), 1e-3, (0.9, 0.95), eps=1e-6, weight_decay=0.0
    )
    losses, norms = [], []
    for tokens, targets in zip(inputs, labels, strict=True):
        logits = network(torch.from_numpy(tokens))
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=1e-5)


def values(section):
    """Return the loss of a batch, and all gradients."""
    return loss_and_gradient(setup(section), random_batches(section, 1)[0])


@functools.cache
def alone(kind, model=()):
    return values(job(kind, model, {"grad_accum_steps": 2}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "model", "train", "mesh"),
    [
        ("dynamic", {}, {}, {"pp": 2, "dp_shard": 2}),
        *(pytest.param(*keys, marks=pytest.mark.slow) for keys in (
            ("manifold", {}, {}, {"pp": 2, "tp": 2}),
            ("manifold", {}, {}, {"dp_shard": 2, "cp": 2, "tp": 2, "cp_strategy": "ring"}),
            ("manifold", {}, {"grad_sync": "microbatch", "activation_checkpointing": "full"},
             {"dp_shard": 4, "tp": 2}),
            ("dynamic", {}, {"grad_sync": "microbatch"}, {"dp_shard": 2, "tp": 2}),
            ("manifold", {"n_layers": 4}, {}, {"pp": 2, "pp_schedule": "interleaved_1f1b",
                                               "pp_chunks": 2}),
        )),
    ],
    ids=str,
)  # fmt: skip
def test_losses_and_gradients_do_not_depend_on_the_mesh(kind, model, train, mesh):
    losses, gradients = values(job(kind, model, {"grad_accum_steps": 2, **train}, **mesh))
    expected_losses, expected = alone(kind, tuple(model.items()))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(gradients, expected, atol=1e-5 * np.abs(expected).max())


def logits_of(model, params=None):
    network = Model(model)
    params = initial_params(network) if params is None else params
    tokens = np.random.default_rng(0).integers(0, 64, (2, 12))
    return np.asarray(jax.jit(lambda p: network.logits(p, network.hidden(p, tokens)))(params))


def test_one_dynamic_stream_begins_as_a_plain_residual_bit_for_bit():
    plain = ModelConfig(**{key: x for key, x in MODEL.items() if key != "residual_streams"})
    single = model_of("dynamic", residual_streams=1)
    params = initial_params(Model(plain))
    connections = flatten_dict(initial_params(Model(single)))
    joined = unflatten_dict({**connections, **flatten_dict(params)})
    np.testing.assert_array_equal(logits_of(single, joined), logits_of(plain, params))


@both
def test_streams_begin_near_a_plain_residual(kind):
    """Logits differ by the small initial scale, which "dynamic" multiplies by zero at first."""
    plain = ModelConfig(**{key: x for key, x in MODEL.items() if key != "residual_streams"})
    params = initial_params(Model(plain))
    several = flatten_dict(initial_params(Model(model_of(kind))))
    joined = unflatten_dict({**several, **flatten_dict(params)})
    expected, result = logits_of(plain, params), logits_of(model_of(kind), joined)
    np.testing.assert_allclose(result, expected, atol=0.02 * np.abs(expected).max())


def test_shares_are_doubly_stochastic():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 2, (3, 5, 4, 4)), jnp.float32)
    shares = doubly_stochastic(logits, 20)
    for axis in (-1, -2):
        np.testing.assert_allclose(np.sum(shares, axis=axis), 1, atol=1e-3)
    assert np.min(shares) > 0


@both
def test_decoding_equals_whole_texts(kind):
    model = model_of(kind)
    params = randomized(jax.device_get(initial_params(Model(model))))
    prompt = [5, 9, 33, 2]
    decoder = Decoder(Model(model), params, 8, Sampling(temperature=0.0))
    (completion,) = decoder.complete([prompt], range(1))
    network, text = Model(model), list(prompt)
    logits = jax.jit(lambda p, tokens: network.logits(p, network.hidden(p, tokens)))
    for _ in range(8):
        padded = np.zeros((1, 12), np.int32)
        padded[0, : len(text)] = text
        text.append(int(np.argmax(logits(params, padded)[0, len(text) - 1])))
    assert completion.tokens == text[4:]


@pytest.mark.slow
@both
def test_run_resumes_bit_exactly(kind, tmp_path):
    program = setup(job(kind, train={"activation_checkpointing": "full"}, dp_shard=2))
    batches = random_batches(program.config, 3)
    state, _ = program.run(program.state(), batches[:2])
    assert_resumes_bit_exactly(program, state, batches[2:], tmp_path)


@pytest.mark.parametrize("keys", [{"parallel_residual": True}, {"mup_base_width": 8},
                                  {"mtp_depth": 1}], ids=str)  # fmt: skip
def test_impossible_settings_are_problems(keys):
    with pytest.raises(ValueError, match="is not supported with hyper_connections"):
        model_of("manifold", **keys)


def test_stages_need_equal_numbers_of_layers():
    """A layer of zeros, which pads a stage, would mix the streams."""
    with pytest.raises(UserError, match=r"model.n_layers = 3 must be a multiple of 2"):
        rules.check(job("manifold", {"n_layers": 3}, {"grad_accum_steps": 2}, pp=2), 2)
