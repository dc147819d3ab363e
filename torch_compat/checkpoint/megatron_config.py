"""Conversion between `[model]` and the settings of a Megatron-Core model.

Settings have the names of `TransformerConfig` and of Megatron-Bridge's `GPTModelProvider`, as in
the section `model` of `run_config.yaml`. `megatron_files` translates Megatron-LM's arguments.
"""

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxforge.config.mixers import LATENT_ATTENTION, MAMBA2
from jaxforge.config.model import ModelConfig, every_nth
from jaxforge.errors import UserError
from torch_compat.checkpoint.network_settings import network_settings, same
from torch_compat.families.state_space import HYBRID_LAYERS, hybrid_patterns
from torch_compat.families.values import is_size
from torch_compat.formats import limits

SQUARED_RELU = "squared_relu"

Settings = Mapping[str, Any]
Table = dict[str, Any]

_DEFAULTS: Settings = {
    "num_query_groups": None, "kv_channels": None, "ffn_hidden_size": None,
    "normalization": "LayerNorm", "layernorm_epsilon": 1e-5,
    "layernorm_zero_centered_gamma": False, "add_bias_linear": True, "add_qkv_bias": False,
    "gated_linear_unit": False, "activation_func": "gelu", "bias_activation_fusion": False,
    "share_embeddings_and_output_weights": True, "position_embedding_type": "learned_absolute",
    "rotary_base": 10000, "rotary_percent": 1.0, "seq_len_interpolation_factor": None,
    "no_rope_freq": None, "qk_layernorm": False, "softmax_scale": None, "window_size": None,
    "window_attn_skip_freq": None, "init_method_std": 0.02, "num_moe_experts": None,
    "moe_layer_freq": 1, "moe_router_topk": 2, "moe_ffn_hidden_size": None,
    "moe_router_score_function": "softmax", "moe_router_pre_softmax": False,
    "moe_router_topk_scaling_factor": None, "moe_router_num_groups": None,
    "moe_router_group_topk": None, "moe_router_enable_expert_bias": False,
    "moe_router_bias_update_rate": 1e-3, "moe_shared_expert_intermediate_size": None,
    "moe_shared_expert_gate": False, "moe_latent_size": None, "mtp_num_layers": None,
    "multi_latent_attention": False,
    "kv_lora_rank": 512, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128,
    "rope_type": "yarn", "rotary_scaling_factor": 40.0, "original_max_position_embeddings": 4096,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0,
    "hybrid_override_pattern": None, "mamba_state_dim": 128, "mamba_head_dim": 64,
    "mamba_num_groups": 8, "mamba_num_heads": None,
}  # fmt: skip
"""Defaults of Megatron-Core and Megatron-Bridge."""
_SUPPORTED: Settings = {
    "rotary_interleaved": False, "qk_l2_norm": False,
    "apply_residual_connection_post_layernorm": False, "heterogeneous_block_specs": False,
    "attention_output_gate": False, "glu_linear_offset": 0.0, "activation_func_clamp_value": None,
    "softmax_type": "vanilla", "moe_apply_probs_on_input": False,
    "mtp_use_repeated_layer": False, "experimental_attention_variant": None,
    "linear_attention_freq": None, "moe_mlp_glu_interleave_size": None, "mrope_section": None,
}  # fmt: skip
"""Settings of which jaxforge supports one value only."""
_REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
_SIZES = (*_REQUIRED, "num_query_groups", "kv_channels", "ffn_hidden_size", "moe_ffn_hidden_size",
          "num_moe_experts", "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
          "moe_shared_expert_intermediate_size", "moe_latent_size", "mtp_num_layers",
          "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim",
          "original_max_position_embeddings", "mamba_state_dim", "mamba_head_dim",
          "mamba_num_groups", "mamba_num_heads", "vocab_size", "padded_vocab_size",
          "max_position_embeddings", "seq_length")  # fmt: skip
_NUMBERS = ("layernorm_epsilon", "rotary_base", "rotary_percent", "softmax_scale",
            "seq_len_interpolation_factor", "moe_router_topk_scaling_factor", "scale_factor",
            "low_freq_factor", "high_freq_factor", "old_context_len", "rotary_scaling_factor",
            "beta_fast", "beta_slow", "mscale", "mscale_all_dim")  # fmt: skip
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "relu": "relu", SQUARED_RELU: "relu2"}
_STATE_SPACE_EPSILON = 1e-5  # of the norms in Mamba-2, whatever `layernorm_epsilon` is
_ACTIVATION_NAMES = {"gelu_tanh": "gelu", "relu2": SQUARED_RELU}
_OTHER_MODELS = ("gemma", "gpt_oss", "_vl", "t5", "deepseek_v4")
"""Parts of names of providers whose models differ from the GPT model in more than settings."""


