"""Llama and families that differ from it by a key or two, such as Mistral and Seed-OSS."""

import reprlib

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import (
    BIASES,
    COMMON,
    FULL,
    SLIDING,
    bias_keys,
    llama,
    llama_keys,
    uniform_window,
    window_keys,
)
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    GATED_BIASES,
    LLAMA,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import integer, is_size, list_of

# Llama 2 and 3 (arXiv:2307.09288, 2407.21783).

LLAMA_FAMILY = Family(
    "llama",
    name_map("hf-llama", "LlamaForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, **BIASES},
    summary="Llama 2, 3.x and models of the same shape: every scaling of rotary positions; biases",
    read=llama,
    write=lambda model: {**llama_keys(model), **bias_keys(model)},
    unused=("is_llama_config", "max_sequence_length", "max_window_layers", "pretraining_tp"),
    requires_head_divisor=True,
    is_usual=True,
)


# Mistral (arXiv:2310.06825).

MISTRAL_FAMILY = Family(
    "mistral",
    name_map("hf-mistral", "MistralForCausalLM", *LLAMA),
    {**COMMON, "num_key_value_heads": 8, "sliding_window": 4096},
    summary="Mistral: a sliding window in every layer, or in none",
    read=lambda c, where: llama(c, where) | uniform_window(c, where),
    write=lambda model: {**llama_keys(model), **window_keys(model)},
    unused=("max_window_layers", "use_sliding_window"),
    is_usual=True,
)


# Ministral 3.

_BETA, _FLOOR = "llama_4_scaling_beta", "original_max_position_embeddings"
_MINISTRAL3_ROTARY = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, _FLOOR: 16384,
                      "mscale": 1.0, "mscale_all_dim": 1.0, _BETA: 0.1}  # fmt: skip
"""Rotary parameters of files that do not give them."""


def _read_ministral3(c: Config, where: str) -> Table:
    key = "rope_scaling" if c["rope_scaling"] else "rope_parameters"
    # transformers writes the longest context into the table, and does not read it there.
    rotary = {name: value for name, value in (c[key] or _MINISTRAL3_ROTARY).items()
              if name != "max_position_embeddings"}  # fmt: skip
    beta, floor = rotary.pop(_BETA, None), rotary.get(_FLOOR)
    if not (is_size(beta) or beta == 0) or not integer()(floor):
        raise UserError(
            f"{where}: {key} has {_BETA} = {reprlib.repr(beta)} and {_FLOOR} = "
            f"{reprlib.repr(floor)}: must be a number and a positive integer"
        )
    table = llama({**c, key: rotary}, where) | uniform_window(c, where)
    return table if beta == 0 else table | {
        "attn_temperature_scale": beta, "attn_temperature_floor": floor,
        "attn_temperature_type": "ministral3",
    }  # fmt: skip


def _write_ministral3(model: ModelConfig) -> Table:
    keys = {**llama_keys(model), **window_keys(model), "rope_scaling": None}
    temperature = {_FLOOR: model.attn_temperature_floor, _BETA: model.attn_temperature_scale or 0.0}
    return {**keys, "rope_parameters": {**temperature, **keys["rope_parameters"]}}


MINISTRAL3_FAMILY = Family(
    "ministral3",
    name_map("hf-ministral3", "Ministral3ForCausalLM", *LLAMA),
    {**COMMON, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
     "sliding_window": None},
    summary="Ministral 3: YaRN, and queries that grow with their position in all layers",
    read=_read_ministral3,
    write=_write_ministral3,
)  # fmt: skip


# SmolLM3.


def _read_smollm3(c: Config, where: str) -> Table:
    n_layers, every = c["num_hidden_layers"], c["no_rope_layer_interval"]
    # Despite the name of the key, 1 marks a layer with rotary positions.
    has_rope = c["no_rope_layers"] or [(i + 1) % every != 0 for i in range(n_layers)]
    if len(has_rope) < n_layers:
        raise UserError(f"{where}: no_rope_layers has {len(has_rope)} of {n_layers} layers")
    # By default transformers gives windows only to layers without positions.
    has_windows = c["use_sliding_window"] and c["sliding_window"] is not None
    kinds = [FULL if turn or not has_windows else SLIDING for turn in has_rope[:n_layers]]
    table = common.llama(c, where) | common.windows(c, c["layer_types"] or kinds, where)
    pattern = [bool(turn) for turn in has_rope[:n_layers]]
    return table if all(pattern) else {**table, "rope_pattern": pattern}


