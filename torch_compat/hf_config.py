"""Hugging Face's `config.json` and our `[model]`, both ways."""

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat import limits
from torch_compat.limits import is_name
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
_ALL = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        "initializer_range": 0.02}  # fmt: skip
_QWEN = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": _ALL,
    "mistral": {**_ALL, "num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {**_ALL, **_QWEN, "num_key_value_heads": 32},
    "qwen3": {**_ALL, **_QWEN, "num_key_value_heads": 32, "head_dim": 128},
    "mixtral": {**_ALL, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
                "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {**_ALL, **_QWEN, "num_key_value_heads": 4, "max_window_layers": 0,
                  "num_experts": 128, "num_experts_per_tok": 8},
}  # fmt: skip
"""What transformers takes for keys that are absent; None, where it is written, means otherwise."""
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_seq_len": "original_max_position_embeddings",
}
_WINDOWED = ("mistral", "mixtral")  # every layer of theirs sees a window, or none does
_FULL, _SLIDING = "full_attention", "sliding_attention"
_MOE = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}


def model_table(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The `[model]` table of a `config.json`.

    Raises:
        UserError: the model is of another kind than ours, or keys are missing.
    """
    config, family = _complete(config, where)
    _check_supported(config, family, where)
    heads, norm_eps = config["num_attention_heads"], config["rms_norm_eps"]
    table = {ours: config[theirs] for ours, theirs in _PLAIN.items()} | {
        "n_kv_heads": config.get("num_key_value_heads") or heads,
        "norm_eps": norm_eps,
        "tie_embeddings": bool(config["tie_word_embeddings"]),
        "init_std": config["initializer_range"],
        **_rotary(config, where),
    }
    head = config.get("head_dim")
    if head is not None and head * heads != config["hidden_size"]:
        table["head_dim"] = head
    if family == "qwen2":
        table["qkv_bias"] = True
    if family in ("qwen3", "qwen3_moe"):
        table |= {"qk_norm": True, "qk_norm_eps": norm_eps}
    if family in _MOE:
        table |= {"num_experts": config[_MOE[family]], "moe_top_k": config["num_experts_per_tok"]}
    return table | _windows(config, family, where)


def _windows(config: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    """The keys of `[model]` that say which layers see a window of tokens alone."""
    n_layers, window = config["num_hidden_layers"], config.get("sliding_window")
    if family == "llama" or window is None or window >= config["max_position_embeddings"]:
        return {}  # Llama does not look at the key, and a window of everything is none
    kinds = [_SLIDING] * n_layers
    if family.startswith("qwen"):
        full = [_FULL] * min(config["max_window_layers"], n_layers)
        kinds = config.get("layer_types") or full + kinds[len(full) :]
        if not config["use_sliding_window"]:
            kinds = [_FULL] * n_layers
    if len(kinds) != n_layers or not set(kinds) <= {_FULL, _SLIDING}:
        raise UserError(
            f"{where}: layer_types has {len(kinds)} layers of {', '.join(sorted(set(kinds)))}; "
            f"here are {n_layers}, of {_FULL} and {_SLIDING}"
        )
    if _SLIDING not in kinds:
        return {}
    pattern = [] if _FULL not in kinds else [kind.removesuffix("_attention") for kind in kinds]
    return {"sliding_window": window, "attention_pattern": pattern}


def family_of(model: ModelConfig, dialect: str | None = None) -> str:
    """The family that an export becomes, a key of `FAMILIES`.

    Args:
        model: what is exported.
        dialect: the name of one that has what the model has; None takes the first.

    Raises:
        UserError: none has what the model has, or the one that is asked for has not.
    """
    families = _families(model)
    if dialect is None:
        return families[0]
    names = [FAMILIES[family].name for family in families]
    if dialect not in names:
        raise UserError(f"this model can be exported to hf as {' or '.join(names)}, not {dialect}")
    return families[names.index(dialect)]


def _families(model: ModelConfig) -> list[str]:
    windowed = any(model.windows)
    if not all(model.rope_pattern) or (windowed and model.local_rope_theta is not None):
        raise UserError(
            "Hugging Face's families here have the same rotary positions in all layers; this model "
            "has model.rope_pattern or model.local_rope_theta"
        )
    return _with_windows(model, _without_windows(model)) if windowed else _without_windows(model)


def _with_windows(model: ModelConfig, families: list[str]) -> list[str]:
    """Those of them that can see a window in the layers that do."""
    everywhere = all(model.windows)
    able = [f for f in families if f.startswith("qwen") or (everywhere and f in _WINDOWED)]
    if not able:
        raise UserError(
            f"no family with these parameters has model.attention_pattern = "
            f"{list(model.attention_pattern)}: {' and '.join(families)} see everything in every "
            "layer" + (", or a window in every layer" if set(families) & set(_WINDOWED) else "")
        )
    return able


def _without_windows(model: ModelConfig) -> list[str]:
    if model.norm_type != "rmsnorm" or model.activation != "silu":
        raise UserError(
            "Hugging Face's families here have RMSNorm and SwiGLU; this model has model.norm_type "
            f"= {model.norm_type!r} and model.activation = {model.activation!r}"
        )
    if model.is_moe:
        if model.moe_router != "softmax_topk":
            raise UserError(
                f"no family chooses experts as model.moe_router = {model.moe_router!r} does, so "
                "the export would be another model; export to dcp instead"
            )
        return ["qwen3_moe" if model.qk_norm else "mixtral"]
    if model.qk_norm and model.qkv_bias:
        raise UserError(
            "no family has both q/k norms (model.qk_norm) and q/k/v biases (model.qkv_bias)"
        )
    if model.qk_norm:
        if model.qk_norm_eps != model.norm_eps:
            raise UserError(
                f"Qwen3 has one epsilon for all norms; this model has norm_eps = {model.norm_eps} "
                f"and qk_norm_eps = {model.qk_norm_eps}"
            )
        return ["qwen3"]
    if model.qkv_bias:
        return ["qwen2"]
    # transformers' Llama wants heads that divide the width, whatever head_dim says.
    return ["mistral"] if model.dim % model.n_heads else ["llama", "mistral"]


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
    kinds = [_FULL if window is None else _SLIDING for window in model.windows]
    is_windowed = _SLIDING in kinds
    # Not a key of the families that see the same in all layers.
    layer_types = {"layer_types": kinds} if is_windowed and family.startswith("qwen") else {}
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
        "sliding_window": model.sliding_window if is_windowed else None,
        "use_sliding_window": is_windowed,
        "max_window_layers": kinds.index(_SLIDING) if is_windowed else model.n_layers,
        **layer_types,
        "initializer_range": model.init_std,
        "bos_token_id": None,
        "eos_token_id": eos_id,
        "use_cache": True,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def _complete(config: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """A config with what transformers takes for absent keys, and its family."""
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        raise UserError(
            f"{where}: model_type {reprlib.repr(family)} is not one of {', '.join(FAMILIES)}"
        )
    missing = [theirs for theirs in _PLAIN.values() if type(config.get(theirs)) is not int]
    if missing:
        raise UserError(f"{where}: it does not give {', '.join(missing)}, or not as whole numbers")
    config = {**_DEFAULTS[family], **config}
    for key, check in _RANGES.items():
        if config.get(key) is not None and not check(config[key]):
            raise UserError(f"{where}: {key} = {reprlib.repr(config[key])} is of no model")
    return config, family


def _whole(most: int, least: int = 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _is_size(value: Any) -> bool:  # noqa: ANN401 (whatever the file held)
    """A number above zero that a float32 still holds."""
    return type(value) in (int, float) and 1e-30 < value < 1e30


def _is_flag(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, bool)


def _is_table(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, dict) and all(map(is_name, value))


def _are_kinds(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, list) and all(map(is_name, value))


_RANGES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(_PLAIN.values(), _whole(limits.WIDTH)),
    **dict.fromkeys(("num_key_value_heads", "head_dim", "sliding_window"), _whole(limits.WIDTH)),
    "num_hidden_layers": _whole(limits.LAYERS),
    "max_window_layers": _whole(limits.LAYERS, 0),
    **dict.fromkeys(("num_local_experts", "num_experts"), _whole(limits.LAYERS)),
    "num_experts_per_tok": _whole(limits.LAYERS),
    **dict.fromkeys(("rms_norm_eps", "rope_theta", "initializer_range"), _is_size),
    **dict.fromkeys(("tie_word_embeddings", "use_sliding_window", "attention_bias"), _is_flag),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), _is_table),
    "layer_types": _are_kinds,
}
"""Key -> whether a value of it can be a model's: the product of a few would take all memory."""


def _rotary(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    # transformers 4 has `rope_theta` and `rope_scaling`, 5 has both in `rope_parameters`.
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rotary = config.get(key) or {}
    if any(isinstance(value, dict) for value in rotary.values()):
        raise UserError(
            f"{where}: {key} = {reprlib.repr(rotary)}: here all layers have the same positions"
        )
    if wrong := [k for k in ("rope_theta", *_SCALING.values()) if not _is_size(rotary.get(k, 1))]:
        raise UserError(f"{where}: {key} has {wrong[0]} = {reprlib.repr(rotary[wrong[0]])}")
    theta = rotary.get("rope_theta", config["rope_theta"])
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind == "default":
        return {"rope_theta": theta}
    if kind != "llama3":
        raise UserError(
            f"{where}: {key}: rotary positions of type {reprlib.repr(kind)}; here are default and "
            "llama3"
        )
    original = _SCALING["original_max_seq_len"]
    rotary = {original: config["max_position_embeddings"], **rotary}
    if original in config:
        rotary[original] = config[original]
    if missing := [theirs for theirs in _SCALING.values() if theirs not in rotary]:
        raise UserError(f"{where}: {key} does not give {', '.join(missing)}")
    scaling = {ours: rotary[theirs] for ours, theirs in _SCALING.items()}
    return {"rope_theta": theta, "rope_scaling": scaling}


def _check_supported(config: Mapping[str, Any], family: str, where: str) -> None:
    problems = [
        f"{key} = {reprlib.repr(config[key])}"
        for key, only in (("hidden_act", "silu"), ("mlp_bias", False), ("partial_rotary_factor", 1))
        if config.get(key) not in (None, only)
    ]
    if config.get("attention_bias") and family != "qwen2":
        problems.append("attention_bias = True (a bias on o_proj too)")
    if config.get("quantization_config"):
        problems.append("quantization_config: the weights are quantized")
    if problems:
        raise UserError(f"{where}: jaxforge's model has no counterpart of {'; '.join(problems)}")
