"""The text models of Gemma 4."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jaxforge.config.mixers import GLOBAL_ATTENTION
from jaxforge.config.model import ATTENTION, SHARED_MIXERS, ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common
from torch_compat.families.common import COMMON, FULL, SLIDING
from torch_compat.families.family import ATTENTION as ATTENTION_RULES
from torch_compat.families.family import (
    ATTENTION_BIASES,
    GATED,
    HF_NAME,
    NAME,
    OUTSIDE,
    QK_NORMS,
    SANDWICH_NORMS,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    name_map,
)
from torch_compat.families.values import LAYER, integer, nullable
from torch_compat.names.table import Rule

_EXPERT, _HF_EXPERTS = f"{NAME}mlp.experts.{{j}}.", f"{HF_NAME}experts."
_NORMS = {
    "shared_norm": "pre_feedforward_layernorm",
    "shared_post_norm": "post_feedforward_layernorm_1",
    "routed_norm": "pre_feedforward_layernorm_2",
    "routed_post_norm": "post_feedforward_layernorm_2",
}
"""Norm of jaxforge's `mlp` with experts -> norm of the layer in transformers."""
_ALL_EMBEDDINGS = {
    "embedding": "embed_tokens_per_layer",
    "proj": "per_layer_model_projection",
    "norm": "per_layer_projection_norm",
}
"""Part of jaxforge's `layer_embeddings` -> part of the model in transformers."""
_EMBEDDINGS = {
    "gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "norm": "post_per_layer_input_norm",
}
"""Part of jaxforge's `layer_embedding` -> part of the layer in transformers."""
_IN_LAYERS = (*ATTENTION_RULES, *ATTENTION_BIASES, *QK_NORMS)
_RULES = (
    *OUTSIDE,
    *SANDWICH_NORMS,
    *GATED,
    *_IN_LAYERS,
    *(
        rule._replace(name=rule.name.replace(f".{ATTENTION}.", f".{mixer}."))
        for mixer in (GLOBAL_ATTENTION, *SHARED_MIXERS.values())
        for rule in _IN_LAYERS
    ),
    Rule(f"{NAME}multiplier", f"{HF_NAME}layer_scalar"),
    *(
        Rule(f"layer_embeddings.{m}.weight", f"model.{theirs}.weight")
        for m, theirs in _ALL_EMBEDDINGS.items()
    ),
    *(
        Rule(f"{NAME}layer_embedding.{m}.weight", f"{HF_NAME}{theirs}.weight")
        for m, theirs in _EMBEDDINGS.items()
    ),
    Rule(f"{NAME}mlp.router.gate.weight", f"{HF_NAME}router.proj.weight"),
    Rule(f"{NAME}mlp.router.norm.weight", f"{HF_NAME}router.scale"),
    Rule(f"{NAME}mlp.router.expert_scales", f"{HF_NAME}router.per_expert_scale"),
    *(Rule(f"{NAME}mlp.{m}.weight", f"{HF_NAME}{theirs}.weight") for m, theirs in _NORMS.items()),
    *(
        Rule(f"{NAME}mlp.shared_expert.{m}_proj.weight", f"{HF_NAME}mlp.{m}_proj.weight")
        for m in ("gate", "up", "down")
    ),
    *fused(
        tuple(f"{_EXPERT}{m}_proj.weight" for m in ("gate", "up")),
        f"{_HF_EXPERTS}gate_up_proj",
        lambda model: consecutive_rows(model.expert_dim, model.expert_dim),
    ),
    Rule(f"{_EXPERT}down_proj.weight", f"{_HF_EXPERTS}down_proj"),
)
_POSITIONS: Mapping[str, Any] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
"""Rotary positions by kind of layer in files that do not give them."""
_HEADS = {"head_dim": "head_dim", "num_key_value_heads": "n_kv_heads"}
"""Key of `config.json` that may differ between layers -> key of `[model.global_attention]`."""
_PERIOD = 6


