"""Tests of logits against `transformers`, with random weights."""

import jax
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.model.transformer import Model
from tests.torch_names import from_torch

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.model.transformers_models import RENAMED, SHAPE, hugging_face  # noqa: E402 (needs torch)

OF_FAMILY = {
    "Llama": {},
    "Mistral": {},
    "Qwen2": {"qkv_bias": True},
    "Qwen3": {"qk_norm": True},
}

CASES = {
    "Llama": {
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
    },
    "Mistral": {
        "gqa": {},
        "narrow heads": {"head_dim": 12},
        "heads that do not divide dim": {"dim": 68, "n_heads": 6, "head_dim": 16},
    },
    "Qwen2": {
        "gqa": {},
        "mha": {"n_kv_heads": 4},
        "tied, eps 1e-6": {"tie_embeddings": True, "norm_eps": 1e-6},
    },
    "Qwen3": {
        "heads as wide as dim": {"qk_norm_eps": 1e-5},
        "wide heads": {"head_dim": 32, "norm_eps": 1e-6, "qk_norm_eps": 1e-6},
        "tied": {"tie_embeddings": True, "head_dim": 32},
        "eps 1e-2": {"head_dim": 32, "norm_eps": 1e-2, "qk_norm_eps": 1e-2},
    },
}


def our_name(name):
    for expected, result in RENAMED.items():
        name = name.replace(expected, result)
    return name


def logits_of_both(config, network, n_tokens):
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, (2, n_tokens))
    with torch.no_grad():
        expected = network(torch.from_numpy(tokens)).logits.numpy()
    model = Model(config)
    named = {our_name(name): t.numpy() for name, t in network.state_dict().items()}
    params = from_torch(named, model.abstract)
    result = jax.jit(lambda p, t: model.logits(p, model.hidden(p, t)))(params, tokens)
    return np.asarray(result), expected


@pytest.mark.parametrize(
    ("family", "case"),
    [
        pytest.param(family, case, marks=[pytest.mark.slow] * (i > 1))
        for family, cases in CASES.items() for i, case in enumerate(cases)
    ],
)  # fmt: skip
def test_logits_match_transformers(family, case):
    config = ModelConfig(**{**SHAPE, **OF_FAMILY[family], **CASES[family][case]})
    # Longer than both original lengths of the scaled rotary positions.
    n_tokens = 160 if "rope" in case else 24
    result, expected = logits_of_both(config, hugging_face(family, config), n_tokens)
    assert expected.std() > 0.1
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)


def test_qk_norm_eps_is_independent_of_norm_eps():
    """The default is 1e-5 for any `norm_eps`, as in KempnerForge."""
    config = ModelConfig(**{**SHAPE, "norm_eps": 1e-2}, qk_norm=True)
    network = hugging_face("Qwen3", config)
    for layer in network.model.layers:
        layer.self_attn.q_norm.variance_epsilon = 1e-5
        layer.self_attn.k_norm.variance_epsilon = 1e-5
    result, expected = logits_of_both(config, network, 24)
    assert expected.std() > 0.1
    np.testing.assert_allclose(result, expected, rtol=0, atol=1e-5)
