"""NVIDIA's models: Nemotron 3 and 4, and Nemotron-H."""

from collections.abc import Iterator, Sequence

from jaxforge.config.mixers import MAMBA2
from jaxforge.config.model import ATTENTION as ATTENTION_MIXER
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
from torch_compat.families.values import integer, is_size, list_of
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
    "moe_groups": "n_group", "moe_top_k_groups": "topk_group", "moe_latent_dim": "moe_latent_size",
}  # fmt: skip
_MTP_PATTERN, _MTP_TYPES = "mtp_hybrid_override_pattern", "mtp_layers_block_type"
_DEPTHS = "num_nextn_predict_layers"
_MODULE = (FULL, "moe")
"""Default of `_MTP_TYPES` in transformers."""


def _attention_rules(name: str, key: str) -> Iterator[Rule]:
    return (Rule(f"{name}attention.{m}_proj.weight", f"{key}{m}_proj.weight") for m in "qkvo")


def _feed_forward_rules(name: str, key: str) -> Iterator[Rule]:
    """Yield the rules of a feed-forward or experts.

    Args:
        name: prefix of jaxforge's names of the layer.
        key: prefix of the keys of its only part.
    """
    for m in ("up_proj", "down_proj"):
        yield Rule(f"{name}mlp.{m}.weight", f"{key}{m}.weight")
        yield Rule(f"{name}mlp.{m}.bias", f"{key}{m}.bias", optional=True)
        yield Rule(f"{name}mlp.experts.{{j}}.{m}.weight", f"{key}experts.{{j}}.{m}.weight")
        yield Rule(f"{name}mlp.shared_expert.{m}.weight", f"{key}shared_experts.{m}.weight")
    yield Rule(f"{name}mlp.router.gate.weight", f"{key}gate.weight")
    yield Rule(f"{name}mlp.router.expert_bias", f"{key}gate.e_score_correction_bias")
    yield Rule(f"{name}mlp.latent_down_proj.weight", f"{key}fc1_latent_proj.weight")
    yield Rule(f"{name}mlp.latent_up_proj.weight", f"{key}fc2_latent_proj.weight")


