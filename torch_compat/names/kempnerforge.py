"""KempnerForge: our own names, since ours were taken from it."""

from torch_compat.names.table import EMBEDDING, HEAD, NameMap, Rule, Transposed

LACKS = (
    "model_type", "rope_scaling", "head_dim", "qkv_bias", "qk_norm_eps", "sliding_window",
    "attention_chunk_size", "local_rope_theta", "rope_pattern", "partial_rotary_factor",
    "norm_unit_offset", "parallel_residual", "gated_mlp",
    "attention_scale", "attn_logit_softcap", "final_logit_softcap", "embedding_multiplier",
    "residual_multiplier", "logits_scaling",
)  # fmt: skip
"""Keys of `[model]` that KempnerForge does not have."""

_SAME = (
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
_EXPERTS = tuple(f"layers.{{i}}.mlp.experts.{{j}}.{m}_proj.weight" for m in ("gate", "up", "down"))

KEMPNERFORGE = NameMap(
    "kempnerforge",
    "KempnerForge's text model",
    tuple(Rule(name, name) for name in (*_SAME, *_EXPERTS)),
    writes_tied_head=True,
    has_stages=True,
)

KEMPNERFORGE_PACKED = NameMap(
    "kempnerforge-packed",
    "KempnerForge with model.moe_packed_experts: all experts of a block in one [E, in, out] tensor",
    (
        *(Rule(name, name) for name in _SAME),
        *(
            Rule(
                f"layers.{{i}}.mlp.experts.{{j}}.{m}_proj.weight",
                f"layers.{{i}}.mlp.{m}_w",
                Transposed(),
            )
            for m in ("gate", "up", "down")
        ),
    ),
    writes_tied_head=True,
)
