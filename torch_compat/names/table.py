"""Dialects: tables of names, read in both directions.

Ours are the paths of `jaxforge.model`'s parameters with one entry per layer and expert, such as
`layers.{i}.attention.q_proj.weight`. Moments have their parameter's name and are laid out as it is.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from torch_compat.formats.lazy import LazyTensor, interleave_rows, stack

HEAD = "output_head.proj.weight"
EMBEDDING = "token_embedding.embedding.weight"
POSITIONS = "position_embedding.weight"
_EXPERT = re.compile(r"layers\.\d+\.mlp\.experts\.(\d+)\..*")
_ROUTER = re.compile(r"layers\.\d+\.mlp\.router\.gate\.weight")
_WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


class LayoutChange(Protocol):
    """A difference in how two code bases lay one tensor out."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """From the dialect's layout to ours."""
        ...

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """From our layout to the dialect's."""
        ...


class InterleavedRotary:
    """Meta's layout of q and k: channels 2i and 2i+1 are a pair, where ours are i and i + h/2."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Gathers the even channels of each head before the odd ones."""
        if not tensor.shape or tensor.shape[0] % config.head_size:
            return tensor  # not the model's, which its shape will tell
        return tensor.rows(_even_then_odd(tensor.shape[0], config.head_size))

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """Interleaves the two halves of each head."""
        return tensor.rows(np.argsort(_even_then_odd(tensor.shape[0], config.head_size)))


class Transposed:
    """Matrices as [in, out]."""

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """[in, out] -> [out, in]."""
        return tensor.transposed()

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """[out, in] -> [in, out]."""
        return tensor.transposed()


Layout = Callable[[ModelConfig], list[np.ndarray]]
"""The rows of a fused tensor that are each part's, in the order that the part has them."""


