"""Description of a family of transformers, and parameter names that most families share."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from jaxforge.config.model import ModelConfig
from torch_compat.names.table import (
    EMBEDDING,
    HEAD,
    Fused,
    InterleavedRotary,
    Layout,
    LayoutChange,
    ModuleRules,
    NameMap,
    Rule,
)

Config = Mapping[str, Any]
"""`config.json` with the defaults of transformers, under Llama's names of keys."""
Table = dict[str, Any]
"""Keys of `[model]`."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Architecture of transformers.

    Attributes:
        model_type: value in `config.json`.
        dialect: name map of its parameters; `about` is the class in transformers.
        defaults: all its keys with the defaults of transformers; None: no default, or a null value
            has a meaning of its own.
        read: (config, file for messages) -> `[model]`.
        write: `[model]` -> its keys by Llama's names; a model fits if reading the keys again gives
            the same `[model]`.
        summary: "models: special features", for the table of docs/torch_compat.md.
        only: keys with a single supported value.
        ranges: key -> whether a value is possible, if the default does not tell it (`values`).
        names: the family's name of a key -> Llama's name, which transformers does not accept here.
        aliases: alternative name of a key that transformers also accepts -> the usual name.
        unused: keys of its files that the model ignores.
        requires_head_divisor: whether transformers requires that the number of heads divides the
            width.
        further_layers_key: key of the number of layers after the last that predict further tokens.
            Its rules include `PREDICTION`, or its name map has `module_rules`.
        experts_are_optional: whether a family with experts also has models without.
        is_usual: whether exports prefer the family to those that are not usual.
        float32: dtype of the weights in files -> pattern of jaxforge's names of the weights that
            transformers keeps in float32 (`_keep_in_fp32_modules_strict`, for float16 also
            `_keep_in_fp32_modules`). State such as selection biases is always in float32.
    """

    model_type: str
    dialect: NameMap
    defaults: Config
    read: Callable[[Config, str], Table]
    write: Callable[[ModelConfig], Table]
    summary: str = ""
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ranges: Mapping[str, Callable[[Any], bool]] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: Collection[str] = ()
    requires_head_divisor: bool = False
    further_layers_key: str | None = None
    experts_are_optional: bool = False
    is_usual: bool = False
    float32: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def may_have(self, *, experts: bool) -> bool:
        """Return whether models of the family may have experts, or may have none."""
        has_experts = "num_experts_per_tok" in self.defaults
        return self.experts_are_optional or has_experts == experts

    def keeps_in_float32(self, name: str, dtype: str) -> bool:
        """Return whether a weight is in float32 in files whose other weights have a dtype."""
        return re.fullmatch(self.float32.get(dtype, ""), name) is not None

    def name_in_family(self, key: str) -> str:
        """Return the family's name of a key of Llama."""
        return next((own for own, usual in self.names.items() if usual == key), key)

    def llama_name(self, key: str) -> str:
        """Return Llama's name of a key of the family."""
        return self.names.get(key) or self.aliases.get(key, key)

    def keys(self, model: ModelConfig) -> Table:
        """Return the keys of `config.json` for a model, by the names that transformers reads."""
        return {self.name_in_family(key): value for key, value in self.write(model).items()}


NAME, HF_NAME = "layers.{i}.", "model.layers.{i}."

