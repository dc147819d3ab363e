"""Settings that determine the function of a network, to compare two models."""

import math
from collections.abc import Sequence
from typing import Any

from jaxforge.config.mixers import GLOBAL_ATTENTION, MIXER_TABLES
from jaxforge.config.model import MIXERS, ModelConfig
from jaxforge.config.section import Flag, flagged
from torch_compat.families.common import scaling_keys

_NOT_COMPARED = ("sdpa_backend", "sliding_window", "attention_chunk_size", "attention_pattern",
                 "rope_theta", "rope_scaling", "local_rope_theta", "rope_pattern",
                 "partial_rotary_factor", "mixer_pattern", "feed_forward_pattern",
                 "mtp_depth", "mtp_mixer")  # fmt: skip
"""Keys of `[model]` that are compared by their effect on each layer, or that have none."""


def same(first: Any, other: Any) -> bool:  # noqa: ANN401 (values of any key)
    """Return whether two values are equal; numbers to float32 precision."""
    if isinstance(first, float) and isinstance(other, float):
        return math.isclose(first, other, rel_tol=1e-7)
    return first == other


def network_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that determine the function of a network.

    They are equal for two configs of equal networks.
    """
    keys = {k: v for k, v in model.model_dump().items() if k not in _NOT_COMPARED}
    keys = {k: v for k, v in keys.items() if not k.startswith("moe_")} | _experts(model)
    keys |= _mixer_settings(model)
    has_dense_layers = any(parts.feed_forward == "dense" for parts in model.layer_parts)
    keys |= {
        # Resolved values: a key that is left out equals the same key with its default.
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "ffn_hidden_dim": model.ffn_dim if has_dense_layers else None,
        "kv_shared_ffn_dim": (
            model.dense_width(model.layer_parts[-1])
            if has_dense_layers and model.n_kv_shared_layers
            else None
        ),
        # Mixers side by side have no order.
        "mixer_pattern": tuple(
            MIXERS.joint.join(sorted(parts.mixer.split(MIXERS.joint)))
            for parts in model.layer_parts
        ),
        "gated_mlp": model.is_gated,
        "attention_scale": model.attention_scale or model.head_size**-0.5,
        "qk_norm_eps": model.qk_norm_eps if model.uses("qk_norm_eps") else model.norm_eps,
        "sliding_window and attention_pattern": _effective_spans(model.windows, model),
        "attention_chunk_size and attention_pattern": _effective_spans(model.chunks, model),
        "rotary positions": tuple(
            rope and (rope.theta, rope.size, scaling_keys(rope.scaling)) for rope in model.ropes
        ),
    }
    return {key if " " in key else f"model.{key}": value for key, value in keys.items()}


def _experts(model: ModelConfig) -> dict[str, Any]:
    """Return the settings that determine the outputs of experts, not their losses and loads."""
    if not model.is_moe:
        return {}
    same = ("moe_top_k", "moe_router", "moe_norm_topk", "moe_routed_scaling", "moe_router_bias",
            "moe_capacity_factor", "moe_score_inputs")  # fmt: skip
    groups = model.moe_groups, model.moe_top_k_groups
    return {
        **{key: getattr(model, key) for key in same},
        "moe_groups and moe_top_k_groups": (
            # If all groups are chosen, the groups have no effect.
            (1, 1) if groups[0] == groups[1] else (*groups, model.moe_group_score)
        ),
        "feed_forward_pattern and moe_first_dense_layers": tuple(
            parts.feed_forward for parts in model.layer_parts
        ),
        "moe_bias_update": model.bias_update,
        "moe_expert_dim": model.expert_dim,
        "moe_latent_dim": model.moe_latent_dim,
        "moe_shared_expert_dim": model.shared_expert_dim,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
        "moe_separate_norms": model.moe_separate_norms,
        "moe_expert_scales": model.moe_expert_scales,
    }


def _mixer_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of mixers that layers have, without those of training."""
    tables: dict[str, Any] = {
        mixer: {
            key: value for key, value in table if key not in flagged(type(table), Flag.TRAINING)
        }
        for mixer, table in model.mixer_tables.items()
    }
    if GLOBAL_ATTENTION in tables:  # numbers of heads that are not set are those of "attention"
        tables[GLOBAL_ATTENTION] = model.head_sizes(GLOBAL_ATTENTION)._asdict()
    return dict.fromkeys(MIXER_TABLES) | tables


def _effective_spans(spans: Sequence[int | None], model: ModelConfig) -> tuple[int | None, ...]:
    """Return windows or chunks of all layers; None if they cover the whole sequence."""
    return tuple(None if n is None or n >= model.max_seq_len else n for n in spans)