class Fused(NamedTuple):
    """Some of the rows of a tensor that holds several of ours.

    Attributes:
        part: which of the parts of `layout` it is.
        layout: which rows are whose.
        is_transposed: whether theirs is [in, out].
    """

    part: int
    layout: Layout
    is_transposed: bool = False

    def to_jaxforge(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """The part's rows."""
        rows = self.layout(config)
        whole = tensor.transposed() if self._turns(tensor) else tensor
        if whole.shape[:1] != (sum(map(len, rows)),):
            return tensor  # not the model's, which its shape will tell
        return whole.rows(rows[self.part])

    def to_dialect(self, tensor: LazyTensor, config: ModelConfig) -> LazyTensor:
        """The part as it is: `joined` makes the whole of all."""
        return tensor

    def merge_parts(
        self, parts: Mapping[int, LazyTensor], config: ModelConfig, key: str
    ) -> LazyTensor:
        """The whole of all parts.

        Raises:
            UserError: some are missing, or of another dtype.
        """
        rows = self.layout(config)
        if len(parts) < len(rows) or len({part.dtype for part in parts.values()}) > 1:
            raise UserError(
                f"{key} holds {len(rows)} parameters in one tensor, and {len(parts)} are there, or "
                "of several dtypes: export the weights alone, with --dtype float32 or another"
            )
        whole = interleave_rows([parts[i] for i in range(len(rows))], rows)
        return whole.transposed() if self._turns(whole) else whole

    def _turns(self, tensor: LazyTensor) -> bool:
        return self.is_transposed and len(tensor.shape) == 2


class Rule(NamedTuple):
    """One row of a table.

    Attributes:
        ours: our name, `{i}` for the layer and `{j}` for the expert.
        theirs: the dialect's name; without the `{j}` that ours has, it holds all experts, stacked.
        change: how its layout differs.
        optional: whether models of the dialect may well be without it.
    """

    ours: str
    theirs: str
    change: LayoutChange | Fused | None = None
    optional: bool = False

    @property
    def is_packed(self) -> bool:
        """True if one tensor of the dialect holds all experts."""
        return "{j}" in self.ours and "{j}" not in self.theirs


@dataclasses.dataclass(frozen=True)
class NameMap:
    """Parameter names of a code base.

    Attributes:
        name: what the command line calls it.
        about: which code base, and which of its versions.
        rules: the table.
        ignored: patterns of keys that hold nothing to keep (tables that are computed).
        refused: pattern of our names that have no counterpart -> why not.
        writes_tied_head: whether a tied output head is written as a copy of the embedding.
        has_stages: whether a pipeline job of it saves a checkpoint per stage.
        has_one_group: whether its optimizer has one parameter group, for which torch refuses
            settings that differ between parameters.
        renamed: pattern of an older key of theirs -> the key that the table has.
        dispensable: pattern of keys that a model may well be without -> what goes with them.
    """

    name: str
    about: str
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    writes_tied_head: bool = False
    has_stages: bool = False
    has_one_group: bool = False
    renamed: tuple[tuple[str, str], ...] = ()
    optional_groups: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def current_key(self, key: str) -> str:
        """A key of theirs as the table has it."""
        for pattern, name in self.renamed:
            key = re.sub(pattern, name, key)
        return key

    def knows(self, key: str) -> bool:
        """Return whether a dialect's key is in the table."""
        return self.ignores(key) or any(pattern.fullmatch(key) for pattern in self._patterns)

    def ignores(self, key: str) -> bool:
        """Return whether a dialect's key holds nothing to import."""
        return any(re.fullmatch(pattern, key) for pattern in self.ignored)

    def group_of_optional(self, key: str) -> str | None:
        """Return the group of an optional key, or None if it is required."""
        return next((why for p, why in self.optional_groups.items() if re.fullmatch(p, key)), None)

    def key_for(self, ours: str) -> str:
        """Their key for one of our names.

        Raises:
            UserError: there is none.
        """
        return self._find(ours)[1]

    def find_key(self, ours: str) -> str | None:
        """Return the dialect's key of a parameter, or None."""
        return self.key_for(ours) if any(p.fullmatch(ours) for p, _ in self._our_patterns) else None

    def to_jaxforge(
        self, theirs: Mapping[str, LazyTensor], wanted: Iterable[str], config: ModelConfig
    ) -> dict[str, LazyTensor]:
        """Our names for a dialect's tensors, as many as there are.

        Args:
            theirs: key -> tensor, without prefixes.
            wanted: our names.
            config: the model.
        """
        tensors = {}
        for name in wanted:
            rule, key, expert = self._find(name)
            if key not in theirs:
                continue
            tensor = theirs[key]
            if rule.is_packed:
                if tensor.shape[:1] != (config.num_experts,):
                    tensors[name] = tensor  # not the model's, which its shape will tell
                    continue
                tensor = tensor.part(expert)
            tensors[name] = rule.change.to_jaxforge(tensor, config) if rule.change else tensor
        return tensors

    def to_dialect(
        self, ours: Mapping[str, LazyTensor], config: ModelConfig
    ) -> dict[str, LazyTensor]:
        """Their keys for our tensors.

        Raises:
            UserError: a tensor has no counterpart.
        """
        rules: dict[str, Rule] = {}
        tensors: dict[
            str, dict[int, dict[int, LazyTensor]]
        ] = {}  # key, expert, part of a fused one
        for name, tensor in ours.items():
            rule, key, expert = self._find(name)
            changed = rule.change.to_dialect(tensor, config) if rule.change else tensor
            part = rule.change.part if isinstance(rule.change, Fused) else 0
            tensors.setdefault(key, {}).setdefault(expert, {})[part] = changed
            rules[key] = rule
        return {key: _whole(rules[key], of_key, config, key) for key, of_key in tensors.items()}

    def distance(self, keys: Iterable[str]) -> tuple[int, int]:
        """Return the distance of known keys from the dialect's usual model; the least is the
        nearest.
        """
        extra = [_pattern(rule.theirs) for rule in self.rules if rule.optional]
        used = sum(any(pattern.fullmatch(key) for pattern in extra) for key in keys)
        return used, len(self.rules) - len(extra)

    @functools.cached_property
    def _patterns(self) -> list[re.Pattern[str]]:
        return [_pattern(rule.theirs) for rule in self.rules]

    @functools.cached_property
    def _our_patterns(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(rule.ours), rule) for rule in self.rules]

    def _find(self, ours: str) -> tuple[Rule, str, int]:
        """The rule of one of our names, their key, and the expert."""
        for pattern, rule in self._our_patterns:
            if match := pattern.fullmatch(ours):
                numbers = match.groupdict()
                return rule, rule.theirs.format(**numbers), int(numbers.get("j") or 0)
        for refused, why in self.refused.items():
            if re.fullmatch(refused, ours):
                raise UserError(f"{ours} cannot be written as {self.name}: {why}")
        raise UserError(f"{ours} has no counterpart in {self.name} ({self.about})")


