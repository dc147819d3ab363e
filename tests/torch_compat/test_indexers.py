"""Indexers of DeepSeek-V3.2 beyond the tests of all families: training, start of a warm-up."""

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.errors import UserError
from tests.conftest import tiny_config
from tests.helpers import setup
from tests.torch_compat.huggingface import load, params_of, state_of
from torch_compat.checkpoint.restore import open_foreign

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

ROWS, LENGTH, UPDATES, WEIGHT = 2, 20, 10, 0.3
ADAMW = {"lr": 1e-3, "weight_decay": 0.1, "betas": (0.9, 0.95), "eps": 1e-6}
KEYS = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64,
    "initializer_range": 0.1, "pad_token_id": None, "eos_token_id": 0, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 20, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4, "v_head_dim": 6,
}  # fmt: skip
INDEXER = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": 6}


def network_of(model_type, **keys):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **KEYS, **keys)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def divergences(network):
    """Return a list to which each forward pass adds the divergence of each layer.

    transformers trains no indexer: its scores are computed here, with gradients.
    """
    layer_divergences, inputs = [], {}

    def remember(module, args, kwargs, chosen):
        inputs[module] = args, chosen

    def add(module, _, output):
        indexer = module.indexer
        (x, latent, (cos, sin), mask, *_), chosen = inputs.pop(indexer)
        q = indexer.wq_b(latent.detach()).unflatten(-1, (indexer.n_heads, -1))
        k = indexer.k_norm(indexer.wk(x.detach()))[:, :, None]
        q, k = (turned(part, cos[:, :, None], sin[:, :, None]) for part in (q, k))
        products = torch.relu(torch.einsum("bsjd,btd->bsjt", q, k[:, :, 0]))
        scores = torch.einsum("bsj,bsjt->bst", indexer.weights_proj(x.detach()), products)
        scores = scores * (indexer.n_heads * indexer.head_dim) ** -0.5
        seen = mask if mask.dtype == torch.bool else mask == 0
        attended = torch.zeros_like(scores, dtype=torch.bool).scatter(-1, chosen.long(), True)
        attended = attended & seen
        p = output[1].mean(1).detach()
        log_q = torch.log_softmax(scores.masked_fill(~attended, -torch.inf), dim=-1)
        kl = torch.where(attended, torch.xlogy(p, p) - p * log_q, 0.0)
        layer_divergences.append(kl.sum(-1).mean())

    for layer in network.model.layers:
        layer.self_attn.indexer.register_forward_hook(remember, with_kwargs=True)
        layer.self_attn.register_forward_hook(add)
    return layer_divergences


def turned(x, cos, sin):
    """Rotate pairs (i, i + n/2) of the first channels."""
    rope, nope = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rope.chunk(2, dim=-1)
    return torch.cat([rope * cos + torch.cat([-second, first], -1) * sin, nope], dim=-1)


def test_ten_updates_with_the_loss_of_the_indexer_match_torch(tmp_path):
    network = network_of("deepseek_v32", **INDEXER)
    network.save_pretrained(tmp_path / "hf")
    load(tmp_path / "hf", tmp_path / "run")
    model, params = params_of(tmp_path / "run")
    table = {**model.model_dump(), "moe_aux_loss_weight": 0.0, "moe_bias_update_rate": 0.0}
    table["latent_attention"] |= {"index_loss_weight": WEIGHT}
    native = setup(tiny_config(
        model=table, train={"batch_size": ROWS, "seq_len": LENGTH, "grad_clip_norm": 1.0},
        optimizer=ADAMW, scheduler={"name": "none"},
    ))  # fmt: skip
    rng = np.random.default_rng(0)
    inputs, labels = (rng.integers(0, 100, (UPDATES, ROWS, LENGTH)) for _ in range(2))
    batches = [
        {"input_ids": i[None], "labels": x[None]} for i, x in zip(inputs, labels, strict=True)
    ]
    _, metrics = native.run(state_of(native, params), batches)
    losses, norms, terms = torch_updates(network, inputs, labels)
    np.testing.assert_allclose(metrics["losses"]["indexer_loss"], terms, rtol=2e-5)
    np.testing.assert_allclose(metrics["loss"], losses, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], norms, rtol=1e-5)


def torch_updates(network, inputs, labels):
    """Return losses, gradient norms and the term of the indexer."""
    layer_divergences = divergences(network)
    named = dict(network.named_parameters())
    matrices = [p for p in named.values() if p.ndim > 1]
    vectors = [p for p in named.values() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], **ADAMW
    )
    losses, norms, terms = [], [], []
    for tokens, targets in zip(inputs, labels, strict=True):
        layer_divergences.clear()
        logits = network(torch.from_numpy(tokens)).logits
        term = WEIGHT * sum(layer_divergences) / len(layer_divergences)
        loss = term + torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.from_numpy(targets).flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)))
        optimizer.step()
        losses.append(loss.item())
        terms.append(term.item())
    return losses, norms, terms


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Return a directory with a model of dense attention, and its import."""
    path = tmp_path_factory.mktemp("dense")
    network_of("deepseek_v3").save_pretrained(path / "hf")
    load(path / "hf", path / "run")
    return path


@pytest.mark.parametrize("source", ["run", "hf"])
def test_warm_up_starts_from_a_model_without_indexers(dense, tmp_path, source):
    model, params = params_of(dense / "run")
    table = model.model_dump()
    table["latent_attention"] |= {
        "index_heads": 16, "index_head_dim": 12, "index_top_k": 6, "index_warm_up": True
    }  # fmt: skip

    def start(left_out):
        checkpoint = {"load_path": str(dense / source), "exclude_from_loading": left_out}
        native = setup(tiny_config(model=table, checkpoint=checkpoint))
        saved = Checkpoints(tmp_path / "none", native.config.checkpoint, read_only=True)
        return native, starting_state(native, saved, open_foreign)[0]

    native, state = start(("optimizer", "progress", "indexer"))
    started, new = (flatten_dict(jax.device_get(x.params)) for x in (state, native.init()))
    trained = flatten_dict(params)
    indexers = {path for path in started if "indexer" in path}
    assert len(indexers) == 10  # of two stacks
    for path, leaf in started.items():
        np.testing.assert_array_equal(leaf, new[path] if path in indexers else trained[path])
    with pytest.raises(UserError, match="indexer"):
        start(("optimizer", "progress"))
