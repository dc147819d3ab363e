"""Qwen 2 and 3, dense and with experts."""

from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION_BIASES,
    HF_NAME,
    LLAMA,
    NAME,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.names.table import Rule

# Qwen 2 and 2.5 (arXiv:2407.10671).

_WINDOW_DEFAULTS: dict[str, Any] = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
"""Keys of Qwen's windows and their defaults in transformers."""


def _windows(c: Config, where: str) -> Table:
    """Read windows from `layer_types`; by default layers from `max_window_layers` on have one."""
    n_layers = c["num_hidden_layers"]
    full = [FULL] * min(c["max_window_layers"], n_layers)
    return _optional_windows(c, full + [SLIDING] * (n_layers - len(full)), where)


def _optional_windows(c: Config, usual: list[str], where: str) -> Table:
    """Return the keys of `[model]` for windows that `use_sliding_window` turns on.

    Args:
        c: the config.
        usual: kind of each layer without `layer_types`.
        where: the file, for messages.

    Raises:
        UserError: `layer_types` has layers with a window, but `use_sliding_window` is false.
    """
    kinds, is_used = c.get("layer_types"), c["use_sliding_window"]
    if kinds and SLIDING in kinds and not is_used:
        raise UserError(
            f"{where}: layer_types has {SLIDING} and use_sliding_window is false, which "
            "transformers cannot run. Set use_sliding_window to true, or every layer to "
            f"{FULL}"
        )
    return common.windows(c, (kinds or usual) if is_used else [FULL] * len(usual), where)


def _window_keys(model: ModelConfig) -> Table:
    """Return the keys that `_windows` reads."""
    kinds = common.layer_kinds(model)
    if SLIDING not in kinds:
        return {"sliding_window": None, "use_sliding_window": False,
                "max_window_layers": model.n_layers}  # fmt: skip
    return {"sliding_window": model.sliding_window, "use_sliding_window": True,
            "max_window_layers": kinds.index(SLIDING), "layer_types": kinds}  # fmt: skip


BIASES = tuple(
    Rule(f"{NAME}attention.{m}_proj.bias", f"{HF_NAME}self_attn.{m}_proj.bias") for m in "qkv"
)


def _read_qwen2(c: Config, where: str) -> Table:
    config = {**c, "attention_bias": False}  # transformers ignores the key in this family
    return common.llama(config, where) | {"qkv_bias": True} | _windows(c, where)


QWEN2_FAMILY = Family(
    "qwen2",
    name_map("hf-qwen2", "Qwen2ForCausalLM", *LLAMA, *BIASES),
    {**COMMON, **_WINDOW_DEFAULTS, "num_key_value_heads": 32},
    summary="Qwen 2, 2.5: biases of q, k and v; windows by layer",
    read=_read_qwen2,
    write=lambda model: {**common.llama_keys(model), **_window_keys(model)},
    unused=("attention_bias",),
    is_usual=True,
)


# Qwen 3 (arXiv:2505.09388).


def _read_qwen3(c: Config, where: str) -> Table:
    norms = {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    return common.llama(c, where) | norms | _windows(c, where)


QWEN3_FAMILY = Family(
    "qwen3",
    name_map("hf-qwen3", "Qwen3ForCausalLM", *LLAMA, *QK_NORMS, *ATTENTION_BIASES),
    {**COMMON, **_WINDOW_DEFAULTS, "num_key_value_heads": 32, "head_dim": 128,
     "attention_bias": False},
    summary="Qwen 3: norms of q and k; windows by layer",
    read=_read_qwen3,
    write=lambda model: {
        **common.llama_keys(model), **_window_keys(model),
        "attention_bias": model.qkv_bias and model.o_bias,
    },
    is_usual=True,
)  # fmt: skip


# Qwen 1.5 and 2 with experts (arXiv:2407.10671).

_MOE_SIZES = ("num_experts", "moe_intermediate_size")
_WIDTH = "shared_expert_intermediate_size"
_GATE = Rule(f"{NAME}mlp.shared_expert_gate.weight", f"{HF_NAME}mlp.shared_expert_gate.weight")


def _windows_qwen2_moe(c: Config, where: str) -> Table:
    """Read windows from `layer_types`; the default is every second layer, up to a maximum."""
    layers = range(c["num_hidden_layers"])
    kinds = [FULL if i % 2 or i >= c["max_window_layers"] else SLIDING for i in layers]
    return _optional_windows(c, kinds, where)


def _read_qwen2_moe(c: Config, where: str) -> Table:
    table = common.llama(c, where) | {"qkv_bias": c["qkv_bias"]} | _windows_qwen2_moe(c, where)
    shared = {"moe_shared_experts": 1, "moe_shared_expert_dim": c[_WIDTH]}
    gate = {**shared, "moe_shared_expert_gate": True}
    return table | experts.softmax(c, *_MOE_SIZES) | experts.sparse(c, where) | gate


def _write_qwen2_moe(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **_window_keys(model),
        **experts.softmax_keys(model, *_MOE_SIZES),
        **experts.sparse_keys(model),
        _WIDTH: model.shared_expert_dim,
        "qkv_bias": model.qkv_bias,
    }


QWEN2_MOE_FAMILY = Family(
    "qwen2_moe",
    name_map(
        "hf-qwen2-moe", "Qwen2MoeForCausalLM", *LLAMA, *experts.EXPERTS,
        *experts.shared("shared_expert"), _GATE,
        *(rule._replace(optional=True) for rule in BIASES),
    ),
    {**COMMON, **_WINDOW_DEFAULTS, **experts.SOFTMAX, **experts.SPARSE, "num_key_value_heads": 16,
     "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, _WIDTH: 5632,
     "qkv_bias": True},
    summary="Qwen 1.5 and 2 MoE: experts in every n-th layer; a gated shared expert",
    read=_read_qwen2_moe,
    write=_write_qwen2_moe,
    unused=experts.LOSSES,
)  # fmt: skip


# Qwen 3 with experts (arXiv:2505.09388), in every layer or in some.


def _read_qwen3_moe(c: Config, where: str) -> Table:
    table = common.llama(c, where) | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    windows = common.uniform_window(c, where) if c["use_sliding_window"] else {}
    return table | windows | experts.softmax(c, *_MOE_SIZES) | experts.sparse(c, where)


def _write_qwen3_moe(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **common.window_keys(model),
        **experts.softmax_keys(model, *_MOE_SIZES),
        **experts.sparse_keys(model),
        "use_sliding_window": any(model.windows),
        "attention_bias": model.qkv_bias and model.o_bias,
    }


QWEN3_MOE_FAMILY = Family(
    "qwen3_moe",
    name_map(
        "hf-qwen3-moe", "Qwen3MoeForCausalLM", *LLAMA, *experts.EXPERTS, *QK_NORMS,
        *ATTENTION_BIASES,
    ),
    {**COMMON, **experts.SOFTMAX, **experts.SPARSE, "num_key_value_heads": 4,
     "attention_bias": False, "use_sliding_window": False, "sliding_window": 4096,
     "num_experts": 128, "moe_intermediate_size": 768},
    summary="Qwen 3 MoE: experts in every n-th layer; q/k norms",
    read=_read_qwen3_moe,
    write=_write_qwen3_moe,
    aliases={"num_local_experts": "num_experts"},
    unused=("max_window_layers", *experts.LOSSES),
)  # fmt: skip
