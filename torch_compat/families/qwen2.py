"""Qwen 2 and 2.5 (arXiv:2407.10671): biases of queries, keys and values."""

from typing import Any

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import LLAMA, OURS, THEIRS, Config, Family, Table, name_map
from torch_compat.names.table import Rule

WINDOW_DEFAULTS: dict[str, Any] = {
    "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None,
}  # fmt: skip
"""Keys of Qwen's windows and their defaults in transformers."""


def windows(c: Config, where: str) -> Table:
    """Read windows from `layer_types`; by default layers from `max_window_layers` on have one."""
    n_layers = c["num_hidden_layers"]
    full = [FULL] * min(c["max_window_layers"], n_layers)
    return optional_windows(c, full + [SLIDING] * (n_layers - len(full)), where)


def optional_windows(c: Config, usual: list[str], where: str) -> Table:
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


def window_keys(model: ModelConfig) -> Table:
    """Return the keys that `windows` reads."""
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
    config = {**c, "attention_bias": False}  # transformers ignores the key in this family
    return common.llama(config, where) | {"qkv_bias": True} | windows(c, where)


FAMILY = Family(
    "qwen2",
    name_map("hf-qwen2", "Qwen2ForCausalLM", *LLAMA, *BIASES),
    {**COMMON, **WINDOW_DEFAULTS, "num_key_value_heads": 32},
    read=_read,
    write=lambda model: {**common.llama_keys(model), **window_keys(model)},
    unused=("attention_bias",),
)