OUTSIDE = (
    Rule(EMBEDDING, "model.embed_tokens.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule("norm.weight", "model.norm.weight"),
)
ATTENTION = tuple(
    Rule(f"{NAME}attention.{m}_proj.weight", f"{HF_NAME}self_attn.{m}_proj.weight") for m in "qkvo"
)
ATTENTION_BIASES = tuple(
    Rule(f"{NAME}attention.{m}_proj.bias", f"{HF_NAME}self_attn.{m}_proj.bias", optional=True)
    for m in "qkvo"
)
_PAIRED = {"q": InterleavedRotary(), "k": InterleavedRotary()}
PAIRED_ATTENTION = tuple(
    Rule(f"{NAME}attention.{m}_proj.{kind}", f"{HF_NAME}self_attn.{m}_proj.{kind}", _PAIRED.get(m),
         kind == "bias")
    for m in "qkvo" for kind in ("weight", "bias")
)  # fmt: skip
"""Rules of attention that rotates neighbouring channels."""
QK_NORMS = tuple(
    Rule(f"{NAME}attention.{m}_norm.weight", f"{HF_NAME}self_attn.{m}_norm.weight") for m in "qk"
)
PRE_NORMS = (
    Rule(f"{NAME}attention_norm.weight", f"{HF_NAME}input_layernorm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{HF_NAME}post_attention_layernorm.weight"),
)
NORM_BIASES = (
    Rule("norm.bias", "model.norm.bias"),
    Rule(f"{NAME}attention_norm.bias", f"{HF_NAME}input_layernorm.bias"),
    Rule(f"{NAME}mlp_norm.bias", f"{HF_NAME}post_attention_layernorm.bias"),
)
POST_NORMS = (
    Rule(f"{NAME}attention_post_norm.weight", f"{HF_NAME}post_attention_layernorm.weight"),
    Rule(f"{NAME}mlp_post_norm.weight", f"{HF_NAME}post_feedforward_layernorm.weight"),
)
SANDWICH_NORMS = (
    Rule(f"{NAME}attention_norm.weight", f"{HF_NAME}input_layernorm.weight"),
    Rule(f"{NAME}mlp_norm.weight", f"{HF_NAME}pre_feedforward_layernorm.weight"),
    *POST_NORMS,
)
GATED = tuple(
    Rule(f"{NAME}mlp.{m}_proj.weight", f"{HF_NAME}mlp.{m}_proj.weight")
    for m in ("gate", "up", "down")
)
GATED_BIASES = tuple(
    Rule(f"{NAME}mlp.{m}_proj.bias", f"{HF_NAME}mlp.{m}_proj.bias", optional=True)
    for m in ("gate", "up", "down")
)
PREDICTION = tuple(
    Rule(f"{NAME}{name}.weight", f"{HF_NAME}{hf_name}.weight", optional=True)
    for name, hf_name in (
        ("embedding_norm", "enorm"),
        ("hidden_norm", "hnorm"),
        ("input_proj", "eh_proj"),
        ("output_norm", "shared_head.norm"),
    )
)
"""Rules of modules of multi-token prediction, which are the layers after the last."""
LLAMA = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *GATED)
"""Rules of Llama without biases."""

_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\..*")


def name_map(name: str, about: str, *rules: Rule, ignored: tuple[str, ...] = (),
            renamed: tuple[tuple[str, str], ...] = (),
            optional_groups: Mapping[str, str] | None = None,
            module_rules: ModuleRules | None = None) -> NameMap:  # fmt: skip
    """Return the name map of a family.

    Args:
        name: name on the command line.
        about: the class in transformers.
        rules: the table.
        ignored: patterns of keys without trained values, in addition to rotary frequencies.
        renamed: (pattern of outdated keys, current key) pairs.
        optional_groups: pattern of keys without counterpart -> what an import leaves out.
        module_rules: see `NameMap`.
    """
    return NameMap(
        name, about, rules, (*_IGNORED, *ignored), renamed=renamed,
        optional_groups=optional_groups or {}, module_rules=module_rules,
    )  # fmt: skip


def fused(names: tuple[str, ...], key: str, layout: Layout, *, transposed: bool = False,
          change: LayoutChange | None = None,
          optional: bool = False) -> tuple[Rule, ...]:  # fmt: skip
    """Return the rules of parameters that the dialect stores in one tensor.

    Args:
        names: jaxforge's names, in the order of `layout`.
        key: the dialect's key.
        layout: the rows of each parameter.
        transposed: whether the dialect's tensor is [in, out].
        change: conversion of the layout of each parameter.
        optional: whether models may lack the parameters.
    """
    return tuple(
        Rule(name, key, Fused(part, layout, transposed, change), optional)
        for part, name in enumerate(names)
    )


def consecutive_rows(*sizes: int) -> list[np.ndarray]:
    """Return the rows of parts that follow each other."""
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def queries_keys_values(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of q, k and v in `qkv_proj`."""
    keys = model.kv_heads * model.head_size
    return consecutive_rows(model.n_heads * model.head_size, keys, keys)


def grouped_rows(groups: int, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return the rows of each part of a matrix that stores all parts of a group together.

    Args:
        groups: number of groups, such as heads.
        sizes: rows of each part in a group.
    """
    # [groups, rows of a group]
    rows = np.arange(groups * sum(sizes)).reshape(groups, -1)
    return [part.reshape(-1) for part in np.split(rows, np.cumsum(sizes)[:-1], axis=1)]


def queries_with_gates(model: ModelConfig) -> list[np.ndarray]:
    """Return the rows of `q_proj` and of attention's `gate_proj` in a fused matrix.

    Qwen3-Next stores the h rows of a head's query and then the h rows of the head's output gate.
    """
    return grouped_rows(model.n_heads, (model.head_size, model.head_size))