def model_table(stored: Settings, where: str) -> Table:
    """Return the `[model]` table of a Megatron-Core model.

    Args:
        stored: settings of the model.
        where: file of the settings, for messages.

    Raises:
        UserError: settings are missing, impossible or not supported.
    """
    _check(stored, where)
    s = {**_DEFAULTS, **{key: value for key, value in stored.items() if value is not None}}
    heads, dim = s["num_attention_heads"], s["hidden_size"]
    table: Table = {
        "dim": dim,
        "n_layers": s["num_layers"],
        "n_heads": heads,
        "n_kv_heads": s["num_query_groups"] or heads,
        "ffn_hidden_dim": s["ffn_hidden_size"] or 4 * dim,
        "vocab_size": s.get("vocab_size") or s.get("padded_vocab_size"),
        "max_seq_len": s.get("max_position_embeddings") or s.get("seq_length") or 2048,
        "norm_eps": s["layernorm_epsilon"],
        "tie_embeddings": s["share_embeddings_and_output_weights"],
        "init_std": s["init_method_std"],
    }
    if table["vocab_size"] is None:
        raise UserError(f"{where}: vocab_size or padded_vocab_size is missing")
    # Megatron writes kv_channels also if it is the default, dim / heads.
    if s["kv_channels"] and s["kv_channels"] * heads != dim:
        table["head_dim"] = s["kv_channels"]
    if s["softmax_scale"] is not None:
        table["attention_scale"] = s["softmax_scale"]
    table |= _norms(s, where) | _feed_forward(s, where) | _positions(s, where) | _windows(s, where)
    letters = _letters(s, where)
    if s["num_moe_experts"] and (not letters or "E" in letters):
        table |= _experts(s, where)
    if s["multi_latent_attention"]:
        # Keys of all heads come from one latent, and norms are those of latents.
        spare = ("n_kv_heads", "head_dim", "qk_norm", "qk_norm_eps")
        table = {key: x for key, x in table.items() if key not in spare}
        table |= _latent_attention(s, where)
    if letters:
        table |= _hybrid(letters, s, where)
    return table | ({"mtp_depth": s["mtp_num_layers"]} if s["mtp_num_layers"] else {})


def _latent_attention(s: Settings, where: str) -> Table:
    """Return the keys of multi-head latent attention."""
    if not s["qk_layernorm"]:  # latents without norms
        raise _unsupported("qk_layernorm", s, where)
    sizes = {"q_rank": s.get("q_lora_rank"), "kv_rank": s["kv_lora_rank"],
             "nope_head_dim": s["qk_head_dim"], "rope_head_dim": s["qk_pos_emb_head_dim"],
             "value_head_dim": s["v_head_dim"], "norm_eps": s["layernorm_epsilon"]}  # fmt: skip
    table: Table = {"mixer_pattern": [LATENT_ATTENTION], "latent_attention": sizes}
    if s["rope_type"] == "rope" and not s["mscale_all_dim"]:
        return table
    if s["rope_type"] != "yarn":
        raise _unsupported("rope_type", s, where)
    scaling: Table = {
        "rope_type": "yarn", "factor": s["rotary_scaling_factor"], "beta_fast": s["beta_fast"],
        "beta_slow": s["beta_slow"], "original_max_seq_len": s["original_max_position_embeddings"],
    }  # fmt: skip
    if s["mscale_all_dim"]:
        scaling |= {"mscale": s["mscale"], "mscale_all_dim": s["mscale_all_dim"]}
    else:
        factor = 1 + 0.1 * s["mscale"] * math.log(max(1.0, s["rotary_scaling_factor"]))
        scaling["attention_factor"] = factor
    return {**table, "rope_scaling": scaling}


def _letters(s: Settings, where: str) -> str:
    """Return a letter for each layer of a hybrid model; "" for other models."""
    letters, layers = s["hybrid_override_pattern"], s["num_layers"]
    if letters is None and not s.get("is_hybrid_model"):
        return ""
    if not isinstance(letters, str) or set(letters) - HYBRID_LAYERS.keys():
        raise _unsupported("hybrid_override_pattern", s, where)
    if len(letters) != layers:
        raise UserError(
            f"{where}: num_layers = {layers}, but hybrid_override_pattern has {len(letters)} "
            "letters. Correct it"
        )
    return letters