_LAYER = "backbone.layers.{i}."
_MIXER = f"{_LAYER}mixer."
_NEMOTRON_H_RULES = (
    Rule(EMBEDDING, "backbone.embeddings.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule("norm.weight", "backbone.norm_f.weight"),
    # A layer is either a mixer or a feed-forward, so that only one of these norms exists.
    Rule(f"{NAME}attention_norm.weight", f"{_LAYER}norm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{_LAYER}norm.weight"),
    *_attention_rules(NAME, _MIXER),
    *state_space.mamba2_rules(_MIXER),
    *_feed_forward_rules(NAME, _MIXER),
)
_LEFT_OUT = {r"mtp\..*": "they predict further tokens; model.mtp_depth takes them in"}


def _module_rules(layer: int, depth: int) -> tuple[Rule, ...]:
    """Return the rules of a module of multi-token prediction: two layers of one part in files."""
    name = f"layers.{layer}."
    first, second = f"mtp.layers.{2 * depth}.", f"mtp.layers.{2 * depth + 1}."
    return (
        Rule(f"{name}embedding_norm.weight", f"{first}enorm.weight"),
        Rule(f"{name}hidden_norm.weight", f"{first}hnorm.weight"),
        Rule(f"{name}input_proj.weight", f"{first}eh_proj.weight"),
        Rule(f"{name}attention_norm.weight", f"{first}norm.weight"),
        *_attention_rules(name, f"{first}mixer."),
        Rule(f"{name}mlp_norm.weight", f"{second}norm.weight"),
        *_feed_forward_rules(name, f"{second}mixer."),
        Rule(f"{name}output_norm.weight", f"{second}final_layernorm.weight"),
    )


def _letters(kinds: Sequence[str], where: str) -> str:
    """Return the letters of layers.

    Raises:
        UserError: a kind of layer is unknown.
    """
    letters = [_KINDS.get(kind, kind) for kind in kinds]
    if unknown := set(letters) - HYBRID_LAYERS.keys():
        raise UserError(
            f"{where}: layers of kind {', '.join(sorted(unknown))}; supported are "
            f"{', '.join(_KINDS)}, and {' '.join(HYBRID_LAYERS)} in {_PATTERN}"
        )
    return "".join(letters)


def _read_nemotron_h(c: Config, where: str) -> Table:
    letters = _letters(c[_TYPES] or c[_PATTERN] or [LINEAR, "moe", FULL, "mlp"], where)
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
    table |= _read_experts(c, where) if "E" in letters else {}
    if c[_DEPTHS] and "*" in letters and letters[-1] in "E-":
        # A layer of attention and one like the last layer are one block here.
        of_module = _letters(c[_MTP_TYPES] or c[_MTP_PATTERN] or _MODULE, where)
        table |= {"mtp_mixer": ATTENTION_MIXER} if of_module == f"*{letters[-1]}" else {}
    return table


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
    """Return the keys that `_read_nemotron_h` reads.

    Raises:
        UserError: modules of multi-token prediction are not attention and a feed-forward.
    """
    letters = {parts: letter for letter, parts in HYBRID_LAYERS.items()}
    last = letters.get(model.layer_parts[-1], "?")
    if model.mtp_depth and (model.mtp_parts.mixer != ATTENTION_MIXER or last not in "E-"):
        raise UserError(
            "model.mtp_mixer must be attention, and the last layer a feed-forward or experts"
        )
    pattern = "".join(letters.get(parts, "?") for parts in model.layer_parts)
    keys = {
        **common.shape_keys(model),
        **{hf_key: getattr(model.mamba2, key) for key, hf_key in _MAMBA.items()},
        _PATTERN: pattern,
        "mlp_hidden_act": common.activation_key(model),
        "mlp_bias": model.mlp_bias,
        "time_step_min": model.mamba2.time_step_min,
        "mamba_hidden_act": "silu",
        _DEPTHS: model.mtp_depth,
    }
    if model.mtp_depth:
        keys[_MTP_PATTERN] = f"*{last}"
    if model.is_moe:
        keys |= {hf_key: getattr(model, key) for key, hf_key in _EXPERTS.items()}
        keys |= {"moe_intermediate_size": model.expert_dim, _SHARED_WIDTH: model.shared_expert_dim}
    return keys


NEMOTRON_H_FAMILY = Family(
    "nemotron_h",
    name_map(
        "hf-nemotron-h", "NemotronHForCausalLM", *_NEMOTRON_H_RULES,
        renamed=((r"^model\.", "backbone."), (r"^backbone\.mtp\.", "mtp.")),
        optional_groups=_LEFT_OUT,
        module_rules=_module_rules,
    ),
    {**COMMON, "vocab_size": 131072, "hidden_size": 4096, "num_hidden_layers": 4,
     "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
     "intermediate_size": 21504, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
     "mlp_hidden_act": "relu2", "mlp_bias": False, "mamba_num_heads": 128, "mamba_head_dim": 64,
     "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "chunk_size": 128,
     "use_conv_bias": True, "use_bias": False, "time_step_min": 0.001, "time_step_max": 0.1,
     "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
     _SHARED_WIDTH: 7688, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "n_group": 1,
     "topk_group": 1, "moe_latent_size": None, _TYPES: None, _PATTERN: None,
     _DEPTHS: 0, _MTP_PATTERN: None, _MTP_TYPES: None},
    summary="Nemotron-H, Nemotron Nano 2, Nemotron 3: layers of one part: Mamba-2, attention "
            "without positions, squared ReLU, or experts, also of a latent",
    read=_read_nemotron_h,
    write=_write_nemotron_h,
    ranges={**dict.fromkeys((_PATTERN, _MTP_PATTERN), is_name),
            **dict.fromkeys((_TYPES, _MTP_TYPES), list_of(is_name)), "moe_latent_size": integer(),
            "time_step_min": lambda value: is_size(value) or value == 0},
    only={"attention_bias": False, "tie_word_embeddings": False, "mamba_hidden_act": "silu"},
    names={"layer_norm_epsilon": "rms_norm_eps"},
    aliases={"layer_types": _TYPES, "attention_head_dim": "head_dim"},
    unused=("expand", "mamba_proj_bias", "mamba_ssm_cache_dtype", "moe_shared_expert_overlap",
            "n_shared_experts", "num_logits_to_keep", "output_router_logits",
            "rescale_prenorm_residual", "residual_in_fp32", "time_step_floor", "time_step_limit",
            "time_step_rank", "use_mamba_kernels"),
    experts_are_optional=True,
    further_layers_key=_DEPTHS,
    float32=experts.FLOAT32,
)  # fmt: skip
