"""dots.llm1 (arXiv:2506.05767): DeepSeek-V3's experts with Qwen 3's attention."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import (
    ATTENTION_BIASES,
    LLAMA,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)


def _windows(c: Config, where: str) -> Table:
    """Read windows from `layer_types`; by default layers from `max_window_layers` on have one."""
    layers = range(c["num_hidden_layers"])
    kinds = [SLIDING if i >= c["max_window_layers"] else FULL for i in layers]
    return common.windows(c, c["layer_types"] or kinds, where)


def _read(c: Config, where: str) -> Table:
    table = common.llama(c, where) | {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    return table | _windows(c, where) | experts.sigmoid(c, where)


def _write(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **common.window_keys(model),
        **experts.sigmoid_keys(model),
        "layer_types": common.layer_kinds(model),
        "max_window_layers": model.n_layers,
        "attention_bias": model.qkv_bias and model.o_bias,
    }


FAMILY = Family(
    "dots1",
    name_map(
        "hf-dots1", "Dots1ForCausalLM", *LLAMA, *QK_NORMS, *experts.EXPERTS, experts.BIAS,
        *experts.shared("shared_experts"), *ATTENTION_BIASES,
    ),
    {**COMMON, **experts.SIGMOID, "num_key_value_heads": 32, "attention_bias": False,
     "sliding_window": 4096, "max_window_layers": 62, "layer_types": None},
    read=_read,
    write=_write,
    unused=("output_router_logits",),
)  # fmt: skip
