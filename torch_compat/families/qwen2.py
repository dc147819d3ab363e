"""Qwen 2 and 2.5 (arXiv:2407.10671): biases of queries, keys and values."""

from typing import Any

from jaxforge.config.model import ModelConfig
from torch_compat.families import common
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import LLAMA, OURS, THEIRS, Config, Family, Table, name_map
from torch_compat.names.table import Rule

WINDOWED: dict[str, Any] = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
"""Keys of Qwen's windows, with what transformers takes for absent ones."""


def windows(c: Config, where: str) -> Table:
    """Layers from `max_window_layers` on see a window, or those of `layer_types`, if any does."""
    n_layers = c["num_hidden_layers"]
    full = [FULL] * min(c["max_window_layers"], n_layers)
    kinds = c.get("layer_types") or full + [SLIDING] * (n_layers - len(full))
    return common.windows(c, kinds if c["use_sliding_window"] else [FULL] * n_layers, where)


def window_keys(model: ModelConfig) -> Table:
    """The keys of `windows`."""
    kinds = common.layer_kinds(model)
    if SLIDING not in kinds:
        return {"sliding_window": None, "use_sliding_window": False,
                "max_window_layers": model.n_layers}  # fmt: skip
    return {"sliding_window": model.sliding_window, "use_sliding_window": True,
            "max_window_layers": kinds.index(SLIDING), "layer_types": kinds}  # fmt: skip


BIASES = tuple(
    Rule(f"{OURS}attention.{m}_proj.bias", f"{THEIRS}self_attn.{m}_proj.bias") for m in "qkv"
)


def _read(c: Config, where: str) -> Table:
    without = {**c, "attention_bias": False}  # which it does not look at
    return common.llama(without, where) | {"qkv_bias": True} | windows(c, where)


FAMILY = Family(
    "qwen2",
    name_map("hf-qwen2", "Qwen2ForCausalLM", *LLAMA, *BIASES),
    {**COMMON, **WINDOWED, "num_key_value_heads": 32},
    read=_read,
    write=lambda model: {**common.llama_keys(model), **window_keys(model)},
    unused=("attention_bias",),
)