def strip_wrappers(key: str) -> str:
    """A key without what DDP, FSDP, torch.compile and activation checkpointing put into it."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def detect_dialect(keys: Sequence[str], dialects: Iterable[NameMap]) -> NameMap | None:
    """The dialect whose table has every key; the nearest where several have."""
    candidates = [d for d in dialects if keys and all(d.knows(key) for key in keys)]
    candidates = [d for d in candidates if any(d.knows(k) and not d.ignores(k) for k in keys)]
    return min(candidates, key=lambda d: d.distance(keys), default=None)


def differences(
    wanted: Mapping[str, tuple[int, ...]],
    tensors: Mapping[str, LazyTensor],
    left_over: Iterable[str],
) -> Iterator[str]:
    """Yield the reasons why tensors are not exactly those of the model.

    Args:
        wanted: our name -> shape.
        tensors: our name -> tensor.
        left_over: keys of theirs that nothing uses.
    """
    lost = _lost_experts(wanted, tensors)
    if lost:
        there, total = lost
        yield (
            f"only {there} of {total} experts are there: a job with distributed.ep = "
            f"{total // there} wrote those of every rank under the same keys, so that the others "
            "are lost; nothing can bring them back"
        )
        wanted = {name: shape for name, shape in wanted.items() if not _EXPERT.fullmatch(name)}
    yield from (f"missing: {name}" for name in wanted if name not in tensors)
    yield from (f"left over: {key}" for key in left_over)
    for name, shape in wanted.items():
        if name in tensors and tensors[name].shape != shape:
            yield f"{name} is {list(tensors[name].shape)}, in the model {list(shape)}"
        if name in tensors and tensors[name].dtype.kind == "c":
            yield f"{name} is {tensors[name].dtype}: only tables that are computed may be complex"


def _lost_experts(
    wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, LazyTensor]
) -> tuple[int, int] | None:
    """Return the present and expected numbers of experts if they look like one rank's share.

    In every layer it is the same share, from the first one on, next to a router of all: that one no
    expert-parallel job divides.
    """
    numbers = {name: int(m[1]) for name in wanted if (m := _EXPERT.fullmatch(name))}
    routers = [name for name in wanted if _ROUTER.fullmatch(name)]
    if not all(name in tensors and tensors[name].shape == wanted[name] for name in routers):
        return None

    def is_there(name: str) -> bool:
        tensor, shape = tensors.get(name), wanted[name]
        if tensor is not None and len(tensor.shape) == len(shape) + 1:  # packed: [E, in, out]
            return tensor.shape[1:] == shape[::-1] and numbers[name] < tensor.shape[0]
        return tensor is not None

    there = {j for name, j in numbers.items() if is_there(name)}
    n, total = len(there), 1 + max(numbers.values(), default=-1)
    is_share = there == set(range(n)) and 0 < n < total and total % n == 0
    alike = all(is_there(name) == (j in there) for name, j in numbers.items())
    return (n, total) if is_share and alike else None


def _whole(
    rule: Rule, of_experts: Mapping[int, Mapping[int, LazyTensor]], config: ModelConfig, key: str
) -> LazyTensor:
    """One tensor of theirs, of each expert's parts."""
    change = rule.change
    wholes = {
        expert: change.merge_parts(parts, config, key) if isinstance(change, Fused) else parts[0]
        for expert, parts in of_experts.items()
    }
    if rule.is_packed:
        return stack([wholes[expert] for expert in range(len(wholes))])
    (whole,) = wholes.values()
    return whole


def _pattern(template: str) -> re.Pattern[str]:
    escaped = re.escape(template)
    for letter in "ij":
        escaped = escaped.replace(re.escape(f"{{{letter}}}"), rf"(?P<{letter}>\d+)")
    return re.compile(escaped)


def _even_then_odd(rows: int, head: int) -> np.ndarray:
    order = np.concatenate([np.arange(0, head, 2), np.arange(1, head, 2)])
    return (np.arange(0, rows, head)[:, None] + order).reshape(-1)
