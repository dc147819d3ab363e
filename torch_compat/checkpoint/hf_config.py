"""Conversion between Hugging Face's `config.json` and our `[model]`."""

import math
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.model import MIXER_TABLES, ModelConfig
from jaxforge.errors import UserError
from torch_compat.families import FAMILIES, RETIRED_FAMILIES, UNSUPPORTED_FAMILIES, Family
from torch_compat.families.common import NEEDED, PLAIN, check_table, is_size, scaling_keys
from torch_compat.formats import limits
from torch_compat.formats.limits import is_name

CONFIG = "config.json"

_NO_PART_OF_THE_MODEL = frozenset({
    "architectures", "attention_dropout", "attention_probs_dropout_prob", "attn_implementation",
    "attn_pdrop", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "embd_pdrop",
    "embedding_dropout", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "hidden_dropout", "id2label", "is_decoder", "label2id",
    "model_type", "output_attentions", "output_hidden_states", "pad_token_id", "problem_type",
    "quantization_config", "resid_pdrop", "residual_dropout", "return_dict", "sep_token_id",
    "task_specific_params", "tokenizer_class", "torch_dtype", "torchscript",
    "transformers.js_config", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
"""Keys of any family that do not affect the model's function. jaxforge has no dropout.
`quantization_config` describes the files (`block_of_scales`)."""
_OF_GENERATION = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty", "length_penalty", "max_length", "max_new_tokens",
    "min_length", "min_new_tokens", "min_p", "no_repeat_ngram_size", "num_beam_groups",
    "num_beams", "num_return_sequences", "output_scores", "penalty_alpha", "prefix",
    "remove_invalid_values", "repetition_penalty", "return_dict_in_generate", "stop_strings",
    "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
})  # fmt: skip
"""Generation settings, which older versions store in `config.json`."""
_OF_TRAINING = frozenset({
    "finetuning_task", "neftune_noise_alpha", "pad_to_multiple_of", "tf_legacy_loss",
    "tie_encoder_decoder", "use_bfloat16",
})  # fmt: skip
"""Keys that trainers leave behind."""
_OF_TOOLS = ("_", "unsloth_")
"""Prefixes of keys that tools add and that do not affect the model."""
_OF_THE_EXPORT = frozenset({
    "_attn_implementation", "_name_or_path", "architectures", "auto_map", "dtype",
    "quantization_config", "torch_dtype",
})  # fmt: skip
"""Keys of an imported config that an export does not take over, such as references to code files.
"""
_NOT_COMPARED = ("sdpa_backend", "sliding_window", "attention_chunk_size", "attention_pattern",
                 "rope_theta", "rope_scaling", "local_rope_theta", "rope_pattern",
                 "partial_rotary_factor", "mixer_pattern", "feed_forward_pattern",
                 "mtp_depth")  # fmt: skip
_MOST_SHOWN = 3
DEQUANTIZED = (
    "take a copy in bfloat16, such as transformers saves of a model that it opened by "
    "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))"
)
"""Advice for files in MXFP4."""
_NO_SUCH = "such values"


