"""Llama 4's text models (Meta, 2025): chunks, layers without positions, scaled expert inputs."""

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import common, experts
from torch_compat.families.common import COMMON, FULL
from torch_compat.families.family import (
    HF_NAME,
    NAME,
    OUTSIDE,
    PAIRED_ATTENTION,
    PRE_NORMS,
    Config,
    Family,
    Table,
    consecutive_rows,
    fused,
    name_map,
)
from torch_compat.families.values import LAYER, list_of
from torch_compat.names.table import Rule, Transposed

_CHUNKED = "chunked_attention"
_FEED_FORWARD = f"{HF_NAME}feed_forward."
_EXPERT = f"{NAME}mlp.experts.{{j}}."
_PROJECTIONS = ("gate", "up", "down")
_RULES = (
    *OUTSIDE,
    *PRE_NORMS,
    *PAIRED_ATTENTION,
    Rule(f"{NAME}mlp.router.gate.weight", f"{_FEED_FORWARD}router.weight"),
    *fused(
        tuple(f"{_EXPERT}{m}_proj.weight" for m in ("gate", "up")),
        f"{_FEED_FORWARD}experts.gate_up_proj",
        lambda model: consecutive_rows(model.expert_dim, model.expert_dim),
        transposed=True,
    ),
    Rule(f"{_EXPERT}down_proj.weight", f"{_FEED_FORWARD}experts.down_proj", Transposed()),
    *(
        Rule(f"{NAME}mlp.{part}{m}_proj.weight", f"{_FEED_FORWARD}{part}{m}_proj.weight")
        for part in ("shared_expert.", "")
        for m in _PROJECTIONS
    ),
)


def _read(c: Config, where: str) -> Table:
    table = common.shape({**c, "intermediate_size": c["intermediate_size_mlp"]})
    table |= common.rotary(c, where) | common.feed_forward(c, where) | common.biases(c)
    return {**table, **_positions(c, where), **_experts(c, where)}


def _positions(c: Config, where: str) -> Table:
    """Read the layers with rotary positions, chunks, temperature and norms of q and k.

    Raises:
        UserError: the lists of layers are too short, or of unknown kinds.
    """
    n_layers, every = c["num_hidden_layers"], c["no_rope_layer_interval"]
    # Despite the name of the key, 1 marks a layer with rotary positions.
    has_rope = c["no_rope_layers"] or [(i + 1) % every != 0 for i in range(n_layers)]
    # By default, layers with rotary positions attend within chunks.
    kinds = c["layer_types"] or [_CHUNKED if turn else FULL for turn in has_rope]
    if len(has_rope) < n_layers or len(kinds) != n_layers or not set(kinds) <= {FULL, _CHUNKED}:
        raise UserError(
            f"{where}: no_rope_layers and layer_types must have {n_layers} layers, of {FULL} and "
            f"{_CHUNKED}"
        )
    pattern, chunk = [bool(turn) for turn in has_rope[:n_layers]], c["attention_chunk_size"]
    table: Table = {} if all(pattern) else {"rope_pattern": pattern}
    if _CHUNKED in kinds and chunk < c["max_position_embeddings"]:
        short = [kind.removesuffix("_attention") for kind in kinds]
        table |= {
            "attention_chunk_size": chunk,
            "attention_pattern": short if FULL in kinds else [],
        }
    if c["attn_temperature_tuning"] and not all(pattern):
        table |= {"attn_temperature_scale": c["attn_scale"],
                  "attn_temperature_floor": c["floor_scale"]}  # fmt: skip
    if c["use_qk_norm"] and any(pattern):
        table |= {"qk_l2_norm": True, "qk_norm_eps": c["rms_norm_eps"]}
    return table


def _experts(c: Config, where: str) -> Table:
    width, step = c["intermediate_size"], c["interleave_moe_layer_step"]
    every = range(step - 1, c["num_hidden_layers"], step)
    layers = every if c["moe_layers"] is None else c["moe_layers"]
    return {
        **experts.softmax({**c, "norm_topk_prob": False}, "num_local_experts", "intermediate_size"),
        **experts.chosen_layers(layers, c, where),
        "moe_router": "sigmoid_topk",
        "moe_bias_update": "none",
        "moe_score_inputs": True,
        "moe_shared_experts": 1,
        "moe_shared_expert_dim": width,
    }


def _write(model: ModelConfig) -> Table:
    temperature: Table = {"floor_scale": model.attn_temperature_floor}
    if (scale := model.attn_temperature_scale) is not None:
        temperature["attn_scale"] = scale
    return {
        **common.llama_keys(model),
        "intermediate_size": model.expert_dim,
        "intermediate_size_mlp": model.ffn_dim,
        "attention_bias": model.qkv_bias and model.o_bias,
        "num_local_experts": model.num_experts,
        "num_experts_per_tok": model.moe_top_k,
        "moe_layers": [i for i, has in enumerate(model.has_experts) if has],
        "no_rope_layers": [int(rope is not None) for rope in model.ropes],
        "layer_types": [FULL if chunk is None else _CHUNKED for chunk in model.chunks],
        "attention_chunk_size": model.attention_chunk_size or model.max_seq_len,
        "use_qk_norm": model.qk_l2_norm,
        "attn_temperature_tuning": scale is not None,
        **temperature,
    }


LLAMA4_TEXT_FAMILY = Family(
    "llama4_text",
    name_map("hf-llama4-text", "Llama4ForCausalLM", *_RULES),
    {**COMMON, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
     "rope_theta": 500000.0, "attention_bias": False, "intermediate_size": 8192,
     "intermediate_size_mlp": 16384, "num_local_experts": 16, "num_experts_per_tok": 1,
     "moe_layers": None, "interleave_moe_layer_step": 1, "use_qk_norm": True,
     "no_rope_layers": None, "no_rope_layer_interval": 4, "attention_chunk_size": 8192,
     "layer_types": None, "attn_temperature_tuning": True, "floor_scale": 8192, "attn_scale": 0.1},
    summary="the text models of Llama 4: chunks, layers without rotary positions, attention "
            "temperature, q/k norms without weights, experts whose inputs are scaled",
    read=_read,
    write=_write,
    ranges={"no_rope_layers": list_of(lambda value: value in (0, 1)), "moe_layers": list_of(LAYER),
            "attn_temperature_tuning": lambda value: type(value) in (bool, int)},
    unused=("for_llm_compressor", "router_jitter_noise", "cache_implementation", *experts.LOSSES),
)  # fmt: skip
