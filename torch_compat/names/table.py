"""Name maps: tables that translate parameter names in both directions.

A "name" is jaxforge's: the path of a parameter of `jaxforge.model` with one entry per layer and
expert, such as `layers.{i}.attention.q_proj.weight`. A "key" is the name of the same tensor in a
"dialect", the naming scheme of another code base. Optimizer moments have the name and the layout of
their parameter.

    name (jaxforge)                              key (hf-llama)
    layers.3.attention.q_proj.weight       <->   model.layers.3.self_attn.q_proj.weight
    layers.3.mlp.experts.0.up_proj.weight  <->   one key per expert, or one packed tensor [E, ...]
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, Self

import numpy as np

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.formats.lazy import LazyTensor, interleave_rows, stack

HEAD = "output_head.proj.weight"
EMBEDDING = "token_embedding.embedding.weight"
POSITIONS = "position_embedding.weight"
_EXPERT = re.compile(r"layers\.\d+\.mlp\.experts\.(\d+)\..*")
_MODULE = re.compile(r"layers\.(\d+)\.(?:(?:embedding|hidden|output)_norm|input_proj)\..*")
_ROUTER = re.compile(r"layers\.\d+\.mlp\.router\.gate\.weight")
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class LayoutChange(Protocol):
    """Conversion between the layouts of a tensor in jaxforge and in a dialect."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the tensor in jaxforge's layout."""
        ...

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the tensor in the dialect's layout."""
        ...


class InterleavedRotary:
    """Layout of q and k in which channels 2i and 2i + 1 of a head are rotated as a pair.

    jaxforge and most families of transformers rotate channels i and i + n/2 of the first n channels
    of a head (`model.partial_rotary_factor`); Meta, GLM and others rotate neighbouring channels.
    Scores do not depend on the order of channels that q and k share, so converted rows are the
    whole difference. Parameters per channel of a head, such as norms, have the same order.
    """

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Move the even rotated channels of each head before the odd ones."""
        if not tensor.shape or tensor.shape[0] % config.head_size:
            return tensor  # of another model: the check of shapes reports it
        return tensor.rows(_even_then_odd(tensor.shape[0], config))

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Interleave the two halves of each head's rotated channels."""
        # The inverse permutation.
        return tensor.rows(np.argsort(_even_then_odd(tensor.shape[0], config)))


class InterleavedChannels(NamedTuple):
    """DeepSeek's layout of the rotary channels of a head: rotated in pairs (2i, 2i + 1).

    Attributes:
        head_size: the config -> rows of a head. Its `rotary_size` last rows are rotated.
        are_first: whether the first rows are rotated instead.
    """

    head_size: Callable[[ModelConfig], int]
    are_first: bool = False

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Move the even rotary channels of each head before the odd ones."""
        if not tensor.shape or tensor.shape[0] % self.head_size(config):
            return tensor  # of another model: the check of shapes reports it
        return tensor.rows(self._order(tensor.shape[0], config))

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Interleave the two halves of the rotary channels of each head."""
        return tensor.rows(np.argsort(self._order(tensor.shape[0], config)))

    def _order(self, rows: int, config: ModelConfig) -> np.ndarray:
        head, size = self.head_size(config), config.rotary_size
        first = 0 if self.are_first else head - size
        channels = np.arange(head)
        rotated = channels[first : first + size]
        # The even rotated rows, then the odd ones, in the place of both.
        order = [channels[:first], rotated[::2], rotated[1::2], channels[first + size :]]
        return (np.arange(0, rows, head)[:, None] + np.concatenate(order)).reshape(-1)


LATENT_QUERIES = InterleavedChannels(lambda model: model.latent_attention.query_head_dim)
LATENT_KEYS = InterleavedChannels(lambda model: model.latent_attention.cached_values)
INDEXER_HEADS = InterleavedChannels(
    lambda model: model.latent_attention.index_head_dim, are_first=True
)
"""Layouts of the queries, and of the latent with the shared rotary key, of latent attention; and of
the heads of an indexer whose rotary channels are rotated in pairs."""


