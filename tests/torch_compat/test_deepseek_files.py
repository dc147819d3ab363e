"""DeepSeek's published files: 8-bit weights, a layer for further tokens; and greedy decoding."""

import json

import ml_dtypes
import numpy as np
import pytest

from jaxforge.errors import UserError
from jaxforge.model.decoding import Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model
from torch_compat.formats.lazy import from_array
from torch_compat.formats.safetensors import units

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from tests.torch_compat.huggingface import (  # noqa: E402 (needs torch)
    compiled,
    config_json,
    export,
    load,
    params_of,
    tensors_of,
    their_logits,
)

MODEL = {
    "vocab_size": 96, "hidden_size": 144, "intermediate_size": 136, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "initializer_range": 0.08, "q_lora_rank": 24, "kv_lora_rank": 130, "qk_nope_head_dim": 40,
    "qk_rope_head_dim": 8, "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 20, "n_group": 2, "topk_group": 1, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 95,
    "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096,
                     "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
PUBLISHED = {
    "model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"],
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    "ep_size": 1, "moe_layer_freq": 1, "num_nextn_predict_layers": 1, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "hidden_act": "silu",
    "routed_scaling_factor": 2.5, "norm_topk_prob": True, "rms_norm_eps": 1e-6,
    "attention_bias": False, "attention_dropout": 0.0, "rope_theta": 10000,
    "tie_word_embeddings": False, "use_cache": True, "aux_loss_alpha": 0.001, "seq_aux": True,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
"""Keys of the file of DeepSeek-V3 in addition to the sizes."""


def scaled(weight):
    """Return numbers in 8 bits, their scales, and their products in bfloat16."""
    blocks = [-(-n // 128) for n in weight.shape]
    scales, wide = np.empty(blocks, np.float32), np.empty(weight.shape, np.float32)
    for i, j in np.ndindex(*blocks):
        at = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        scales[i, j] = np.abs(weight[at]).max() / 448
        wide[at] = scales[i, j]
    numbers = (weight / wide).astype(ml_dtypes.float8_e4m3fn)
    return numbers, scales, (numbers.astype(np.float32) * wide).astype(ml_dtypes.bfloat16)


def write(directory, tensors, config):
    directory.mkdir()
    lazy = {name: from_array(np.asarray(array)) for name, array in tensors.items()}
    (directory / "config.json").write_text(json.dumps(config))
    for unit in units(lazy, directory, 10**9, 10**9)[0]:
        unit.write()


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a directory like the published one, and the network with its dequantized weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("deepseek_v3", **json.loads(json.dumps(MODEL)))
    network = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    path = tmp_path_factory.mktemp("deepseek")
    network.save_pretrained(path / "plain")
    tensors = {}
    for name, array in tensors_of(path / "plain").items():
        if not name.endswith("_proj.weight") and "kv_a_proj_with_mqa" not in name:
            tensors[name] = array if "e_score" in name else array.astype(ml_dtypes.bfloat16)
            continue
        numbers, scales, product = scaled(array)
        tensors[name], tensors[f"{name}_scale_inv"] = numbers, scales
        weights = product.astype(np.float32)
        write_weight(network, name, weights)
    for parameter in network.parameters():
        parameter.data = parameter.data.bfloat16().float()
    layer = {name: array for name, array in tensors.items() if ".layers.1." in name}
    further = {name.replace(".layers.1.", ".layers.2."): array for name, array in layer.items()}
    further["model.layers.2.eh_proj.weight"] = np.ones((144, 288), ml_dtypes.bfloat16)
    write(path / "hf", {**tensors, **further}, {**MODEL, **PUBLISHED})
    return path / "hf", network.eval(), tensors, further


def write_weight(network, name, array):
    """Set a weight of a transformers model, which stacks experts: [gate; up] and down."""
    parts, state = name.split("."), network.state_dict()
    if "experts" not in parts:
        state[name].copy_(torch.from_numpy(array))
        return
    at, projection = parts.index("experts"), parts[-2]
    stack = ".".join(parts[: at + 1])
    if projection == "down_proj":
        state[f"{stack}.down_proj"][int(parts[at + 1])].copy_(torch.from_numpy(array))
        return
    first = 0 if projection == "gate_proj" else len(array)
    rows = state[f"{stack}.gate_up_proj"][int(parts[at + 1])]
    rows[first : first + len(array)].copy_(torch.from_numpy(array))


@pytest.fixture(scope="module")
def imported(published, tmp_path_factory):
    directory, network, *_ = published
    run = tmp_path_factory.mktemp("imported") / "run"
    notes = load(directory, run)
    return notes, run, network, params_of(run)


def tokens_of(length):
    return np.random.default_rng(1).integers(0, 95, (2, length))


def test_published_files_are_read(published, imported):
    _, _, _, further = published
    (note,), _, network, (model, params) = imported
    weights = [name for name in further if not name.endswith("_scale_inv")]
    assert note.startswith(f"left out: {len(weights)} tensors of layers from 2 on")
    theirs = their_logits(network, tokens_of(24))
    native = compiled(model)(params, tokens_of(24))
    assert np.abs(np.asarray(native) - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.slow
def test_64_greedy_tokens_match_transformers(imported):
    _, _, network, (model, params) = imported
    prompts = tokens_of(7)
    completions = Decoder(Model(model), params, 64, Sampling(temperature=0.0)).complete(
        prompts.tolist(), range(2)
    )
    with torch.no_grad():
        whole = network.generate(
            torch.from_numpy(prompts), max_new_tokens=64, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    assert [list(c.tokens) for c in completions] == whole[:, 7:].tolist()
    assert len(set(completions[0].tokens)) > 4


def test_export_is_in_bfloat16_or_8_bits(published, imported, tmp_path):
    """Matrices of the file are dequantized, and of a further layer nothing is written."""
    directory, _, tensors, _ = published
    _, run, *_ = imported
    plain = tensors_of(export(run, tmp_path / "plain"))
    assert plain.keys() == {name for name in tensors if not name.endswith("_scale_inv")}
    for name, array in plain.items():
        if f"{name}_scale_inv" in tensors:
            wide = np.kron(tensors[f"{name}_scale_inv"], np.ones((128, 128), np.float32))
            wide = wide[: array.shape[0], : array.shape[1]]
            expected = (tensors[name].astype(np.float32) * wide).astype(ml_dtypes.bfloat16)
        else:
            expected = tensors[name]
        if name.endswith("gate.weight"):  # transformers keeps routers in float32
            expected = expected.astype(np.float32)
        assert array.dtype == expected.dtype
        np.testing.assert_array_equal(array, expected, name)
    again = export(run, tmp_path / "again", dtype="fp8")
    written, before = config_json(again), config_json(directory)
    assert written["quantization_config"] == before["quantization_config"]
    assert written["num_nextn_predict_layers"] == 0
    assert tensors_of(again).keys() == tensors.keys()
    scale = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    assert tensors_of(again)[scale].shape == (2, 2)  # 138 x 144


def test_weights_without_scales_are_refused(published, tmp_path):
    _, _, tensors, _ = published
    lacking = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    written_tensors = {name: array for name, array in tensors.items() if name != lacking}
    write(tmp_path / "hf", written_tensors, {**MODEL, **PUBLISHED})
    with pytest.raises(UserError, match=f"o_proj.weight is in 8 bits, but {lacking} does not"):
        load(tmp_path / "hf", tmp_path / "run")
