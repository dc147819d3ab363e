"""Conversion between Hugging Face's `config.json` and `[model]`.

Import:  config.json ─► _complete (checks, defaults, Llama's names) ─► Family.read ─► [model]
Export:  [model] ─► select_family (the first whose keys mean the same model) ─► Family.keys
"""

import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.checkpoint.network_settings import network_settings, same
from torch_compat.families import FAMILIES, Family
from torch_compat.families.common import NEEDED
from torch_compat.families.values import integer, is_possible
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
_MOST_SHOWN = 3
DEQUANTIZED = (
    "take a copy in bfloat16, such as transformers saves of a model that it opened by "
    "from_pretrained(..., quantization_config=Mxfp4Config(dequantize=True))"
)
"""Advice for files in MXFP4."""
_E4M3 = ("e4m3", "float8_e4m3fn")
"""Names of the 8-bit format in the files of DeepSeek and of MiniMax."""
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
        block, is_edge = quantized.get("weight_block_size"), integer()
        is_e4m3 = quantized.get("fmt", "e4m3") in _E4M3
        if is_e4m3 and isinstance(block, list) and len(block) == 2 and all(map(is_edge, block)):
            return block[0], block[1]
    is_mxfp4 = isinstance(quantized, dict) and quantized.get("quant_method") == "mxfp4"
    raise UserError(
        f"{where}: jaxforge's model has no counterpart of quantization_config: the weights are "
        + (f"quantized, in MXFP4: {DEQUANTIZED}" if is_mxfp4 else "quantized in another way than "
           'in e4m3 with a scale per block ("quant_method": "fp8" with "weight_block_size")')
    )  # fmt: skip


def _family(config: Mapping[str, Any], where: str) -> Family:
    name = config.get("model_type")
    if isinstance(name, str) and name in FAMILIES:
        return FAMILIES[name]
    raise UserError(f"{where}: model_type {reprlib.repr(name)} is not one of {', '.join(FAMILIES)}")


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
    # Ranges come before arithmetic with the values: sizes of a stranger may overflow or divide by
    # zero.
    for key, value in usual.items():
        if not is_possible(family, key, value):
            name = family.name_in_family(key)
            raise UserError(f"{where}: {name} = {reprlib.repr(value)} is not possible for a model")
    problems = list(_unknown(usual, family))
    if problems:
        raise UserError(
            f"{where}: jaxforge's model has no counterpart of {'; '.join(problems)} in "
            f"{family.model_type}"
        )
    # transformers treats a null flag as false, whatever the flag's default is.
    flags = {key for key, default in family.defaults.items() if isinstance(default, bool)}
    null_flags = {key: False for key in flags if usual.get(key, True) is None}
    complete = {**family.defaults, **usual, **null_flags}
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
        # A null repeats the default, which must not hide the value under the key's other name.
        if usual.get(name) is not None and value is None:
            continue
        if usual.get(name, value) not in (None, value):
            raise UserError(
                f"{where}: {key} = {reprlib.repr(value)} contradicts another key of the same "
                f"meaning, {reprlib.repr(usual[name])}. Remove one of them"
            )
        usual[name] = value
    for family_key, name in family.names.items():
        is_read = family_key in config or name not in config or name in family.aliases
        if not is_read and usual[name] not in (None, family.defaults.get(name)):
            raise UserError(
                f"{where}: transformers does not read {name} in {family.model_type}. Rename "
                f"{name} = {reprlib.repr(usual[name])} to {family_key} if the model was trained "
                "with it, or remove it"
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


def _is_irrelevant(key: str) -> bool:
    """Return whether a key is irrelevant to the model in every family."""
    is_known = key in _NO_PART_OF_THE_MODEL | _OF_GENERATION | _OF_TRAINING
    return is_known or key.startswith(_OF_TOOLS)


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
    # A family fits if its keys, read again, describe the same network: no list of features to
    # maintain.
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
    # Keys that describe the same network are kept as they were imported, for loaders that compare
    # files.
    keys = model_keys(config.model, FAMILIES[family], before)
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


def model_keys(model: ModelConfig, family: Family, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a model; imported keys if they describe the same model and family."""
    keys = family.keys(model)
    if before.get("model_type") != family.model_type or differences(model, before, CONFIG):
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
        return differences(model, written, family.model_type)
    except (UserError, ValueError) as error:
        return [f"{_NO_SUCH} ({error})"]


def differences(model: ModelConfig, config: Mapping[str, Any], where: str) -> list[str]:
    """Return the settings of a model that a `config.json` describes otherwise.

    Raises:
        UserError: the config is not supported (`model_table`).
        ValueError: it describes no model.
    """
    settings = network_settings(model)
    read = network_settings(ModelConfig(**model_table(config, where)))
    return [f"{key} = {settings[key]!r}" for key in settings if not same(settings[key], read[key])]