def _hybrid(letters: str, s: Settings, where: str) -> Table:
    """Return the keys of layers of one part each, most of them of Mamba-2."""
    if s["layernorm_epsilon"] != _STATE_SPACE_EPSILON:
        raise _unsupported("layernorm_epsilon", s, where)
    width = s["mamba_head_dim"]
    sizes = {"heads": s["mamba_num_heads"] or 2 * s["hidden_size"] // width, "head_dim": width,
             "state_size": s["mamba_state_dim"], "groups": s["mamba_num_groups"]}  # fmt: skip
    return {**hybrid_patterns(letters), MAMBA2: sizes}


def _check(stored: Settings, where: str) -> None:
    """Check that settings are possible and supported.

    Raises:
        UserError: a setting is missing, impossible or not supported.
    """
    target = str(stored.get("_target_", "")).lower()
    if name := next((part for part in _OTHER_MODELS if part in target), None):
        raise UserError(
            f"{where}: {target} differs from Megatron-Core's GPT model in more than settings "
            f"({name}), which is not supported. Export it to Hugging Face with Megatron, and "
            "import that"
        )
    if missing := [key for key in _REQUIRED if stored.get(key) is None]:
        raise UserError(f"{where}: {', '.join(missing)} is missing")
    for key in (*_SIZES, *_NUMBERS):
        value = stored.get(key)
        is_fine = type(value) is int and 1 <= value <= limits.WIDTH
        is_fine |= key == "mscale_all_dim" and value == 0  # its default
        if value is not None and not (is_fine or (key in _NUMBERS and is_size(value))):
            raise UserError(f"{where}: {key} = {reprlib.repr(value)} is impossible")
    limits.check_layers(stored["num_layers"], stored.get("num_moe_experts"), where)
    for key, only in _SUPPORTED.items():
        if stored.get(key) not in (None, only, False):
            raise _unsupported(key, stored, where)


def _unsupported(key: str, settings: Settings, where: str) -> UserError:
    value = reprlib.repr(settings[key])
    return UserError(f"{where}: jaxforge's model has no counterpart of {key} = {value}")


def _norms(s: Settings, where: str) -> Table:
    kinds = {"RMSNorm": "rmsnorm", "LayerNorm": "layernorm"}
    kind = kinds.get(s["normalization"]) if isinstance(s["normalization"], str) else None
    if kind is None:
        raise _unsupported("normalization", s, where)
    table: Table = {"norm_type": kind}
    if s["layernorm_zero_centered_gamma"]:
        if kind != "rmsnorm":
            raise _unsupported("layernorm_zero_centered_gamma", s, where)
        table["norm_unit_offset"] = True
    if s["qk_layernorm"]:
        if kind != "rmsnorm":  # norms of queries and keys are LayerNorms, too
            raise _unsupported("qk_layernorm", s, where)
        table |= {"qk_norm": True, "qk_norm_eps": s["layernorm_epsilon"]}
    return table


def _feed_forward(s: Settings, where: str) -> Table:
    name = str(s["activation_func"]).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise _unsupported("activation_func", s, where)
    activation = _ACTIVATIONS[name]
    if activation == "gelu" and s["bias_activation_fusion"]:
        activation = "gelu_tanh"  # fused kernels use the tanh approximation
    gated = bool(s["gated_linear_unit"])
    table: Table = {"activation": activation}
    if gated != (activation == "silu"):
        table["gated_mlp"] = gated
    if s["add_bias_linear"]:
        if s["num_moe_experts"]:
            raise _unsupported("add_bias_linear", s, where)
        table |= {"mlp_bias": True, "o_bias": True}
    return table | ({"qkv_bias": True} if s["add_bias_linear"] or s["add_qkv_bias"] else {})


def _positions(s: Settings, where: str) -> Table:
    kind = s["position_embedding_type"]
    if kind == "none":
        return {"rope_pattern": [False]}
    if kind == "learned_absolute":
        return {"position_embedding": "learned"}
    if kind != "rope":
        raise _unsupported("position_embedding_type", s, where)
    table: Table = {"rope_theta": float(s["rotary_base"])}
    if s["rotary_percent"] != 1:
        table["partial_rotary_factor"] = float(s["rotary_percent"])
    llama3 = s.get("scale_factor")
    if llama3 and s["seq_len_interpolation_factor"]:
        raise _unsupported("seq_len_interpolation_factor", s, where)
    if llama3:
        table["rope_scaling"] = {
            "rope_type": "llama3", "factor": float(llama3),
            "low_freq_factor": float(s.get("low_freq_factor") or 1.0),
            "high_freq_factor": float(s.get("high_freq_factor") or 4.0),
            "original_max_seq_len": s.get("old_context_len") or 8192,
        }  # fmt: skip
    elif s["seq_len_interpolation_factor"]:
        factor = float(s["seq_len_interpolation_factor"])
        table["rope_scaling"] = {"rope_type": "linear", "factor": factor}
    if s["no_rope_freq"]:
        table["rope_pattern"] = [not skips for skips in _no_rope(s, where)]
    return table


