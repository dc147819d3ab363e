"""Qwen 1.5 and 2 with experts (arXiv:2407.10671): a shared expert behind a gate."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import LLAMA, OURS, THEIRS, Config, Family, Table, name_map
from torch_compat.families.qwen2 import BIASES, WINDOW_DEFAULTS, optional_windows, window_keys
from torch_compat.names.table import Rule

_SIZES = ("num_experts", "moe_intermediate_size")
_WIDTH = "shared_expert_intermediate_size"
_GATE = Rule(f"{OURS}mlp.shared_expert_gate.weight", f"{THEIRS}mlp.shared_expert_gate.weight")


def _windows(c: Config, where: str) -> Table:
    """Read windows from `layer_types`; the default is every second layer, up to a maximum."""
    layers = range(c["num_hidden_layers"])
    kinds = [FULL if i % 2 or i >= c["max_window_layers"] else SLIDING for i in layers]
    return optional_windows(c, kinds, where)


def _read(c: Config, where: str) -> Table:
    table = common.llama(c, where) | {"qkv_bias": c["qkv_bias"]} | _windows(c, where)
    shared = {"moe_shared_experts": 1, "moe_shared_expert_dim": c[_WIDTH]}
    gate = {**shared, "moe_shared_expert_gate": True}
    return table | experts.softmax(c, *_SIZES) | experts.sparse(c, where) | gate


def _write(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **window_keys(model),
        **experts.softmax_keys(model, *_SIZES),
        **experts.sparse_keys(model),
        _WIDTH: model.shared_expert_dim,
        "qkv_bias": model.qkv_bias,
    }


FAMILY = Family(
    "qwen2_moe",
    name_map(
        "hf-qwen2-moe", "Qwen2MoeForCausalLM", *LLAMA, *experts.EXPERTS,
        *experts.shared("shared_expert"), _GATE,
        *(rule._replace(optional=True) for rule in BIASES),
    ),
    {**COMMON, **WINDOW_DEFAULTS, **experts.SOFTMAX, **experts.SPARSE, "num_key_value_heads": 16,
     "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408, _WIDTH: 5632,
     "qkv_bias": True},
    read=_read,
    write=_write,
    unused=experts.LOSSES,
)  # fmt: skip