def _read(c: Config, where: str) -> Table:
    kinds = _kinds(c, where)
    config = {**c, "rope_parameters": c["rope_parameters"] or _POSITIONS}
    table = common.shape(c) | common.feed_forward(c, where, "hidden_activation") | common.biases(c)
    windows = common.windows(c, kinds, where, differ=True)
    positions = common.rotary_by_layer_kind(config, where, _POSITIONS[SLIDING]["rope_theta"])
    if not windows:
        positions.pop("local_rope_theta", None)
    table |= windows | positions | _mixers(c, kinds, where) | _shared(c)
    table |= _experts(c, where)
    if c["hidden_size_per_layer_input"]:
        table["layer_embedding_dim"] = c["hidden_size_per_layer_input"]
        if c["vocab_size_per_layer_input"] != c["vocab_size"]:
            raise UserError(
                f"{where}: vocab_size_per_layer_input = {c['vocab_size_per_layer_input']} and "
                f"vocab_size = {c['vocab_size']}: jaxforge's model has one vocabulary"
            )
    if c["final_logit_softcapping"] is not None:
        table["final_logit_softcap"] = c["final_logit_softcapping"]
    return table | {
        "norm_placement": "sandwich", "embedding_multiplier": c["hidden_size"] ** 0.5,
        "attention_scale": 1.0, "qk_norm": True, "value_norm": True,
        "qk_norm_eps": c["rms_norm_eps"], "layer_multipliers": True,
    }  # fmt: skip


def _kinds(c: Config, where: str) -> list[str]:
    """Return the kind of attention of each layer; transformers makes that of the last one full."""
    kinds = common.sliding_kinds({**c, "sliding_window_pattern": _PERIOD})
    common.check_layer_types(kinds, c["num_hidden_layers"], (FULL, SLIDING), where)
    return [*kinds[:-1], FULL]


def _mixers(c: Config, kinds: Sequence[str], where: str) -> Table:
    """Read the heads of layers with full attention, if they are others than those with a window."""
    own = {"head_dim": common.head_size(c), "num_key_value_heads": c["num_key_value_heads"]}
    heads = own | _full_heads(c, kinds, where)
    if heads == own and not c["attention_k_eq_v"] and not c["num_kv_shared_layers"]:
        return {}
    mixers = [GLOBAL_ATTENTION if kind == FULL else ATTENTION for kind in kinds]
    sizes = {key: heads[hf_key] for hf_key, key in _HEADS.items()}
    return {
        "mixer_pattern": common.shortest_period(mixers),
        GLOBAL_ATTENTION: {**sizes, "keys_as_values": c["attention_k_eq_v"]},
    }


def _full_heads(c: Config, kinds: Sequence[str], where: str) -> Table:
    """Return the keys of layers with full attention that differ from those of the model.

    Raises:
        UserError: a file gives other keys, or different ones for some layers.
    """
    if c["per_layer_config"] is None:  # published files
        few = c["num_global_key_value_heads"] if c["attention_k_eq_v"] else None
        heads = {"head_dim": c["global_head_dim"], "num_key_value_heads": few}
        return {key: value for key, value in heads.items() if value is not None}
    by_layer = c["per_layer_config"]
    if not by_layer:
        return {}
    full = _padded_indices(i for i, kind in enumerate(kinds) if kind == FULL)
    heads = next(iter(by_layer.values()))
    if by_layer != dict.fromkeys(full, heads) or not _are_heads(heads):
        raise UserError(
            f"{where}: per_layer_config = {reprlib.repr(by_layer)}: all layers of {FULL} must have "
            f"the same {' and '.join(_HEADS)}, and other layers nothing"
        )
    return dict(heads)


def _padded_indices(layers: Iterable[int]) -> list[str]:
    """Return the keys of layers in `per_layer_config`: as many digits as the last one has."""
    names = [str(i) for i in layers]
    return [name.zfill(len(names[-1])) for name in names]