def _no_rope(s: Settings, where: str) -> list[bool]:
    """Return for each layer whether it has no rotary positions."""
    return _in_layers("no_rope_freq", s, where, lambda layer, every: (layer + 1) % every == 0)


def _in_layers(key: str, s: Settings, where: str, is_in: Callable[[int, int], bool]) -> list[bool]:
    """Return a setting of every n-th layer, or of a list of 0 and 1, for each layer."""
    value, layers = s[key], s["num_layers"]
    if type(value) is int and value > 0:
        return [is_in(layer, value) for layer in range(layers)]
    if isinstance(value, list | tuple) and len(value) == layers and set(value) <= {0, 1}:
        return [bool(each) for each in value]
    raise _unsupported(key, s, where)


def _windows(s: Settings, where: str) -> Table:
    """Return the keys of windows; Megatron-Core's width excludes the current token."""
    window = s["window_size"]
    if not window:
        return {}
    # (left, right). Causal attention sees nothing on the right, be it 0 or unlimited (-1).
    is_pair = isinstance(window, list | tuple) and len(window) == 2
    if not is_pair or type(window[0]) is not int or window[0] < 0 or window[1] not in (0, -1):
        raise _unsupported("window_size", s, where)
    table: Table = {"sliding_window": window[0] + 1}
    if s["window_attn_skip_freq"] is not None:
        sees = _in_layers(
            "window_attn_skip_freq", s, where, lambda layer, every: (layer + 1) % every != 0
        )
        table["attention_pattern"] = ["sliding" if each else "full" for each in sees]
    return table


def _experts(s: Settings, where: str) -> Table:
    """Return the keys of experts.

    Settings of training, such as load-balancing losses and capacities, are not imported.
    """
    chosen, score = s["moe_router_topk"], s["moe_router_score_function"]
    if score not in ("softmax", "sigmoid"):
        raise _unsupported("moe_router_score_function", s, where)
    has_bias = bool(s["moe_router_enable_expert_bias"])
    if has_bias and score != "sigmoid":
        raise _unsupported("moe_router_enable_expert_bias", s, where)
    # Softmax over the chosen experts alone is the share of each in the sum of all softmax scores.
    # Sigmoid scores are divided by their sum where there are several.
    normalized = not s["moe_router_pre_softmax"] if score == "softmax" else chosen > 1
    has_experts = _in_layers("moe_layer_freq", s, where, lambda layer, n: layer % n == 0)
    table: Table = {
        "num_experts": s["num_moe_experts"],
        "moe_top_k": chosen,
        "moe_expert_dim": s["moe_ffn_hidden_size"] or s["ffn_hidden_size"] or 4 * s["hidden_size"],
        "moe_router": "softmax_topk" if score == "softmax" else "sigmoid_topk",
        "moe_bias_update": "sign" if has_bias else "none",
        "moe_norm_topk": normalized,
        # The layers of a hybrid model follow from its pattern.
        **({} if s["hybrid_override_pattern"] else _layers_with(has_experts, s, where)),
    }
    if has_bias:
        table["moe_bias_update_rate"] = s["moe_router_bias_update_rate"]
    if s["moe_router_topk_scaling_factor"]:
        table["moe_routed_scaling"] = float(s["moe_router_topk_scaling_factor"])
    if s["moe_router_group_topk"]:
        if chosen // s["moe_router_group_topk"] != 2:  # a group is judged by two experts here
            raise _unsupported("moe_router_group_topk", s, where)
        table |= {"moe_groups": s["moe_router_num_groups"],
                  "moe_top_k_groups": s["moe_router_group_topk"]}  # fmt: skip
    if s["moe_latent_size"]:
        table["moe_latent_dim"] = s["moe_latent_size"]
    if width := s["moe_shared_expert_intermediate_size"]:
        table |= {"moe_shared_experts": 1, "moe_shared_expert_dim": width,
                  "moe_shared_expert_gate": bool(s["moe_shared_expert_gate"])}  # fmt: skip
    return table


def _layers_with(has_experts: Sequence[bool], s: Settings, where: str) -> Table:
    """Return the keys of the first layer with experts and of their period from there on."""
    chosen = [i for i, has in enumerate(has_experts) if has]
    if chosen:
        first = chosen[0]
        # With a single such layer, any period fits that reaches it first.
        every = chosen[1] - first if len(chosen) > 1 else first + 1
        if chosen == [i for i in range(first, len(has_experts)) if (i + 1) % every == 0]:
            return {"feed_forward_pattern": every_nth(every), "moe_first_dense_layers": first}
    raise _unsupported("moe_layer_freq", s, where)


