"""SmolLM3: Llama with some layers that have no rotary positions."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import BIASES, COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED_BIASES,
    LLAMA,
    Config,
    Family,
    Table,
    name_map,
)


def _read(c: Config, where: str) -> Table:
    n_layers, every = c["num_hidden_layers"], c["no_rope_layer_interval"]
    has_rope = c["no_rope_layers"] or [(i + 1) % every != 0 for i in range(n_layers)]
    if len(has_rope) < n_layers:
        raise UserError(f"{where}: no_rope_layers has {len(has_rope)} of {n_layers} layers")
    has_windows = c["use_sliding_window"] and c["sliding_window"] is not None
    kinds = [FULL if turn or not has_windows else SLIDING for turn in has_rope[:n_layers]]
    table = common.llama(c, where) | common.windows(c, c["layer_types"] or kinds, where)
    pattern = [bool(turn) for turn in has_rope[:n_layers]]
    return table if all(pattern) else {**table, "rope_pattern": pattern}


def _write(model: ModelConfig) -> Table:
    has_rope, n_layers = model.rope_pattern or (True,), model.n_layers
    return {
        **common.llama_keys(model),
        **common.bias_keys(model),
        **common.window_keys(model),
        "use_sliding_window": any(model.windows),
        "layer_types": common.layer_kinds(model),
        "no_rope_layers": [int(has_rope[i % len(has_rope)]) for i in range(n_layers)],
    }


FAMILY = Family(
    "smollm3",
    name_map("hf-smollm3", "SmolLM3ForCausalLM", *LLAMA, *ATTENTION_BIASES, *GATED_BIASES),
    {**COMMON, **BIASES, "num_key_value_heads": 4, "tie_word_embeddings": True,
     "rope_theta": 2e6, "use_sliding_window": False, "sliding_window": None,
     "no_rope_layers": None, "no_rope_layer_interval": 4, "layer_types": None},
    read=_read,
    write=_write,
    unused=("max_window_layers", "pretraining_tp"),
)  # fmt: skip
