"""The same logits as the reference implementations in `transformers`, from random weights."""

import jax
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.model.transformer import Model
from torch_compat.names.kempnerforge import from_torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

RENAMED = {
    "model.embed_tokens": "token_embedding.embedding",
    "model.layers": "layers",
    "model.norm": "norm",
    "lm_head": "output_head.proj",
    "self_attn": "attention",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
}

SHAPE = {"dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 128,
         "ffn_hidden_dim": 96, "norm_eps": 1e-5, "rope_theta": 10000.0}  # fmt: skip

CASES = {
    "mha": {"n_kv_heads": 4},
    "gqa": {},
    "mqa": {"n_kv_heads": 1},
    "tied": {"tie_embeddings": True},
    "theta": {"rope_theta": 100.0},
    "eps 1e-6": {"norm_eps": 1e-6},
    "eps 1e-2": {"norm_eps": 1e-2},
    "llama3 rope": {"rope_scaling": RopeScaling(original_max_seq_len=64)},
    "llama3 rope, other factors": {
        "rope_scaling": RopeScaling(
            factor=32.0, low_freq_factor=0.5, high_freq_factor=2.0, original_max_seq_len=32
        ),
    },
}


def hugging_face_config(kind, config):
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        scaling = config.rope_scaling.model_dump()
        original = scaling.pop("original_max_seq_len")
        rope |= {"rope_type": "llama3", "original_max_position_embeddings": original, **scaling}
    return kind(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn_dim,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters=rope,
        max_position_embeddings=256,
        initializer_range=0.1,  # so that attention is not almost uniform
        attn_implementation="eager",
    )


def random_weights(network):
    """Norm weights too: at 1, as they are made, they could be swapped unnoticed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return network.eval()


def our_name(name):
    for theirs, ours in RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def logits_of_both(config, network, n_tokens):
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, n_tokens))
    with torch.no_grad():
        theirs = network(torch.from_numpy(tokens)).logits.numpy()
    model = Model(config)
    named = {our_name(name): t.numpy() for name, t in network.state_dict().items()}
    params = from_torch(named, model.abstract)
    ours = jax.jit(lambda p, t: model.logits(p, model.hidden(p, t)))(params, tokens)
    return np.asarray(ours), theirs


@pytest.mark.parametrize("case", CASES)
def test_llama(case):
    config = ModelConfig(**{**SHAPE, **CASES[case]})
    torch.manual_seed(0)
    network = transformers.LlamaForCausalLM(hugging_face_config(transformers.LlamaConfig, config))
    # Longer than both original lengths of the stretched rotary positions.
    ours, theirs = logits_of_both(config, random_weights(network), 160 if "rope" in case else 24)
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("tied", "eps"), [(False, 1e-5), (True, 1e-5), (False, 1e-2)])
def test_qwen3(tied, eps):
    """The norms of queries and keys have an eps of 1e-5 whatever the others have (KempnerForge)."""
    shape = {**SHAPE, "norm_eps": eps}
    config = ModelConfig(**shape, qk_norm=True, tie_embeddings=tied)
    torch.manual_seed(0)
    network = transformers.Qwen3ForCausalLM(hugging_face_config(transformers.Qwen3Config, config))
    for layer in network.model.layers:
        layer.self_attn.q_norm.variance_epsilon = 1e-5
        layer.self_attn.k_norm.variance_epsilon = 1e-5
    ours, theirs = logits_of_both(config, random_weights(network), 24)
    assert theirs.std() > 0.1
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