def _is_table(value: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    return value is None or isinstance(value, dict)


def _are_heads(heads: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    is_table = isinstance(heads, dict) and heads.keys() <= _HEADS.keys()
    return is_table and all(map(integer(), heads.values()))


def _shared(c: Config) -> Table:
    """Read the layers that share keys and values."""
    if not c["num_kv_shared_layers"]:
        return {}
    wide = {"kv_shared_ffn_dim": 2 * c["intermediate_size"]} if c["use_double_wide_mlp"] else {}
    return {"n_kv_shared_layers": c["num_kv_shared_layers"], **wide}


def _experts(c: Config, where: str) -> Table:
    """Read the experts, next to which the feed-forward is a shared expert.

    Raises:
        UserError: a size is missing.
    """
    if not c["enable_moe_block"]:
        return {}
    sizes = {"num_experts": "num_experts", "num_experts_per_tok": "top_k_experts",
             "moe_intermediate_size": "moe_intermediate_size"}  # fmt: skip
    if missing := [theirs for key, theirs in sizes.items() if c[key] is None]:
        raise UserError(f"{where}: the config does not give {', '.join(missing)}")
    return {
        "num_experts": c["num_experts"],
        "moe_top_k": c["num_experts_per_tok"],
        "moe_expert_dim": c["moe_intermediate_size"],
        "moe_shared_experts": 1,
        "moe_shared_expert_dim": c["intermediate_size"],
        "moe_separate_norms": True,
        "moe_expert_scales": True,
    }


def _write(model: ModelConfig) -> Table:
    """Return the keys that `_read` reads."""
    usual = model.head_sizes(ATTENTION)
    has_others = GLOBAL_ATTENTION in model.mixers
    heads = model.head_sizes(GLOBAL_ATTENTION) if has_others else usual
    keys: Table = {
        **common.shape_keys(model),
        **common.rotary_by_layer_kind_keys(model),
        "hidden_activation": common.activation_key(model),
        "attention_bias": model.qkv_bias and model.o_bias,
        "final_logit_softcapping": model.final_logit_softcap,
        "sliding_window": model.sliding_window or model.max_seq_len,
        "layer_types": common.layer_kinds(model),
        # Read by all releases of transformers; the newest write `per_layer_config`.
        "global_head_dim": heads.head_size,
        "num_global_key_value_heads": heads.kv_heads,
        "attention_k_eq_v": heads.projections == 1,
        "enable_moe_block": model.is_moe,
        "num_kv_shared_layers": model.n_kv_shared_layers,
        "use_double_wide_mlp": model.kv_shared_ffn_dim == 2 * model.ffn_dim,
        "hidden_size_per_layer_input": model.layer_embedding_dim or 0,
        "vocab_size_per_layer_input": model.vocab_size,
    }
    if heads.projections > 1 and heads.kv_heads != usual.kv_heads:
        # The keys above cannot say it.
        theirs = {"head_dim": heads.head_size, "num_key_value_heads": heads.kv_heads}
        full = (i for i, window in enumerate(model.windows) if window is None)
        keys["per_layer_config"] = dict.fromkeys(_padded_indices(full), theirs)
    if not model.is_moe:
        return keys
    return keys | {
        "intermediate_size": model.shared_expert_dim,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.moe_top_k,
        "moe_intermediate_size": model.expert_dim,
    }


GEMMA4_FAMILY = Family(
    "gemma4_text",
    name_map("hf-gemma4", "Gemma4ForCausalLM", *_RULES),
    {**{key: value for key, value in COMMON.items() if key not in ("hidden_act", "rope_scaling")},
     "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
     "rope_theta": 1e6, "tie_word_embeddings": True, "attention_bias": False,
     "sliding_window": 512, "layer_types": None, "final_logit_softcapping": None,
     "per_layer_config": None, "global_head_dim": 512, "num_global_key_value_heads": None,
     "hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": 262_144,
     "num_kv_shared_layers": 0, "use_double_wide_mlp": False,
     "attention_k_eq_v": False, "use_bidirectional_attention": None, "enable_moe_block": False,
     "num_experts": None, "num_experts_per_tok": None, "moe_intermediate_size": None},
    summary="the text models of Gemma 4: wider heads in full layers, keys as values, shared keys "
            "and values, embeddings of layers, experts next to a feed-forward",
    read=_read,
    write=_write,
    names={"top_k_experts": "num_experts_per_tok"},
    ranges={"use_bidirectional_attention": lambda value: value in (None, "vision"),
            "hidden_size_per_layer_input": nullable(integer(0)), "num_kv_shared_layers": LAYER,
            "global_head_dim": integer(), "per_layer_config": _is_table,
            **dict.fromkeys(("num_global_key_value_heads", "num_experts", "num_experts_per_tok",
                             "moe_intermediate_size"), nullable(integer()))},
    experts_are_optional=True,
)  # fmt: skip
