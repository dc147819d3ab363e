"""Tests of Qwen3-Next beyond those of all families: greedy tokens, and tensors left out."""

import json

import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model
from tests.torch_compat.huggingface import (
    assert_same_bits,
    config_json,
    export,
    load,
    params_of,
    tensors_of,
)
from torch_compat.checkpoint import hf_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.numpy import load_file, save_file  # noqa: E402 (transformers needs it)

TOKENS = 64
KEYS = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24, "max_position_embeddings": 128,
    "initializer_range": 0.3, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """Return the directory of a network with its import, and the network."""
    path = tmp_path_factory.mktemp("qwen3_next")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("qwen3_next", **KEYS)
    network = transformers.AutoModelForCausalLM.from_config(config).eval()
    network.save_pretrained(path / "hf")
    load(path / "hf", path / "run")
    return path, network


@pytest.mark.slow
def test_greedy_tokens_equal_transformers(imported):
    """The prompts have different lengths: padding must not enter the states."""
    path, network = imported
    model, params = params_of(path / "run")
    prompts = [[5, 17, 80, 3, 9], [42]]
    decoder = Decoder(Model(model), params, TOKENS, Sampling(temperature=0.0))
    completions = decoder.complete(prompts, range(len(prompts)))
    for prompt, completion in zip(prompts, completions, strict=True):
        theirs = network.generate(
            torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False, pad_token_id=0
        )
        assert completion.tokens == theirs[0, len(prompt) :].tolist()
        assert len(set(completion.tokens)) > 5


def test_layers_that_predict_further_tokens_are_left_out(imported, tmp_path):
    path, _ = imported
    file = tmp_path / "hf" / "model.safetensors"
    file.parent.mkdir()
    tensors = load_file(path / "hf" / "model.safetensors")
    further = {f"mtp.{key}": np.ones((2, 2), np.float32) for key in ("fc.weight", "norm.weight")}
    save_file({**tensors, **further}, file, {"format": "pt"})
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config_json(path / "hf")))
    (note,) = load(tmp_path / "hf", tmp_path / "run")
    assert note.startswith("left out: mtp.fc.weight, mtp.norm.weight; they predict further tokens")
    assert_same_bits(tensors_of(export(tmp_path / "run", tmp_path / "back")), tensors)


def test_published_config_keys_are_read():
    """Files of 2025 give the interval of attention layers, and rotary keys outside of a table."""
    keys = {key: value for key, value in KEYS.items() if key != "layer_types"}
    published = {
        **keys, "model_type": "qwen3_next", "num_hidden_layers": 8, "full_attention_interval": 4,
        "rope_theta": 10_000_000, "rope_scaling": None, "partial_rotary_factor": 0.25,
        "mlp_only_layers": [], "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001,
        "use_sliding_window": False, "hidden_act": "silu",
    }  # fmt: skip
    table = hf_config.model_table(published, "")
    assert table["mixer_pattern"] == [*["gated_delta_net"] * 3, "attention"]
    assert (table["rope_theta"], table["partial_rotary_factor"]) == (10_000_000, 0.25)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"hidden_act": "relu"}, "no counterpart of hidden_act = 'relu' in qwen3_next"),
        ({"layer_types": ["linear_attention"]}, "1 layers of linear_attention; it must have 2"),
        ({"layer_types": ["sliding_attention"] * 2}, "it must have 2, of full_attention and lin"),
        ({"linear_num_value_heads": 10**9}, "linear_num_value_heads = 1000000000 is not possible"),
    ],
)
def test_unsupported_settings_are_refused(keys, message):
    with pytest.raises(UserError, match=message):
        hf_config.model_table({"model_type": "qwen3_next", **KEYS, **keys}, "here")