def _write_smollm3(model: ModelConfig) -> Table:
    has_rope, n_layers = model.rope_pattern or (True,), model.n_layers
    return {
        **common.llama_keys(model),
        **common.bias_keys(model),
        **common.window_keys(model),
        "use_sliding_window": any(model.windows),
        "layer_types": common.layer_kinds(model),
        "no_rope_layers": [int(has_rope[i % len(has_rope)]) for i in range(n_layers)],
    }


SMOLLM3_FAMILY = Family(
    "smollm3",
    name_map("hf-smollm3", "SmolLM3ForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, **BIASES, "num_key_value_heads": 4, "tie_word_embeddings": True,
     "rope_theta": 2e6, "use_sliding_window": False, "sliding_window": None,
     "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None},
    summary="SmolLM3: layers without rotary positions, windows by layer",
    read=_read_smollm3,
    write=_write_smollm3,
    ranges={"no_rope_layers": list_of(lambda value: value in (0, 1))},
    unused=("max_window_layers", "pretraining_tp"),
    is_usual=True,
)  # fmt: skip


# Mixtral (arXiv:2401.04088).

_SIZES = ("num_local_experts", "intermediate_size")


def _read_mixtral(c: Config, where: str) -> Table:
    table = llama(c, where) | uniform_window(c, where)
    # Mixtral divides by the sum of the chosen weights and has no key for it.
    return table | experts.softmax({**c, "norm_topk_prob": True}, *_SIZES)


def _write_mixtral(model: ModelConfig) -> Table:
    keys = {**llama_keys(model), **window_keys(model), **experts.softmax_keys(model, *_SIZES)}
    return {key: value for key, value in keys.items() if key != "norm_topk_prob"}


MIXTRAL_FAMILY = Family(
    "mixtral",
    name_map(
        "hf-mixtral", "MixtralForCausalLM", *OUTSIDE, *PRE_NORMS, *ATTENTION,
        *experts.BLOCK_SPARSE,
    ),
    {**COMMON, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
     "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    summary="Mixtral: experts in every layer, as wide as the file's feed-forward; a window",
    read=_read_mixtral,
    write=_write_mixtral,
    unused=("max_window_layers", "use_sliding_window", "router_jitter_noise", *experts.LOSSES),
    is_usual=True,
)  # fmt: skip


# Arcee's AFM.

_MLP, _MLP_BIASES = GATED[1:], GATED_BIASES[1:]
_RULES = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *ATTENTION_BIASES, *_MLP, *_MLP_BIASES)


def _read_arcee(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.biases(c)
    return table | common.feed_forward(c, where, gated=False)


ARCEE_FAMILY = Family(
    "arcee",
    name_map("hf-arcee", "ArceeForCausalLM", *_RULES),
    {**COMMON, **BIASES, "rms_norm_eps": 1e-5, "hidden_act": "relu2"},
    summary="Arcee's AFM: two matrices; KempnerForge's RMSNorm with GELU or ReLU; squared ReLU",
    read=_read_arcee,
    write=lambda model: {**common.llama_keys(model), **common.bias_keys(model)},
    requires_head_divisor=True,
)


# Seed-OSS.


def _read_seed_oss(c: Config, where: str) -> Table:
    biases = {"qkv_bias": c["attention_bias"], "o_bias": c["attention_out_bias"],
              "mlp_bias": c["mlp_bias"]}  # fmt: skip
    return common.llama({**c, "attention_bias": False, "mlp_bias": False}, where) | biases


SEED_OSS_FAMILY = Family(
    "seed_oss",
    name_map("hf-seed-oss", "SeedOssForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
     "attention_out_bias": False, "mlp_bias": False},
    summary="Seed-OSS: biases of q, k and v; heads wider than the model",
    read=_read_seed_oss,
    write=lambda model: {
        **llama_keys(model), "attention_bias": model.qkv_bias,
        "attention_out_bias": model.o_bias, "mlp_bias": model.mlp_bias,
    },
    unused=("pretraining_tp",),
)  # fmt: skip