class Transposed:
    """Matrices stored as [in, out]."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Transpose [in, out] to [out, in]."""
        return tensor.transposed()

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Transpose [out, in] to [in, out]."""
        return tensor.transposed()


class DepthwiseConvolution:
    """Weights of torch's `Conv1d` with one channel per group, stored as [channels, 1, width]."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the weights as [channels, width]."""
        if len(tensor.shape) != 3 or tensor.shape[1] != 1:
            return tensor  # of another model: the check of shapes reports it
        return tensor.without_axis(1)

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the weights as [channels, 1, width]."""
        return tensor.with_axis(1)


class InterleavedRotaryOfHeads(InterleavedRotary):
    """Parameters per channel of each head, stored as [heads, channels] in the order of q and k."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return a [heads, channels] tensor as a vector, with the channels of each head moved."""
        if len(tensor.shape) != 2:
            return tensor  # of another model: the check of shapes reports it
        return super().to_jaxforge(tensor.flattened(), config)

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return a vector as [heads, channels]."""
        return super().to_dialect(tensor, config).folded(config.head_size)


class OneGroup:
    """Vectors stored as a matrix of one row, such as the biases of a single group of experts."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the row of a [1, n] tensor."""
        if len(tensor.shape) != 2 or tensor.shape[0] != 1:
            return tensor  # of another model: the check of shapes reports it
        return tensor.part(0)

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return [n] as [1, n]."""
        return stack([tensor])


Layout = Callable[[ModelConfig], list[np.ndarray]]
"""Function from the config to the rows of each part in a fused tensor, in the part's order."""


