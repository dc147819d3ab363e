"""GLM 4.5 (arXiv:2508.06471): DeepSeek-V3's experts, attention with partial rotation."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    LLAMA,
    PREDICTION,
    QK_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.qwen2 import BIASES

_OPTIONAL = tuple(rule._replace(optional=True) for rule in (*QK_NORMS, *BIASES))


def _read(c: Config, where: str) -> Table:
    table = common.shape(c) | common.feed_forward(c, where)
    table |= common.rotary(c, where, partial=0.5) | experts.sigmoid(c, where)
    norms = {"qk_norm": True, "qk_norm_eps": c["rms_norm_eps"]} if c["use_qk_norm"] else {}
    return table | norms | {"qkv_bias": c["attention_bias"]}


def _write(model: ModelConfig) -> Table:
    return {
        **common.llama_keys(model),
        **common.rotary_keys(model, partial=True),
        **experts.sigmoid_keys(model),
        "use_qk_norm": model.qk_norm,
        "attention_bias": model.qkv_bias,
        "num_nextn_predict_layers": model.mtp_depth,
    }


FAMILY = Family(
    "glm4_moe",
    name_map(
        "hf-glm4-moe", "Glm4MoeForCausalLM", *LLAMA, *experts.EXPERTS, experts.BIAS,
        *experts.shared("shared_experts"), *_OPTIONAL, *PREDICTION,
    ),
    {**COMMON, **experts.SIGMOID, "rms_norm_eps": 1e-5, "num_key_value_heads": 8,
     "num_experts_per_tok": 8, "n_routed_experts": 128, "n_shared_experts": 1,
     "first_k_dense_replace": 1, "norm_topk_prob": True, "attention_bias": False,
     "use_qk_norm": False, "partial_rotary_factor": None, "num_nextn_predict_layers": 0},
    read=_read,
    write=_write,
    aliases={"num_mtp_layers": "num_nextn_predict_layers"},
    unused=("output_router_logits",),
    further_layers_key="num_nextn_predict_layers",
)  # fmt: skip
