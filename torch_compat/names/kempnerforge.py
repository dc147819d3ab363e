"""Names of KempnerForge, which are also jaxforge's own."""

import itertools
from collections.abc import Iterator

from jaxforge.config.model import ModelConfig, every_nth
from torch_compat.names.table import EMBEDDING, HEAD, NameMap, Rule, Transposed

UNSUPPORTED_KEYS = (
    "model_type", "rope_scaling", "head_dim", "qkv_bias", "qk_norm_eps", "sliding_window",
    "attention_chunk_size", "local_rope_theta", "rope_pattern", "partial_rotary_factor",
    "norm_unit_offset", "norm_bias", "parallel_residual", "shared_norm",
    "gated_mlp", "clip_qkv", "attn_temperature_scale", "qk_l2_norm", "qk_norm_type",
    "qk_norm_after_rotary", "value_norm", "layer_multipliers",
    "layer_embedding_dim", "n_kv_shared_layers", "kv_shared_ffn_dim",
    "moe_score_inputs", "moe_separate_norms", "moe_expert_scales",
    "attention_scale", "attn_logit_softcap", "attention_sinks", "attention_output_gate",
    "final_logit_softcap", "swiglu_limit", "embedding_multiplier",
    "residual_multiplier", "logits_scaling", "moe_first_dense_layers", "moe_norm_topk",
    "moe_routed_scaling", "moe_groups", "moe_latent_dim", "mup_base_width", "mup_base_head_dim",
)  # fmt: skip
"""Keys of `[model]` that KempnerForge does not have."""

_ACTIVATIONS = ("silu", "gelu", "relu")
_OTHERWISE = "it would load these weights and compute a different model"
_ONE_WIDTH = "its experts have one width, a multiple of 16, and it could not load these weights"

_COMMON = (
    EMBEDDING,
    HEAD,
    "norm.weight",
    "norm.bias",
    *(
        f"layers.{{i}}.{name}"
        for name in (
            "attention_norm.weight",
            "attention_norm.bias",
            *(f"attention.{m}_proj.{p}" for m in "qkv" for p in ("weight", "bias")),
            "attention.o_proj.weight",
            "attention.q_norm.weight",
            "attention.k_norm.weight",
            "mlp_norm.weight",
            "mlp_norm.bias",
            *(f"mlp.{m}_proj.weight" for m in ("gate", "up", "down")),
            "mlp.router.gate.weight",
            "mlp.router.expert_bias",
            "mlp.router.expert_ema",
            *(f"mlp.shared_expert.{m}_proj.weight" for m in ("gate", "up", "down")),
        )
    ),
)
_MODULES = tuple(
    f"layers.{{i}}.{name}.{kind}"
    for name, kind in (
        *itertools.product(("embedding_norm", "hidden_norm", "output_norm"), ("weight", "bias")),
        ("input_proj", "weight"),
    )
)
"""Modules of multi-token prediction, which only jaxforge has."""
_EXPERTS = tuple(f"layers.{{i}}.mlp.experts.{{j}}.{m}_proj.weight" for m in ("gate", "up", "down"))

_OPTIONAL_STATE = {
    r"layers\.\d+\.mlp\.router\.expert_ema": "KempnerForge's bias follows this mean, and is within "
    "the sigmoid, where it weighs experts as well as choosing them: jaxforge's router differs"
}

KEMPNERFORGE = NameMap(
    "kempnerforge",
    "KempnerForge's text model",
    tuple(Rule(name, name, optional=name in _MODULES) for name in (*_COMMON, *_MODULES, *_EXPERTS)),
    optional_groups=_OPTIONAL_STATE,
    writes_tied_head=True,
    has_stages=True,
)

KEMPNERFORGE_PACKED = NameMap(
    "kempnerforge-packed",
    "KempnerForge with model.moe_packed_experts: all experts of a block in one [E, in, out] tensor",
    (
        *(Rule(name, name) for name in _COMMON),
        *(
            Rule(
                f"layers.{{i}}.mlp.experts.{{j}}.{m}_proj.weight",
                f"layers.{{i}}.mlp.{m}_w",
                Transposed(),
            )
            for m in ("gate", "up", "down")
        ),
    ),
    optional_groups=_OPTIONAL_STATE,
    writes_tied_head=True,
)


def incompatibilities(model: ModelConfig) -> Iterator[str]:
    """Yield the reasons why KempnerForge could not load a model."""
    plain = ModelConfig()
    bias_update = "kempnerforge" if model.moe_router == "sigmoid_topk" else "none"
    for key in UNSUPPORTED_KEYS:
        if getattr(model, key) != getattr(plain, key):
            yield f"KempnerForge has no model.{key}: {_OTHERWISE}"
    if model.activation not in _ACTIVATIONS:
        yield f'KempnerForge has no model.activation = "{model.activation}": {_OTHERWISE}'
    if model.mtp_depth:
        yield (
            "KempnerForge has no model.mtp_depth: it could not load the modules. For KempnerForge "
            "export with --model.mtp_depth=0"
        )
    if not model.is_moe:
        return
    if model.feed_forward_pattern != every_nth(len(model.feed_forward_pattern)):
        yield f"KempnerForge has no model.feed_forward_pattern: {_OTHERWISE}"
    if model.bias_update != bias_update:
        yield f'KempnerForge has no model.moe_bias_update = "{model.bias_update}": {_OTHERWISE}'
    if model.moe_expert_dim is not None:
        ratio = model.expert_dim / model.ffn_dim
        equivalent = f"set model.moe_expert_ffn_multiplier = {ratio:.12g} in its config"
        reason = _ONE_WIDTH if model.expert_dim % 16 else equivalent
        yield f"KempnerForge has no model.moe_expert_dim: {reason}"
    if model.shared_expert_dim not in (0, model.expert_dim):
        yield f"KempnerForge has no model.moe_shared_expert_dim: {_ONE_WIDTH}"
