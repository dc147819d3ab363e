"""Description of a transformers family, and the parameter names that most families share."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from jaxforge.config.model import ModelConfig
from torch_compat.names.table import EMBEDDING, HEAD, Fused, Layout, NameMap, Rule

Config = Mapping[str, Any]
"""A `config.json` with what transformers takes for absent keys, by the keys that Llama has."""
Table = dict[str, Any]
"""Keys of `[model]`."""


@dataclasses.dataclass(frozen=True)
class Family:
    """Architecture of transformers.

    Attributes:
        model_type: of `config.json`.
        dialect: how its parameters are called; `about` is the class in transformers.
        defaults: all its keys, with what transformers takes for one that is absent; None, where a
            file has it, means otherwise.
        read: (config, where it is from) -> `[model]`.
        write: `[model]` -> its keys by Llama's names (`keys` has its own); reading them again tells
            whether the family can be that model.
        only: keys with a single supported value.
        names: its own name of a key -> Llama's, which transformers does not read in this family.
        aliases: another name of a key that transformers reads as well -> the usual one.
        unused: keys that its files have and its model does not look at.
        divides: whether transformers insists on heads that divide the width.
        further: key of how many layers its files have after the last, to predict further tokens.
    """

    model_type: str
    dialect: NameMap
    defaults: Config
    read: Callable[[Config, str], Table]
    write: Callable[[ModelConfig], Table]
    only: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unused: Collection[str] = ()
    requires_head_divisor: bool = False
    further_layers_key: str | None = None

    @property
    def has_experts(self) -> bool:
        """True if the feed-forward has experts."""
        return "num_experts_per_tok" in self.defaults

    def name_in_family(self, key: str) -> str:
        """The family's own name of a key of Llama's."""
        return next((own for own, usual in self.names.items() if usual == key), key)

    def llama_name(self, key: str) -> str:
        """Return Llama's name of a key of the family."""
        return self.names.get(key) or self.aliases.get(key, key)

    def keys(self, model: ModelConfig) -> Table:
        """Return the keys of `config.json` for a model, by the names that transformers reads."""
        return {self.name_in_family(key): value for key, value in self.write(model).items()}


OURS, THEIRS = "layers.{i}.", "model.layers.{i}."

OUTSIDE = (
    Rule(EMBEDDING, "model.embed_tokens.weight"),
    Rule(HEAD, "lm_head.weight"),
    Rule("norm.weight", "model.norm.weight"),
)
ATTENTION = tuple(
    Rule(f"{OURS}attention.{m}_proj.weight", f"{THEIRS}self_attn.{m}_proj.weight") for m in "qkvo"
)
ATTENTION_BIASES = tuple(
    Rule(f"{OURS}attention.{m}_proj.bias", f"{THEIRS}self_attn.{m}_proj.bias", optional=True)
    for m in "qkvo"
)
QK_NORMS = tuple(
    Rule(f"{OURS}attention.{m}_norm.weight", f"{THEIRS}self_attn.{m}_norm.weight") for m in "qk"
)
PRE_NORMS = (
    Rule(f"{OURS}attention_norm.weight", f"{THEIRS}input_layernorm.weight"),
    Rule(f"{OURS}mlp_norm.weight", f"{THEIRS}post_attention_layernorm.weight"),
)
POST_NORMS = (
    Rule(f"{OURS}attention_post_norm.weight", f"{THEIRS}post_attention_layernorm.weight"),
    Rule(f"{OURS}mlp_post_norm.weight", f"{THEIRS}post_feedforward_layernorm.weight"),
)
SANDWICH_NORMS = (
    Rule(f"{OURS}attention_norm.weight", f"{THEIRS}input_layernorm.weight"),
    Rule(f"{OURS}mlp_norm.weight", f"{THEIRS}pre_feedforward_layernorm.weight"),
    *POST_NORMS,
)
GATED = tuple(
    Rule(f"{OURS}mlp.{m}_proj.weight", f"{THEIRS}mlp.{m}_proj.weight")
    for m in ("gate", "up", "down")
)
GATED_BIASES = tuple(
    Rule(f"{OURS}mlp.{m}_proj.bias", f"{THEIRS}mlp.{m}_proj.bias", optional=True)
    for m in ("gate", "up", "down")
)
LLAMA = (*OUTSIDE, *PRE_NORMS, *ATTENTION, *GATED)
"""Llama's table, without biases."""

_IGNORED = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\..*")
_REFUSED = {
    r".*\.router\.expert_ema": "no family chooses experts as KempnerForge's sigmoid router does",
    r".*\.router\.(expert_bias|gate\.bias)": "this family's router has no bias",
    r".*\.shared_expert\..*": "this family has no shared expert",
    r".*\.shared_expert_gate\..*": "this family has no gate of its shared expert",
    r".*\.attention\.sinks": "this family has no attention sinks; hf-gpt-oss has",
    r".*norm\.bias": "this family has no LayerNorm; hf-stablelm has",
    r".*\.[qk]_norm\.weight": "this family has no q/k norms; hf-qwen3 has",
    r".*\.[qkv]_proj\.bias": "this family has no biases; hf-qwen2 has",
}


def name_map(name: str, about: str, *rules: Rule, ignored: tuple[str, ...] = (),
            renamed: tuple[tuple[str, str], ...] = ()) -> NameMap:  # fmt: skip
    """Return a family's table of names.

    Args:
        name: what the command line calls it.
        about: the class in transformers.
        rules: the table.
        ignored: patterns of keys that hold nothing to keep, in addition to frequencies.
        renamed: pattern of older names -> what they are now.
    """
    return NameMap(name, about, rules, (*_IGNORED, *ignored), _REFUSED, renamed=renamed)


def fused(ours: tuple[str, ...], theirs: str, layout: Layout, *, transposed: bool = False,
          optional: bool = False) -> tuple[Rule, ...]:  # fmt: skip
    """Rules of some parameters that are one of theirs.

    Args:
        ours: our names, in the order that `layout` has.
        theirs: their name.
        layout: which of their rows are whose.
        transposed: whether theirs is [in, out].
        optional: whether not every model has them.
    """
    return tuple(
        Rule(name, theirs, Fused(part, layout, transposed), optional)
        for part, name in enumerate(ours)
    )
