"""ERNIE 4.5, dense and with experts."""

from jaxforge.config.model import ModelConfig
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON
from torch_compat.families.family import (
    GATED,
    GATED_BIASES,
    HF_NAME,
    NAME,
    OUTSIDE,
    PAIRED_ATTENTION,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.values import LAYER, integer
from torch_compat.formats import limits
from torch_compat.names.table import OneGroup, Rule

# ERNIE 4.5 dense models.

_RULES = (*OUTSIDE, *PRE_NORMS, *PAIRED_ATTENTION, *GATED)
_DEFAULTS = {**COMMON, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "use_bias": False}  # fmt: skip


def _read_ernie4_5(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.feed_forward(c, where)
    return table | common.biases({"attention_bias": c["use_bias"], "mlp_bias": c["use_bias"]})


def _write_ernie4_5(model: ModelConfig) -> Table:
    biases = (model.qkv_bias, model.o_bias, model.mlp_bias)
    return {**common.llama_keys(model), "use_bias": all(biases)}


ERNIE4_5_FAMILY = Family(
    "ernie4_5",
    name_map("hf-ernie4-5", "Ernie4_5ForCausalLM", *_RULES, *GATED_BIASES),
    {**_DEFAULTS, "num_key_value_heads": 2, "head_dim": 128},
    summary="ERNIE 4.5 (dense): rotary pairs of neighbouring channels",
    read=_read_ernie4_5,
    write=_write_ernie4_5,
)


# ERNIE 4.5 with experts.

_SIZES = ("num_experts", "moe_intermediate_size")
_BIAS = Rule(
    f"{NAME}mlp.router.expert_bias", f"{HF_NAME}mlp.moe_statics.e_score_correction_bias", OneGroup()
)
_MEMORY = r"(\.mlp)\.gate(\.moe_statics\.)"
"""Name of the bias in the memory of transformers, whose files have another."""

_LEFT_OUT = {r"model\.mtp_.*": "they predict further tokens and are not part of the model here"}
"""Tensors that transformers ignores, too.

jaxforge's modules of multi-token prediction differ: they read hidden states after the final norm,
and have a norm of their own before the head and the parts of the last layer. ERNIE's module reads
hidden states before the final norm, shares this norm, and has a dense feed-forward.
"""


def _read_ernie4_5_moe(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where) | common.feed_forward(c, where)
    # ERNIE divides by the sum of the chosen weights and has no key for it.
    table |= experts.softmax({**c, "norm_topk_prob": True}, *_SIZES) | {"moe_bias_update": "sign"}
    n_layers, step = c["num_hidden_layers"], c["moe_layer_interval"]
    # -1 stands for the last layer.
    end = n_layers - 1 if c["moe_layer_end_index"] == -1 else c["moe_layer_end_index"]
    first = c["moe_layer_start_index"]
    layers = [i for i in range(first, min(n_layers, end + 1)) if (i + 1) % step == 0]
    table |= experts.chosen_layers(layers, c, where)
    if count := c["moe_num_shared_experts"]:
        width = count * c["moe_intermediate_size"]
        table |= {"moe_shared_experts": count, "moe_shared_expert_dim": width}
    return table


def _write_ernie4_5_moe(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **experts.softmax_keys(model, *_SIZES)}
    del keys["norm_topk_prob"]  # not a key of ERNIE
    return {
        **common.without_usual_head_dim(keys),
        "use_bias": False,
        "moe_num_shared_experts": model.shared_expert_dim // model.expert_dim,
        "moe_layer_start_index": model.has_experts.index(True),
        "moe_layer_end_index": model.n_layers - 1,
        "moe_layer_interval": experts.period(model),
    }


ERNIE4_5_MOE_FAMILY = Family(
    "ernie4_5_moe",
    name_map(
        "hf-ernie4-5-moe", "Ernie4_5_MoeForCausalLM", *_RULES, *experts.EXPERTS, _BIAS,
        *(rule._replace(optional=True) for rule in experts.shared("shared_experts")),
        renamed=((_MEMORY, r"\1\2"),),
        optional_groups=_LEFT_OUT,
    ),
    {**_DEFAULTS, "num_key_value_heads": 4, "num_experts": 64, "num_experts_per_tok": 6,
     "moe_intermediate_size": 1536, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
     "moe_layer_end_index": -1, "moe_layer_interval": 1},
    summary="ERNIE 4.5 with experts: a softmax router with a selection bias; shared experts",
    read=_read_ernie4_5_moe,
    write=_write_ernie4_5_moe,
    ranges={"moe_num_shared_experts": LAYER, "moe_layer_start_index": LAYER,
            "moe_layer_end_index": integer(-1, limits.LAYERS)},
    only={"use_bias": False, "moe_norm_min": 1e-12},
    names={"moe_num_experts": "num_experts", "moe_k": "num_experts_per_tok"},
    aliases={key: key for key in ("num_experts", "num_experts_per_tok")},
    unused=("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers",
            *experts.LOSSES),
    requires_head_divisor=True,
    float32=experts.FLOAT32,
)  # fmt: skip
