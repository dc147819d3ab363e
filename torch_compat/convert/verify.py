"""Comparison of two checkpoints of any formats: tensors, progress and optimizer settings."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.section import Section
from torch_compat.checkpoint import dcp_state, train_state
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.optimizer_state import LAYOUTS, common_settings, groups
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.checkpoint.validation import invisible_values
from torch_compat.convert import repeats
from torch_compat.formats.lazy import LazyTensor, blocks

_BLOCKS_IN_MEMORY = 24  # a block of either checkpoint is this fraction of the memory limit
_RTOL = 1e-6  # of settings: PyTorch's are float64, JAX's schedule is float32
# Keys of [optimizer] that parameter groups also have.
_IN_GROUPS = {"lr", "betas", "eps", "weight_decay", "muon.momentum"}

Facts = Mapping[str, Any]
"""Facts of a checkpoint other than its tensors: name -> number, text, or a list of them."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of a tensor or setting between two checkpoints.

    Attributes:
        name: name of the tensor or setting.
        what: "missing" (only in the first), "unexpected" (only in the second), "shape", "values" or
            "settings".
        largest: largest absolute difference; inf if only one of two values is finite.
        note: shapes or dtypes if they differ; what a tensor holds in place of its values.
    """

    name: str
    what: str
    largest: float = 0.0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class VerificationResult:
    """Result of a comparison.

    Attributes:
        compared: number of compared tensors and optimizer scalars.
        settings: number of compared facts of the progress, schedule and optimizer.
        differences: everything that differs.
        notes: notes on what was not compared.
    """

    compared: int
    settings: int
    differences: list[Difference]
    notes: list[str]

    @property
    def same(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences


@dataclasses.dataclass(frozen=True)
class _Contents:
    tensors: Mapping[str, LazyTensor]
    facts: Facts
    scalars: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def verify(
    a: CheckpointRef,
    b: CheckpointRef,
    config: Path | None,
    overrides: Sequence[str],
    options: ReadOptions,
    max_memory: int,
) -> VerificationResult:
    """Compare two checkpoints of any formats.

    Args:
        a: the first checkpoint.
        b: the second checkpoint.
        config: the config of both; None: the config of either, or else a comparison by keys.
        overrides: settings that override the config.
        options: options of reading both.
        max_memory: bytes of memory for tensors in transit.

    Raises:
        UserError: a checkpoint is damaged or does not match the config.
    """
    # One config for both: names of two dialects only meet as jaxforge's names.
    declared = next(
        (c for ref in (a, b) if (c := ref.config(config, overrides, is_compared=True))), None
    )
    if declared is None:
        notes = ["compared by their own keys; --config FILE compares by parameter"]
        first, other = (_by_own_keys(ref, options.weights_only) for ref in (a, b))
    else:
        first, other, notes = _by_parameter(a, b, declared, options)
    both = {
        name: (first.facts[name], other.facts[name]) for name in first.facts.keys() & other.facts
    }
    differences = compare(first.tensors, other.tensors, max_memory // _BLOCKS_IN_MEMORY)
    differences += _scalar_differences(first.scalars, other.scalars) + _fact_differences(both)
    scalars = first.scalars.keys() | other.scalars.keys()
    count = len(first.tensors.keys() | other.tensors.keys()) + len(scalars)
    return VerificationResult(
        count, len(both), differences, notes + _uncompared(first.facts, other.facts)
    )


def compare(
    a: Mapping[str, LazyTensor],
    b: Mapping[str, LazyTensor],
    block: int,
) -> list[Difference]:
    """Return the differences of all tensors, sorted by name.

    Values are compared, not dtypes: a bfloat16 tensor equals its float32 copy. If values differ, a
    note names differing dtypes.

    Args:
        a: tensors of the first checkpoint.
        b: tensors of the second checkpoint.
        block: bytes of each tensor to read at a time.
    """
    differences, origins = [], _Origins(a, b)
    for name in sorted(a.keys() | b.keys()):
        if name not in b:
            differences.append(Difference(name, "missing", note="only in A"))
        elif name not in a:
            differences.append(Difference(name, "unexpected", note="only in B"))
        elif a[name].shape != b[name].shape:
            shapes = f"{list(a[name].shape)} and {list(b[name].shape)}"
            differences.append(Difference(name, "shape", float("inf"), shapes))
        else:
            largest = _largest_difference(a[name], b[name], block)
            if largest:
                kinds = {a[name].dtype.name, b[name].dtype.name}
                note = origins.describe(name) or (
                    " and ".join(sorted(kinds)) if len(kinds) > 1 else ""
                )
                differences.append(Difference(name, "values", largest, note))
    return differences


class _Origins:
    """Explanations of differing values: constants, and the tensors whose values were copied."""

    def __init__(self, a: Mapping[str, LazyTensor], b: Mapping[str, LazyTensor]) -> None:
        self._tensors = {"A": a, "B": b}

    @functools.cached_property
    def _indices(self) -> dict[str, repeats.ValueIndex]:
        # Most comparisons find no difference, and need no index.
        return {label: repeats.ValueIndex(each) for label, each in self._tensors.items()}

    def describe(self, name: str) -> str:
        """Return what a tensor holds in place of its values; "" if this is unknown."""
        for label in ("B", "A"):
            if (value := repeats.constant(self._tensors[label][name])) is not None:
                return (
                    f"all zeros in {label}"
                    if value == 0
                    else f"all values are {value:g} in {label}"
                )
        for label, other in (("B", "A"), ("A", "B")):
            if copied := next(self._indices[other].copies(self._tensors[label][name]), None):
                return f"{label} equals {copied} of {other}"
        # Values that were rounded on the way only equal those of the same checkpoint.
        for label, other in (("B", "A"), ("A", "B")):
            here, there = self._tensors[label], self._tensors[other]
            for copied in self._indices[label].copies(here[name], excluded=name):
                if not (copied in there and repeats.has_values_of(there[copied], there[name])):
                    return f"{label} equals {copied} of {label}"
        return ""


def _largest_difference(a: LazyTensor, b: LazyTensor, block: int) -> float:
    largest = 0.0
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    for index in blocks(a.shape, itemsize, block):
        x, y = a.read(index), b.read(index)
        # Integers may be beyond the range in which floats are exact.
        if x.dtype == y.dtype and x.dtype.kind in "biu":
            largest = max(largest, float(np.count_nonzero(x != y) > 0))
            continue
        # bfloat16 and float16 are exact in float32, so equal values stay equal.
        wide = np.float64 if np.float64 in (x.dtype, y.dtype) else np.float32
        x, y = np.asarray(x, wide), np.asarray(y, wide)
        # A NaN at the same element of both is no difference.
        is_equal = (x == y) | (np.isnan(x) & np.isnan(y))
        if not is_equal.all():
            # inf - inf is NaN, which counts as an infinite distance below.
            with np.errstate(invalid="ignore"):
                distance = np.abs(x - y)[~is_equal]
            largest = max(largest, float(np.where(np.isfinite(distance), distance, np.inf).max()))
    return largest


def _by_own_keys(reference: CheckpointRef, weights_only: bool) -> _Contents:
    """Return the contents of a DCP checkpoint by its own keys, without a config."""
    dcp = reference.dcp()
    keys = dcp_state.sort_keys(dcp)
    if weights_only:
        return _Contents(keys.params, {})
    train = train_state.read_train_state(dcp)
    facts = _progress_facts(train) | _prefixed(common_settings(keys.groups))
    if train.batches is not None:  # batches are only comparable for the same number of ranks
        facts[f"place.batches of {train.ranks} ranks"] = (train.epoch, train.batches)
    return _Contents(dcp.tensors, facts)


def _by_parameter(
    a: CheckpointRef, b: CheckpointRef, config: JobConfig, options: ReadOptions
) -> tuple[_Contents, _Contents, list[str]]:
    # Missing and further tensors are differences here, and not errors.
    options = dataclasses.replace(options, is_compared=True)
    x, y = a.read(config, options), b.read(config, options)
    weights_only, notes = options.weights_only, []
    if not weights_only and (x.moments is None) != (y.moments is None):
        notes = ["only one checkpoint has optimizer state, so that only weights were compared"]
        weights_only, options = True, dataclasses.replace(options, weights_only=True)
        # Again, because weights that resume may be float32 copies of those that are exported.
        x, y = a.read(config, options), b.read(config, options)
    notes += [note for state in (x, y) if state.dialect.startswith("hf") for note in state.notes]
    suspicions = [repeats.suspicions(state.params) for state in (x, y)]
    notes += [f"A: {note}" for note in suspicions[0]]
    notes += [f"B: {note}" for note in suspicions[1] if note not in suspicions[0]]
    if not weights_only and bool(x.ema) != bool(y.ema):
        notes.append("only one checkpoint has an average of the parameters: it was not compared")
        x, y = (dataclasses.replace(state, ema={}) for state in (x, y))
    first, other = (
        _contents(ref, state, weights_only=weights_only) for ref, state in ((a, x), (b, y))
    )
    return first, other, notes


def _contents(
    reference: CheckpointRef, checkpoint: CheckpointState, *, weights_only: bool
) -> _Contents:
    if weights_only:
        return _Contents(dict(checkpoint.model_tensors()), {})
    facts: dict[str, Any] = {}
    if reference.is_torch:
        facts = _progress_facts(train_state.read_train_state(reference.dcp())) | _prefixed(
            checkpoint.settings
        )
    elif reference.format == "jaxforge":
        config = reference.config(None, is_compared=True)
        assert config is not None
        facts = _run_facts(checkpoint, config)
    if checkpoint.progress is not None and facts:
        facts["place.sequences"] = checkpoint.progress.samples
    return _Contents(dict(checkpoint.tensors()), facts, checkpoint.scalars)


def _progress_facts(train: train_state.TorchTrainState) -> dict[str, Any]:
    facts = {
        "place.step": train.step,
        "place.tokens": train.tokens,
        "schedule.updates": train.updates,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _run_facts(checkpoint: CheckpointState, config: JobConfig) -> dict[str, Any]:
    """Return the facts of a run of jaxforge, under the names of PyTorch's parameter groups."""
    assert checkpoint.progress is not None
    facts: dict[str, Any] = {
        "place.step": checkpoint.progress.step,
        "place.tokens": checkpoint.progress.tokens,
    }
    if checkpoint.moments is None or "updates" not in checkpoint.scalars:
        return facts
    updates = int(checkpoint.scalars["updates"])
    facts["schedule.updates"] = updates
    if config.optimizer.name in LAYOUTS:
        facts |= _prefixed(common_settings(groups(config, updates, {})))
    further: dict[str, Any] = {}
    for key, value in config.optimizer:
        is_table = isinstance(value, Section)
        further |= {f"{key}.{name}": x for name, x in value} if is_table else {key: value}
    facts |= _prefixed({key: x for key, x in further.items() if key not in _IN_GROUPS})
    facts |= {f"schedule.{key}": value for key, value in config.scheduler}
    facts |= {f"model.{key}": x for key, x in invisible_values(config.model).items()}
    return {**facts, "schedule.max_steps": config.train.max_steps}


