"""Hugging Face's `config.json` and our `[model]`, both ways."""

from collections.abc import Mapping
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.names.huggingface import FAMILIES

CONFIG = "config.json"

_PLAIN = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "ffn_hidden_dim": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
}
"""Our key -> theirs, where both mean the same and neither has a default worth taking."""
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_MOE = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}


def model_table(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `[model]` table of a `config.json`.

    Raises:
        UserError: the model is of another kind than ours, or keys are missing.
    """
    family = config.get("model_type")
    if family not in FAMILIES:
        raise UserError(f"{where}: model_type {family!r} is not one of {', '.join(FAMILIES)}")
    missing = [theirs for theirs in _PLAIN.values() if theirs not in config]
    if missing:
        raise UserError(f"{where}: it does not give {', '.join(missing)}")
    _check_supported(config, family, where)
    heads = config["num_attention_heads"]
    head = config.get("head_dim") or config["hidden_size"] // heads
    norm_eps = config.get("rms_norm_eps", 1e-6)
    table = {ours: config[theirs] for ours, theirs in _PLAIN.items()} | {
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "norm_eps": norm_eps,
        "tie_embeddings": bool(config.get("tie_word_embeddings", False)),
        **_rotary(config, where),
    }
    if head * heads != config["hidden_size"]:
        table["head_dim"] = head
    if family == "qwen2":
        table["qkv_bias"] = True
    if family in ("qwen3", "qwen3_moe"):
        table |= {"qk_norm": True, "qk_norm_eps": norm_eps}
    if family in _MOE:
        table |= {"num_experts": config[_MOE[family]], "moe_top_k": config["num_experts_per_tok"]}
    window = _window(config)
    if window is not None and window < table["max_seq_len"]:
        table["max_seq_len"] = window  # up to there, windowed and full attention are one
    return table


def family_of(model: ModelConfig) -> str:
    """The family that an export becomes.

    Raises:
        UserError: none has what the model has.
    """
    if model.norm_type != "rmsnorm" or model.activation != "silu":
        raise UserError(
            "Hugging Face's families here have RMSNorm and SwiGLU; this model has "
            f"{model.norm_type} and {model.activation}"
        )
    if model.is_moe:
        if model.moe_router != "softmax_topk":
            raise UserError(
                "no family chooses experts as KempnerForge's sigmoid router does, so the export "
                "would be another model; export to dcp instead"
            )
        return "qwen3_moe" if model.qk_norm else "mixtral"
    if model.qk_norm and model.qkv_bias:
        raise UserError("no family has both q/k norms and q/k/v biases")
    if model.qk_norm:
        if model.qk_norm_eps != model.norm_eps:
            raise UserError(
                f"Qwen3 has one epsilon for all norms; this model has norm_eps = {model.norm_eps} "
                f"and qk_norm_eps = {model.qk_norm_eps}"
            )
        return "qwen3"
    return "qwen2" if model.qkv_bias else "llama"


def config_json(config: JobConfig, family: str, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The `config.json` of an export.

    Args:
        config: the run's config.
        family: a key of `FAMILIES`.
        dtype: torch's name of the exported dtype.
        eos_id: id of the token that ends a document.
    """
    model = config.model
    rotary: dict[str, Any] = {"rope_type": "default"}
    if model.rope_scaling:
        scaling = model.rope_scaling
        rotary = {"rope_type": "llama3"} | {
            theirs: getattr(scaling, ours) for ours, theirs in _SCALING.items()
        }
    about = FAMILIES[family].about
    return {
        "architectures": [about],
        "model_type": family,
        **{theirs: getattr(model, ours) for ours, theirs in _PLAIN.items()},
        "intermediate_size": model.ffn_dim,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,  # transformers 4
        "rope_scaling": rotary if model.rope_scaling else None,
        "rope_parameters": {"rope_theta": model.rope_theta, **rotary},  # transformers 5
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _rotary(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rotary.get("rope_theta", config.get("rope_theta", 10000.0))
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise UserError(f"{where}: rotary positions of type {kind!r}; here are default and llama3")
    scaling = {ours: rotary[theirs] for ours, theirs in _SCALING.items()}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _check_supported(config: Mapping[str, Any], family: str, where: str) -> None:
    problems = [
        f"{key} = {config[key]!r}"
        for key, only in (("hidden_act", "silu"), ("mlp_bias", False))
        if config.get(key, only) != only
    ]
    if config.get("attention_bias") and family != "qwen2":
        problems.append("attention_bias = True (a bias on o_proj too)")
    if config.get("quantization_config"):
        problems.append("quantization_config: the weights are quantized")
    if problems:
        raise UserError(f"{where}: jaxforge's model has no counterpart of {'; '.join(problems)}")


def _window(config: Mapping[str, Any]) -> int | None:
    if config.get("use_sliding_window") is False:
        return None
    return config.get("sliding_window")