class Fused(NamedTuple):
    """Rows of a fused tensor, which holds several of jaxforge's parameters.

    Attributes:
        part: index of the parameter in `layout`.
        layout: the rows of each part.
        is_transposed: whether the fused tensor is stored as [in, out].
        change: conversion of the layout of each part; None: both layouts are the same.
    """

    part: int
    layout: Layout
    is_transposed: bool = False
    change: LayoutChange | None = None

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the part's rows of the fused tensor."""
        rows = self.layout(config)
        whole = tensor.transposed() if self._is_stored_transposed(tensor) else tensor
        if whole.shape[:1] != (sum(map(len, rows)),):
            return tensor  # of another model: the check of shapes reports it
        part = whole.rows(rows[self.part])
        return self.change.to_jaxforge(part, config) if self.change else part

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Return the part in its layout: `merge_parts` builds the fused tensor from all parts."""
        return self.change.to_dialect(tensor, config) if self.change else tensor

    def merge_parts(
        self, parts: Mapping[int, LazyTensor], config: ModelConfig, key: str
    ) -> LazyTensor:
        """Return the fused tensor of all parts.

        Raises:
            UserError: parts are missing or have different dtypes.
        """
        rows = self.layout(config)
        if len(parts) < len(rows) or len({part.dtype for part in parts.values()}) > 1:
            raise UserError(
                f"{key} holds {len(rows)} parameters in one tensor, but only {len(parts)} exist, "
                "or their dtypes differ. Export with --weights-only and a --dtype such as float32"
            )
        whole = interleave_rows([parts[i] for i in range(len(rows))], rows)
        return whole.transposed() if self._is_stored_transposed(whole) else whole

    def _is_stored_transposed(self, tensor: LazyTensor) -> bool:
        return self.is_transposed and len(tensor.shape) == 2


class Rule(NamedTuple):
    """Row of a name map.

    Attributes:
        name: jaxforge's name, with `{i}` for the layer and `{j}` for the expert.
        key: the dialect's key; without the `{j}` of `name`, its tensor holds all experts, stacked.
        change: the conversion of the layout; None: both layouts are the same.
        optional: whether models of the dialect may lack the parameter.
    """

    name: str
    key: str
    change: LayoutChange | Fused | None = None
    optional: bool = False

    @property
    def is_packed(self) -> bool:
        """Return whether one tensor of the dialect holds all experts."""
        return "{j}" in self.name and "{j}" not in self.key


ModuleRules = Callable[[int, int], tuple[Rule, ...]]
"""(layer, depth) -> rules of a module of multi-token prediction that is named as that layer."""


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Parameter names of a code base.

    Attributes:
        name: name on the command line.
        about: the code base and its versions.
        rules: the table.
        ignored: patterns of keys without trained values (computed tables).
        writes_tied_head: whether a tied output head is written as a copy of the embedding.
        has_stages: whether its pipeline jobs save a checkpoint per stage.
        has_one_group: whether its optimizer has a single parameter group, in which torch rejects
            settings that differ between parameters.
        renamed: pattern of an outdated key -> the key in the table.
        optional_groups: pattern of keys that a model may lack -> what is lost without them.
        module_rules: rules of modules of multi-token prediction. None: keys name their parameters
            as those of a layer, as jaxforge does.
    """

    name: str
    about: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    writes_tied_head: bool = False
    has_stages: bool = False
    has_one_group: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    optional_groups: Mapping[str, str] = dataclasses.field(default_factory=dict)
    module_rules: ModuleRules | None = None

    def of_model(self, model: ModelConfig) -> Self:
        """Return the name map of a model, with the rules of its modules of multi-token prediction.

        The keys of these modules are then no longer optional.
        """
        if self.module_rules is None or not model.mtp_depth:
            return self
        of_modules = (
            rule
            for depth in range(model.mtp_depth)
            for rule in self.module_rules(model.n_layers + depth, depth)
        )
        # First, because the rules of layers also match the names.
        return dataclasses.replace(self, rules=(*of_modules, *self.rules), optional_groups={})

    def current_key(self, key: str) -> str:
        """Return the key in the table for a key that may be outdated."""
        for pattern, name in self.renamed:
            key = re.sub(pattern, name, key)
        return key

    def knows(self, key: str) -> bool:
        """Return whether a key is in the table."""
        return self.ignores(key) or any(pattern.fullmatch(key) for pattern in self._patterns)

    def ignores(self, key: str) -> bool:
        """Return whether a key has no trained values to import."""
        return any(re.fullmatch(pattern, key) for pattern in self.ignored)

    def group_of_optional(self, key: str) -> str | None:
        """Return what is lost without an optional key; None for a required key."""
        return next((why for p, why in self.optional_groups.items() if re.fullmatch(p, key)), None)

    def key_for(self, name: str) -> str:
        """Return the dialect's key of a parameter.

        Raises:
            UserError: the dialect has no such parameter.
        """
        return self._find(name)[1]

    def rule_of(self, name: str) -> tuple[Rule, str]:
        """Return the rule of a parameter and the dialect's key.

        Raises:
            UserError: the dialect has no such parameter.
        """
        return self._find(name)[:2]

    def find_key(self, name: str) -> str | None:
        """Return the dialect's key of a parameter, or None."""
        is_known = any(pattern.fullmatch(name) for pattern, _ in self._name_patterns)
        return self.key_for(name) if is_known else None

    def to_jaxforge(
        self, tensors: Mapping[str, LazyTensor], names: Iterable[str], config: ModelConfig
    ) -> dict[str, LazyTensor]:
        """Return a dialect's tensors by jaxforge's names, in jaxforge's layout.

        Names without a tensor are left out.

        Args:
            tensors: key without prefixes -> tensor.
            names: jaxforge's names.
            config: the model.
        """
        result = {}
        for name in names:
            rule, key, expert = self._find(name)
            if key not in tensors:
                continue
            tensor = tensors[key]
            if rule.is_packed:
                if tensor.shape[:1] != (config.num_experts,):
                    result[name] = tensor  # of another model: the check of shapes reports it
                    continue
                tensor = tensor.part(expert)
            result[name] = rule.change.to_jaxforge(tensor, config) if rule.change else tensor
        return result

    def to_dialect(
        self, tensors: Mapping[str, LazyTensor], config: ModelConfig
    ) -> dict[str, LazyTensor]:
        """Return jaxforge's tensors by the dialect's keys, in the dialect's layout.

        Raises:
            UserError: a tensor has no counterpart.
        """
        rules: dict[str, Rule] = {}
        parts: dict[str, dict[int, dict[int, LazyTensor]]] = {}  # [key][expert][part if fused]
        for name, tensor in tensors.items():
            rule, key, expert = self._find(name)
            changed = rule.change.to_dialect(tensor, config) if rule.change else tensor
            part = rule.change.part if isinstance(rule.change, Fused) else 0
            parts.setdefault(key, {}).setdefault(expert, {})[part] = changed
            rules[key] = rule
        return {key: _merge(rules[key], by_expert, config, key) for key, by_expert in parts.items()}

    def distance(self, keys: Iterable[str]) -> tuple[int, int]:
        """Return how far known keys are from the dialect's usual model; less is nearer.

        The first number counts optional parameters among the keys, the second required rules.
        """
        extra = [_pattern(rule.key) for rule in self.rules if rule.optional]
        used = sum(any(pattern.fullmatch(key) for pattern in extra) for key in keys)
        return used, len(self.rules) - len(extra)

    @functools.cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [_pattern(rule.key) for rule in self.rules]

    @functools.cached_property
    def _name_patterns(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(rule.name), rule) for rule in self.rules]

    def _find(self, name: str) -> tuple[Rule, str, int]:
        """Return the rule of a name, the dialect's key, and the number of the expert."""
        # A list of patterns and not a dict: layers and experts have numbers.
        for pattern, rule in self._name_patterns:
            if match := pattern.fullmatch(name):
                numbers = match.groupdict()
                return rule, rule.key.format(**numbers), int(numbers.get("j") or 0)
        if _MODULE.fullmatch(name):
            raise UserError(
                f"{name} cannot be written as {self.name}, which has no modules of multi-token "
                "prediction. Export with --model.mtp_depth=0, which leaves them out"
            )
        raise UserError(f"{name} has no counterpart in {self.name} ({self.about})")