def _prefixed(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {f"optimizer.{name}": value for name, value in settings.items()}


def _scalar_differences(
    first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]
) -> list[Difference]:
    differences = []
    for name in sorted(first.keys() | other.keys()):
        x, y = first.get(name), other.get(name)
        if x is None or y is None or not np.array_equal(x, y):
            largest = float(abs(x - y)) if x is not None and y is not None else float("inf")
            differences.append(Difference(f"optimizer.{name}", "values", largest, f"{x} and {y}"))
    return differences


def _fact_differences(facts: Mapping[str, tuple[Any, Any]]) -> list[Difference]:
    differences = []
    for name, (x, y) in sorted(facts.items()):
        distance = _distance(x, y)
        if distance:
            differences.append(Difference(name, "settings", distance, f"{x} and {y}"))
    return differences


def _distance(x: Any, y: Any) -> float:  # noqa: ANN401 (number, text, or a list of them)
    """Return the distance of two numbers; inf for other values that differ."""
    try:
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    except (TypeError, ValueError, OverflowError):
        return 0.0 if x == y else float("inf")
    if a.shape != b.shape:
        return float("inf")
    rtol = 0.0 if isinstance(x, int) and isinstance(y, int) else _RTOL
    if np.allclose(a, b, rtol=rtol, atol=0.0, equal_nan=True):
        return 0.0
    largest = float(np.max(np.abs(a - b)))
    return largest if math.isfinite(largest) else float("inf")


def _uncompared(first: Facts, other: Facts) -> list[str]:
    """Return a note on important facts that only one of the two checkpoints has."""
    if not first or not other:
        return []
    shown = ("place.", "schedule.updates", "optimizer.lr", "optimizer.weight_decay")
    names = [name for name in sorted(first.keys() ^ other.keys()) if name.startswith(shown)]
    return (
        [f"not compared, because only one checkpoint has it: {', '.join(names)}"] if names else []
    )
