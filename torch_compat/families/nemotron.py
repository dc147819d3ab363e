"""NVIDIA's models: Nemotron 3 and 4, and Nemotron-H."""

from jaxforge.config.mixers import MAMBA2
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts, state_space
from torch_compat.families.common import BIASES, COMMON, FULL
from torch_compat.families.family import (
    ATTENTION,
    ATTENTION_BIASES,
    GATED,
    GATED_BIASES,
    NAME,
    NORM_BIASES,
    OUTSIDE,
    PRE_NORMS,
    Config,
    Family,
    Table,
    name_map,
)
from torch_compat.families.state_space import HYBRID_LAYERS, LINEAR
from torch_compat.families.values import is_size, list_of
from torch_compat.formats.limits import is_name
from torch_compat.names.table import EMBEDDING, HEAD, Rule

# Nemotron 3 and 4 and Minitron (arXiv:2402.16819).

_NEMOTRON_RULES = (*OUTSIDE, *PRE_NORMS, *NORM_BIASES, *ATTENTION, *ATTENTION_BIASES, *GATED[1:],
          *GATED_BIASES[1:])  # fmt: skip


def _read_nemotron(c: Config, where: str) -> Table:
    table = common.shape(c) | common.rotary(c, where, partial=0.5) | common.biases(c)
    table |= common.feed_forward(c, where, gated=False)
    return {**table, "norm_type": "layernorm", "norm_unit_offset": True}


def _write_nemotron(model: ModelConfig) -> Table:
    keys = {**common.llama_keys(model), **common.rotary_keys(model, partial=True)}
    return {**keys, **common.bias_keys(model)}


NEMOTRON_FAMILY = Family(
    "nemotron",
    name_map("hf-nemotron", "NemotronForCausalLM", *_NEMOTRON_RULES),
    {**COMMON, **BIASES, "rms_norm_eps": 1e-5, "hidden_act": "relu2", "initializer_range": 0.0134,
     "partial_rotary_factor": None},
    summary="Nemotron 3 and 4, Minitron: squared ReLU, LayerNorm with 1 + w",
    read=_read_nemotron,
    write=_write_nemotron,
    names={"norm_eps": "rms_norm_eps"},
)  # fmt: skip


# Nemotron-H (arXiv:2504.03624) and Nemotron 3.
#
# A letter stands for each layer (`HYBRID_LAYERS`). Attention has no positions, and feed-forwards
# have squared ReLU.