def strip_wrappers(key: str) -> str:
    """Remove the parts that DDP, FSDP, torch.compile and activation checkpointing add to a key."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def detect_dialect(keys: Sequence[str], dialects: Iterable[NameMap]) -> NameMap | None:
    """Return the dialect whose table has every key, or the nearest of several such dialects."""
    candidates = [d for d in dialects if keys and all(d.knows(key) for key in keys)]
    # Keys of computed tables alone say nothing about the dialect.
    candidates = [d for d in candidates if any(d.knows(k) and not d.ignores(k) for k in keys)]
    return min(candidates, key=lambda d: d.distance(keys), default=None)


def differences(
    shapes: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, LazyTensor],
    left_over: Iterable[str],
) -> Iterator[str]:
    """Yield the reasons why tensors do not match the model.

    Args:
        shapes: name -> shape, for every tensor of the model.
        tensors: name -> tensor.
        left_over: unused keys of the dialect.
    """
    left_over = list(left_over)
    depth, stored = _modules(shapes), _modules([*tensors, *left_over])
    if depth != stored:
        yield (
            f"model.mtp_depth = {len(depth)}, but the checkpoint has {len(stored)} modules of "
            f"multi-token prediction: set model.mtp_depth = {len(stored)}"
        )
        # The message above covers the parameters of these modules.
        prefixes = tuple(f"layers.{layer}." for layer in depth ^ stored)
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(prefixes)}
        left_over = [key for key in left_over if not key.startswith(prefixes)]
    missing = [name for name in shapes if name not in tensors]
    if any(map(_EXPERT.fullmatch, missing)):
        yield (
            "experts are missing: KempnerForge's jobs with distributed.ep > 1 write the experts of "
            "all ranks under the same keys, so that only those of one rank exist"
        )
    yield from (f"missing: {name}" for name in missing)
    yield from (f"left over: {key}" for key in left_over)
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            yield f"{name} is {list(tensors[name].shape)}, but {list(shape)} in the model"
        if name in tensors and tensors[name].dtype.kind == "c":
            yield f"{name} is {tensors[name].dtype}: only computed tables may be complex"


def _modules(names: Iterable[str]) -> set[int]:
    """Return the layers that are modules of multi-token prediction."""
    return {int(match[1]) for name in names if (match := _MODULE.fullmatch(name))}


def _merge(
    rule: Rule, by_expert: Mapping[int, Mapping[int, LazyTensor]], config: ModelConfig, key: str
) -> LazyTensor:
    """Return a tensor of the dialect from the parts of each expert."""
    change = rule.change
    tensors = {
        expert: change.merge_parts(parts, config, key) if isinstance(change, Fused) else parts[0]
        for expert, parts in by_expert.items()
    }
    if rule.is_packed:
        return stack([tensors[expert] for expert in range(len(tensors))])
    # A key of a rule that is not packed holds at most one expert.
    (tensor,) = tensors.values()
    return tensor


def _pattern(template: str) -> re.Pattern[str]:
    # Named groups: "{i}" is the layer, "{j}" the expert, and both may occur in name and key.
    escaped = re.escape(template)
    for letter in "ij":
        escaped = escaped.replace(re.escape(f"{{{letter}}}"), rf"(?P<{letter}>\d+)")
    return re.compile(escaped)


def _even_then_odd(rows: int, config: ModelConfig) -> np.ndarray:
    channels, rotated = np.arange(config.head_size), config.rotary_size
    # Meta's order rotates (0, 1), (2, 3), ...; jaxforge's rotates (0, h/2), (1, h/2 + 1), ...
    pairs = channels[:rotated]
    order = np.concatenate([pairs[::2], pairs[1::2], channels[rotated:]])
    return (np.arange(0, rows, config.head_size)[:, None] + order).reshape(-1)