def model_table(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the `[model]` table of a `config.json`.

    Raises:
        UserError: the model is not supported, or keys are missing or unknown.
    """
    family = _family(config, where)
    table = family.read(_complete(config, family, where), where)
    limits.check_layers(table["n_layers"], table.get("num_experts"), where)
    return table


def further_layers(config: Mapping[str, Any], where: str) -> range:
    """Return the indices of layers in the files beyond those of the model."""
    family = _family(config, where)
    complete = _complete(config, family, where)
    first = complete["num_hidden_layers"]
    return range(
        first, first + (complete[family.further_layers_key] if family.further_layers_key else 0)
    )


def block_of_scales(config: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    """Return rows and columns of the blocks of 8-bit weights that share a scale; None: no 8 bits.

    Raises:
        UserError: the weights are quantized in another way.
    """
    quantized = config.get("quantization_config")
    if not quantized:
        return None
    if isinstance(quantized, dict) and quantized.get("quant_method") == "fp8":
        block, is_edge = quantized.get("weight_block_size"), _is_int_up_to(limits.WIDTH)
        is_e4m3 = quantized.get("fmt", "e4m3") == "e4m3"
        if is_e4m3 and isinstance(block, list) and len(block) == 2 and all(map(is_edge, block)):
            return block[0], block[1]
    is_mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"
    raise UserError(
        f"{where}: jaxforge's model has no counterpart of quantization_config: the weights are "
        + (f"quantized, in MXFP4: {DEQUANTIZED}" if is_mxfp4 else "quantized in another way than "
           'in e4m3 with a scale per block ("quant_method": "fp8" with "weight_block_size")')
    )  # fmt: skip


def select_family(
    model: ModelConfig, dialect: str | None = None, imported: Mapping[str, Any] | None = None
) -> str:
    """Return the family of an export, a key of `FAMILIES`.

    Args:
        model: exported model.
        dialect: name of the requested dialect. None: take the family of `imported` if it supports
            the model, else the first one that does.
        imported: `config.json` with which the run was imported.

    Raises:
        UserError: no family supports the model, or the requested one does not.
    """
    lacks = {
        name: _lacks(family, model)
        for name, family in FAMILIES.items()
        if family.may_have(experts=model.is_moe)
    }
    able = [name for name, missing in lacks.items() if not missing]
    if not able:
        # Families whose config cannot be written at all come last.
        nearest = sorted(
            lacks, key=lambda name: (lacks[name][0].startswith(_NO_SUCH), len(lacks[name]))
        )[:_MOST_SHOWN]
        listed = "; ".join(f"{_dialect(name)} has no {', '.join(lacks[name])}" for name in nearest)
        raise UserError(f"no family of Hugging Face supports this model: {listed}. Export to dcp")
    if dialect is None:
        before = (imported or {}).get("model_type")
        return before if before in able else able[0]
    by_dialect = {_dialect(name): name for name in FAMILIES}
    if by_dialect.get(dialect) not in able:
        missing = lacks.get(by_dialect.get(dialect, ""))
        why = f", which has no {', '.join(missing)}" if missing else ""
        names = " or ".join(map(_dialect, able))
        raise UserError(f"this model can be exported to hf as {names}, not {dialect}{why}")
    return by_dialect[dialect]


def config_json(
    config: JobConfig,
    family: str,
    dtype: str,
    eos_ids: Sequence[int] = (),
    imported: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the `config.json` of an export.

    The export of an imported run keeps the imported keys except those in `_OF_THE_EXPORT`. Keys of
    the model are replaced if their meaning has changed since the import.

    Args:
        config: config of the run.
        family: a key of `FAMILIES`.
        dtype: torch's name of the exported dtype.
        eos_ids: ids of the tokens that end a text.
        imported: `config.json` with which the run was imported, if the run has the same tokens.
    """
    before = {key: value for key, value in (imported or {}).items() if key not in _OF_THE_EXPORT}
    keys = _model_keys(config.model, FAMILIES[family], before)
    return {
        "bos_token_id": None,
        "eos_token_id": eos_token_id(eos_ids),
        "pad_token_id": None,  # some families have a default beyond small vocabularies
        "use_cache": True,
        **{key: value for key, value in before.items() if _is_irrelevant(key)},
        **keys,
        "architectures": [FAMILIES[family].dialect.about],
        "model_type": family,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def eos_token_id(ids: Sequence[int]) -> int | list[int] | None:
    """Return ids of tokens that end a text in the form of `eos_token_id`."""
    return list(ids) if len(ids) > 1 else next(iter(ids), None)


def _is_irrelevant(key: str) -> bool:
    """Return whether a key is irrelevant to the model in every family."""
    is_known = key in _NO_PART_OF_THE_MODEL | _OF_GENERATION | _OF_TRAINING
    return is_known or key.startswith(_OF_TOOLS)


def _model_keys(model: ModelConfig, family: Family, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model; imported keys if they describe the same model and family."""
    keys = family.keys(model)
    if before.get("model_type") != family.model_type:
        return keys
    read = network_settings(ModelConfig(**model_table(before, CONFIG)))
    wanted = network_settings(model)
    if not all(same(read[key], wanted[key]) for key in wanted):
        return keys
    further = {
        key: model.mtp_depth for key in before
        if family.llama_name(key) == family.further_layers_key
    }  # fmt: skip
    return {**before, **further}


def _dialect(family: str) -> str:
    return FAMILIES[family].dialect.name


def _lacks(family: Family, model: ModelConfig) -> list[str]:
    """Return the properties of a model that a family's config cannot express."""
    if family.requires_head_divisor and model.dim % model.n_heads:
        return ["heads that do not divide model.dim"]
    try:
        written = {"model_type": family.model_type, **family.keys(model)}
        again = ModelConfig(**model_table(written, family.model_type))
    except (UserError, ValueError) as error:
        return [f"{_NO_SUCH} ({error})"]
    wanted, settings = network_settings(model), network_settings(again)
    return [f"{key} = {wanted[key]!r}" for key in wanted if not same(wanted[key], settings[key])]


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
        "n_kv_heads": model.kv_heads,
        "head_dim": model.head_size,
        "ffn_hidden_dim": model.ffn_dim if has_dense_layers else None,
        "mixer_pattern": tuple(parts.mixer for parts in model.layer_parts),
        "gated_mlp": model.is_gated,
        "attention_scale": model.attention_scale or model.head_size**-0.5,
        "qk_norm_eps": model.qk_norm_eps if model.uses("qk_norm_eps") else model.norm_eps,
        "sliding_window and attention_pattern": _effective_spans(model.windows, model),
        "attention_chunk_size and attention_pattern": _effective_spans(model.chunks, model),
        "rotary positions": tuple(
            rope and (rope[0], model.rotary_size, scaling_keys(rope[1])) for rope in model.ropes
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
            (1, 1) if groups[0] == groups[1] else (*groups, model.moe_group_score)
        ),
        "feed_forward_pattern and moe_first_dense_layers": tuple(
            parts.feed_forward for parts in model.layer_parts
        ),
        "moe_bias_update": model.bias_update,
        "moe_expert_dim": model.expert_dim,
        "moe_shared_expert_dim": model.shared_expert_dim,
        "moe_shared_expert_gate": model.moe_shared_expert_gate,
    }


def _mixer_settings(model: ModelConfig) -> dict[str, Any]:
    """Return the settings of mixers that layers have, without those of the initialization."""
    tables = {
        mixer: {key: value for key, value in table if not key.startswith("init_")}
        for mixer, table in model.mixer_tables.items()
    }
    return dict.fromkeys(MIXER_TABLES) | tables


def _effective_spans(spans: Sequence[int | None], model: ModelConfig) -> tuple[int | None, ...]:
    """Return windows or chunks of all layers; None if they cover the whole sequence."""
    return tuple(None if n is None or n >= model.max_seq_len else n for n in spans)


def _family(config: Mapping[str, Any], where: str) -> Family:
    family = config.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES:
        if isinstance(family, str) and family in UNSUPPORTED_FAMILIES:
            raise UserError(
                f"{where}: model_type {family!r} takes {UNSUPPORTED_FAMILIES[family]}: not built "
                "yet; "
                f"supported are {', '.join(FAMILIES)}"
            )
        if isinstance(family, str) and family in RETIRED_FAMILIES:
            raise UserError(
                f"{where}: model_type {family!r} was retired: nobody pre-trains such models any "
                "more. Use an earlier version of jaxforge, or the model in PyTorch"
            )
        raise UserError(
            f"{where}: model_type {reprlib.repr(family)} is not one of {', '.join(FAMILIES)}"
        )
    return FAMILIES[family]


def _complete(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return a config with Llama's keys and transformers' defaults for absent keys.

    Raises:
        UserError: keys are missing, unknown, or have impossible values.
    """
    block_of_scales(config, where)  # raises
    usual = _by_usual_names(config, family, where)
    needed = [key for key in NEEDED if family.defaults.get(key, 0) is None]
    missing = [family.name_in_family(key) for key in needed if type(usual.get(key)) is not int]
    if missing:
        raise UserError(f"{where}: it does not give {', '.join(missing)}, or not as whole numbers")
    for key, value in usual.items():
        is_fine = _RANGES.get(key)
        if value is None:
            default = family.defaults.get(key, 0)
            has_size = key in NEEDED and bool(default)
            is_wrong = has_size or (key in _NEVER_NULL and default is not None)
        else:
            is_wrong = is_fine is not None and not is_fine(value)
        if family.experts_are_optional and key == "num_local_experts" and value == 0:
            is_wrong = False
        if is_wrong:
            name = family.name_in_family(key)
            raise UserError(f"{where}: {name} = {reprlib.repr(value)} is not possible for a model")
    problems = list(_unknown(usual, family))
    if problems:
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of {'; '.join(problems)} in "
            f"{family.model_type}"
        )
    complete = {**family.defaults, **usual}
    if family.requires_head_divisor and complete["hidden_size"] % complete["num_attention_heads"]:
        width, heads = map(family.name_in_family, ("hidden_size", "num_attention_heads"))
        raise UserError(
            f"{where}: {width} = {complete['hidden_size']} is not a multiple of {heads} = "
            f"{complete['num_attention_heads']}, which transformers refuses in {family.model_type}"
        )
    return complete


def _by_usual_names(config: Mapping[str, Any], family: Family, where: str) -> dict[str, Any]:
    """Return a config with Llama's keys.

    Raises:
        UserError: two keys of the same meaning differ, or transformers does not read the name of a
            key in this family.
    """
    usual: dict[str, Any] = {}
    for key, value in config.items():
        name = family.llama_name(key)
        if usual.get(name) is not None and value is None:
            continue
        if usual.get(name, value) not in (None, value):
            raise UserError(
                f"{where}: {key} = {reprlib.repr(value)} contradicts another key of the same "
                f"meaning, {reprlib.repr(usual[name])}. Remove one of them"
            )
        usual[name] = value
    for own, name in family.names.items():
        is_read = own in config or name not in config or name in family.aliases
        if not is_read and usual[name] not in (None, family.defaults.get(name)):
            raise UserError(
                f"{where}: transformers does not read {name} in {family.model_type}. Rename "
                f"{name} = {reprlib.repr(usual[name])} to {own} if the model was trained with it, "
                "or remove it"
            )
    return usual


def _unknown(config: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield the keys that a family does not know, and values that are not supported.

    An unknown key with null, false, or an empty list or table has no effect.
    """
    known = family.defaults.keys() | {*family.unused}
    for key, value in config.items():
        if key in family.only:
            wrong = value not in (None, family.only[key])
        else:
            wrong = not (key in known or value in (None, False, [], {}) or _is_irrelevant(key))
        if wrong:
            name = family.name_in_family(key) if is_name(key) else reprlib.repr(key)
            yield f"{name} = {reprlib.repr(value)}"


def _is_int_up_to(most: int, least: int = 1) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _list_of(is_fine: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(is_fine, value))


_COUNTS = ("num_hidden_layers", "num_local_experts", "num_experts", "num_experts_per_tok",
           "n_routed_experts", "n_shared_experts", "n_group", "topk_group", "decoder_sparse_step",
           "no_rope_layer_interval", "sliding_window_pattern",
           "interleave_moe_layer_step", "moe_layer_interval", "mamba_n_heads", "mamba_n_groups",
           "mamba_expand", "mamba_num_heads", "n_groups", "full_attention_interval",
           "linear_num_key_heads", "linear_num_value_heads")  # fmt: skip
_NUMBERS = ("rms_norm_eps", "rope_theta", "initializer_range", "rope_local_base_freq",
            "query_pre_attn_scalar", "embedding_multiplier", "residual_multiplier",
            "attention_multiplier", "logits_scaling", "routed_scaling_factor",
            "swiglu_limit", "attn_scale", "time_step_min", "time_step_max")  # fmt: skip
_WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size", "intermediate_size_mlp",
           "attention_chunk_size", "floor_scale", "mamba_d_state", "mamba_d_conv",
           "mamba_chunk_size", "mamba_head_dim", "ssm_state_size", "conv_kernel", "chunk_size",
           "moe_shared_expert_intermediate_size", "linear_key_head_dim", "linear_value_head_dim",
           "linear_conv_kernel_dim", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
           "v_head_dim")  # fmt: skip
_FLAGS = ("norm_topk_prob", "qkv_bias", "mamba_conv_bias", "mamba_proj_bias", "use_conv_bias")
_FROM = (
    "moe_num_shared_experts",
    "moe_layer_start_index",
    "max_window_layers",
    "first_k_dense_replace",
    "num_nextn_predict_layers",
)
_WIDTHS_OR_0 = ("shared_intermediate_size",)
_NEVER_NULL = frozenset((*_COUNTS, *_NUMBERS, *_WIDTHS, *_WIDTHS_OR_0, *_FROM, *_FLAGS,
                         "mamba_d_head", "moe_layer_end_index"))  # fmt: skip
_RANGES: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(
        (*PLAIN.values(), *_WIDTHS, "num_key_value_heads", "head_dim", "q_lora_rank",
         "original_max_position_embeddings"),
        _is_int_up_to(limits.WIDTH),
    ),
    **dict.fromkeys(_COUNTS, _is_int_up_to(limits.LAYERS)),
    **dict.fromkeys(("sliding_window", *_WIDTHS_OR_0), _is_int_up_to(limits.WIDTH, 0)),
    **dict.fromkeys(_FROM, _is_int_up_to(limits.LAYERS, 0)),
    **dict.fromkeys(
        (*_NUMBERS, "attn_logit_softcapping", "final_logit_softcapping", "partial_rotary_factor",
         "logit_scale", "clip_qkv"),
        is_size,
    ),
    "initializer_range": lambda value: is_size(value) or value == 0,
    **dict.fromkeys(
        ("tie_word_embeddings", "use_sliding_window", "attention_bias", "mlp_bias", "use_bias",
         "use_qkv_bias", "use_parallel_residual", "scale_attn_weights",
         "use_qk_norm", *_FLAGS),
        lambda value: isinstance(value, bool),
    ),
    **dict.fromkeys(("rope_scaling", "rope_parameters"), check_table),
    **dict.fromkeys(("layer_types", "layers_block_type"), _list_of(is_name)),
    "hybrid_override_pattern": lambda value: isinstance(value, str) and is_name(value),
    "attn_layer_indices": _list_of(_is_int_up_to(limits.LAYERS, 0)),
    "mamba_d_head": lambda value: value == "auto" or _is_int_up_to(limits.WIDTH)(value),
    "no_rope_layers": _list_of(lambda value: value in (0, 1)),
    "moe_layer_end_index": _is_int_up_to(limits.LAYERS, -1),
    "moe_layers": _list_of(_is_int_up_to(limits.LAYERS, 0)),
    "attn_temperature_tuning": lambda value: type(value) in (bool, int),
    "mlp_only_layers": _list_of(_is_int_up_to(limits.LAYERS, 0)),
}  # fmt: skip
"""Key -> predicate of possible values. Without limits, the product of a few values would exhaust
the memory."""