def settings(model: ModelConfig) -> Table:
    """Return the settings of the Megatron-Core model that computes the same function.

    Raises:
        UserError: Megatron-Core has no such model; the message lists the differences.
    """
    written = dict(_written(model))
    # Reading the settings again detects what they omit, without a list of features.
    again = ModelConfig(**model_table(written, "Megatron-Core"))
    wanted_settings, written_settings = network_settings(model), network_settings(again)
    if lacks := [
        f"{key} = {wanted_settings[key]!r}"
        for key in wanted_settings
        if not same(wanted_settings[key], written_settings[key])
    ]:
        raise UserError(f"Megatron-Core's GPT model has no {', '.join(lacks)}. Export to dcp or hf")
    return written


def _written(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    """Yield settings; keys without a counterpart are omitted, which `settings` detects."""
    biased = model.mlp_bias and model.o_bias
    scaling = model.rope_scaling
    yield from {
        "num_layers": model.n_layers, "hidden_size": model.dim,
        "num_attention_heads": model.n_heads, "num_query_groups": model.kv_heads,
        "kv_channels": model.head_size, "ffn_hidden_size": model.ffn_dim,
        "vocab_size": model.vocab_size, "seq_length": model.max_seq_len,
        "max_position_embeddings": model.max_seq_len,
        "normalization": "RMSNorm" if model.norm_type == "rmsnorm" else "LayerNorm",
        "layernorm_epsilon": model.norm_eps,
        "layernorm_zero_centered_gamma": model.norm_unit_offset,
        "add_bias_linear": biased, "add_qkv_bias": model.qkv_bias and not biased,
        "gated_linear_unit": model.is_gated,
        "activation_func": _ACTIVATION_NAMES.get(model.activation, model.activation),
        "bias_activation_fusion": model.activation != "gelu",
        "share_embeddings_and_output_weights": model.tie_embeddings,
        "qk_layernorm": model.qk_norm, "softmax_scale": model.attention_scale,
        "init_method_std": model.init_std,
    }.items()  # fmt: skip
    if model.position_embedding == "learned":
        yield "position_embedding_type", "learned_absolute"
    else:
        yield from (("position_embedding_type", "rope"), ("rotary_base", model.rope_theta),
                    ("rotary_percent", model.partial_rotary_factor))  # fmt: skip
        if not all(model.ropes):
            yield "no_rope_freq", [int(rope is None) for rope in model.ropes]
    if scaling and scaling.rope_type == "llama3":
        yield from {
            "scale_factor": scaling.factor, "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "old_context_len": scaling.original_max_seq_len,
        }.items()  # fmt: skip
    elif scaling and scaling.rope_type == "linear":
        yield "seq_len_interpolation_factor", scaling.factor
    if any(model.windows):
        # Megatron-Core's width excludes the current token.
        yield "window_size", [max(w or 0 for w in model.windows) - 1, 0]
        if not all(model.windows):
            yield "window_attn_skip_freq", [int(window is not None) for window in model.windows]
    if model.is_moe:
        yield from _written_experts(model)
    if model.mtp_depth:
        yield "mtp_num_layers", model.mtp_depth


def _written_experts(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    is_softmax = model.moe_router == "softmax_topk"
    yield from {
        "num_moe_experts": model.num_experts, "moe_router_topk": model.moe_top_k,
        "moe_ffn_hidden_size": model.expert_dim,
        "moe_router_score_function": "softmax" if is_softmax else "sigmoid",
        # Otherwise the softmax is over the chosen experts alone, whose weights then add up to 1.
        "moe_router_pre_softmax": is_softmax and not model.moe_norm_topk,
        "moe_router_topk_scaling_factor": model.moe_routed_scaling,
        "moe_router_enable_expert_bias": model.bias_update == "sign",
        "moe_latent_size": model.moe_latent_dim,
    }.items()  # fmt: skip
    if not all(model.has_experts):
        yield "moe_layer_freq", [int(has) for has in model.has_experts]
    if model.moe_groups > model.moe_top_k_groups:
        yield from (("moe_router_num_groups", model.moe_groups),
                    ("moe_router_group_topk", model.moe_top_k_groups))  # fmt: skip
    if model.shared_expert_dim:
        yield from (("moe_shared_expert_intermediate_size", model.shared_expert_dim),
                    ("moe_shared_expert_gate", model.moe_shared_expert_gate))  # fmt: skip