_KINDS = {LINEAR: "M", "mamba": "M", FULL: "*", "attention": "*", "mlp": "-", "moe": "E"}
"""Kind of a layer in transformers 5 and 4 -> letter."""
_PATTERN, _TYPES = "hybrid_override_pattern", "layers_block_type"
_SHARED_WIDTH = "moe_shared_expert_intermediate_size"
_MAMBA = {
    "heads": "mamba_num_heads", "head_dim": "mamba_head_dim", "state_size": "ssm_state_size",
    "groups": "n_groups", "conv_size": "conv_kernel", "chunk_size": "chunk_size",
    "conv_bias": "use_conv_bias", "proj_bias": "use_bias",
    "time_step_min": "time_step_min",  # the limit, which is also the smallest initial time step
    "init_time_step_min": "time_step_min", "init_time_step_max": "time_step_max",
}  # fmt: skip
"""Key of `[model.mamba2]` -> key of `config.json`."""
_EXPERTS = {
    "num_experts": "n_routed_experts", "moe_top_k": "num_experts_per_tok",
    "moe_expert_dim": "moe_intermediate_size", "moe_shared_expert_dim": _SHARED_WIDTH,
    "moe_norm_topk": "norm_topk_prob", "moe_routed_scaling": "routed_scaling_factor",
    "moe_groups": "n_group", "moe_top_k_groups": "topk_group",
}  # fmt: skip
_LAYER = "backbone.layers.{i}."
_MIXER = f"{_LAYER}mixer."
_NEMOTRON_H_RULES = (
    Rule(EMBEDDING, "backbone.embeddings.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule("norm.weight", "backbone.norm_f.weight"),
    # A layer is either a mixer or a feed-forward, so that only one of these norms exists.
    Rule(f"{NAME}attention_norm.weight", f"{_LAYER}norm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{_LAYER}norm.weight"),
    *(Rule(f"{NAME}attention.{m}_proj.weight", f"{_MIXER}{m}_proj.weight") for m in "qkvo"),
    *state_space.mamba2_rules(_MIXER),
    *(
        Rule(f"{NAME}mlp.{m}_proj.{kind}", f"{_MIXER}{m}_proj.{kind}", optional=kind == "bias")
        for m in ("up", "down")
        for kind in ("weight", "bias")
    ),
    Rule(f"{NAME}mlp.router.gate.weight", f"{_MIXER}gate.weight"),
    Rule(f"{NAME}mlp.router.expert_bias", f"{_MIXER}gate.e_score_correction_bias"),
    *(
        Rule(f"{NAME}mlp.{name}.{m}_proj.weight", f"{_MIXER}{hf_name}.{m}_proj.weight")
        for name, hf_name in (("experts.{j}", "experts.{j}"), ("shared_expert", "shared_experts"))
        for m in ("up", "down")
    ),
)
_LEFT_OUT = {r"(backbone\.)?mtp\..*": "they predict further tokens and are not part of the model"}


def _letters(c: Config, where: str) -> str:
    """Return the letters of all layers.

    Raises:
        UserError: a kind of layer is unknown.
    """
    kinds = c[_TYPES] or c[_PATTERN] or [LINEAR, "moe", FULL, "mlp"]
    letters = [_KINDS.get(kind, kind) for kind in kinds]
    if unknown := set(letters) - HYBRID_LAYERS.keys():
        raise UserError(
            f"{where}: layers of kind {', '.join(sorted(unknown))}; supported are "
            f"{', '.join(_KINDS)}, and {' '.join(HYBRID_LAYERS)} in {_PATTERN}"
        )
    return "".join(letters)


def _read_nemotron_h(c: Config, where: str) -> Table:
    letters = _letters(c, where)
    table = common.shape({**c, "num_hidden_layers": len(letters)}) | {
        **common.feed_forward(c, where, "mlp_hidden_act", gated=False),
        **state_space.hybrid_patterns(letters),
        "rope_pattern": [False],
        "mlp_bias": c["mlp_bias"],
        # No initial time step is 0: without a limit, the smallest is the usual one.
        MAMBA2: {
            key: c[hf_key] for key, hf_key in _MAMBA.items()
            if c[hf_key] or key != "init_time_step_min"
        },
    }  # fmt: skip
    return table | _read_experts(c, where) if "E" in letters else table


def _read_experts(c: Config, where: str) -> Table:
    """Read DeepSeek-V3's router, experts and a shared expert.

    Raises:
        UserError: the groups of experts are too small, or experts have biases.
    """
    # A group is scored by the sum of its two best experts.
    if c["n_routed_experts"] < 2 * c["n_group"]:
        raise UserError(f"{where}: n_group = {c['n_group']}: a group needs at least two experts")
    if c["mlp_bias"]:
        raise UserError(f"{where}: mlp_bias = true is not supported in layers with experts")
    return {key: c[hf_key] for key, hf_key in _EXPERTS.items()} | {
        "moe_router": "sigmoid_topk",
        "moe_bias_update": "sign",
        "moe_shared_experts": 1,
    }


def _write_nemotron_h(model: ModelConfig) -> Table:
    letters = {parts: letter for letter, parts in HYBRID_LAYERS.items()}
    pattern = "".join(letters.get(parts, "?") for parts in model.layer_parts)
    keys = {
        **common.shape_keys(model),
        **{hf_key: getattr(model.mamba2, key) for key, hf_key in _MAMBA.items()},
        _PATTERN: pattern,
        "mlp_hidden_act": common.activation_key(model),
        "mlp_bias": model.mlp_bias,
        "time_step_min": model.mamba2.time_step_min,
        "mamba_hidden_act": "silu",
    }
    if model.is_moe:
        keys |= {hf_key: getattr(model, key) for key, hf_key in _EXPERTS.items()}
        keys |= {"moe_intermediate_size": model.expert_dim, _SHARED_WIDTH: model.shared_expert_dim}
    return keys


NEMOTRON_H_FAMILY = Family(
    "nemotron_h",
    name_map(
        "hf-nemotron-h", "NemotronHForCausalLM", *_NEMOTRON_H_RULES,
        renamed=((r"^model\.", "backbone."),),
        optional_groups=_LEFT_OUT,
    ),
    {**COMMON, "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": 4,
     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
     "intermediate_size": 21504, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
     "mlp_hidden_act": "relu2", "mlp_bias": False, "mamba_num_heads": 128, "mamba_head_dim": 64,
     "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
     "use_conv_bias": True, "use_bias": False, "time_step_min": 0.001, "time_step_max": 0.1,
     "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
     _SHARED_WIDTH: 7688, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
     "topk_group": 1, _TYPES: None, _PATTERN: None},
    summary="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano: layers of one part: Mamba-2, attention "
            "without positions, squared ReLU, or experts",
    read=_read_nemotron_h,
    write=_write_nemotron_h,
    ranges={_PATTERN: is_name, _TYPES: list_of(is_name),
            "time_step_min": lambda value: is_size(value) or value == 0},
    only={"attention_bias": False, "tie_word_embeddings": False, "mamba_hidden_act": "silu",
          "moe_latent_size": None},
    names={"layer_norm_epsilon": "rms_norm_eps"},
    aliases={"layer_types": _TYPES, "attention_head_dim": "head_dim"},
    unused=("expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
            "mtp_hybrid_override_pattern", "mtp_layers_block_type", "n_shared_experts",
            "num_logits_to_keep", "num_nextn_predict_layers", "output_router_logits",
            "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_limit",
            "time_step_rank", "use_mamba_kernels"),
    experts_are_optional=True,
    float32=experts.FLOAT32,
)  # fmt: skip
