"""Two checkpoints of any formats compared: their tensors, and what their runs say of themselves."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.config.job import JobConfig
from torch_compat.checkpoint import dcp_state, train_state
from torch_compat.checkpoint.checkpoints import CheckpointRef
from torch_compat.checkpoint.dcp_state import ReadOptions
from torch_compat.checkpoint.optimizer_state import LAYOUTS, common_settings, groups
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.checkpoint.validation import INVISIBLE_KEYS
from torch_compat.formats.lazy import LazyTensor, blocks

_FRACTION = 24  # of the memory allowed, for one block of either checkpoint
_NEAR = 1e-6  # of one number to another: PyTorch's settings are float64, JAX's schedule is float32
# Keys of [optimizer] that parameter groups have too, or that do nothing.
_IN_GROUPS = {"lr", "betas", "eps", "weight_decay", "muon_momentum", "fused"}

Facts = Mapping[str, Any]
"""What a checkpoint says beside its tensors: name -> number, text, or a few of them."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of one tensor between two checkpoints.

    Attributes:
        name: its name.
        what: "missing" (only in the first), "unexpected" (only in the second), "shape", "values".
        largest: the largest absolute difference; inf where one is not finite and the other is.
        note: shapes or dtypes, where they differ.
    """

    name: str
    what: str
    largest: float = 0.0
    note: str = ""


@dataclasses.dataclass(frozen=True)
class VerificationResult:
    """Result of a comparison.

    Attributes:
        compared: tensors, and numbers of the optimizer, that were looked at.
        settings: numbers of the place, the schedule and the optimizer that were.
        differences: those that are not the same.
        notes: what was not compared.
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
    """Compares two checkpoints of any formats.

    Args:
        a: one.
        b: the other.
        config: the config that they are of; without one, that of either, or their own keys.
        overrides: settings over it.
        options: how to read them.
        max_memory: bytes for tensors on their way.

    Raises:
        UserError: one of them is damaged, or not of that config.
    """
    declared = next(
        (c for result in (a, b) if (c := result.config(config, overrides, is_compared=True))), None
    )
    if declared is None:
        notes = ["compared by their own keys; --config FILE compares by parameter"]
        first, other = (_by_own_keys(result, options.weights_only) for result in (a, b))
    else:
        first, other, notes = _by_parameter(a, b, declared, options)
    both = {
        name: (first.facts[name], other.facts[name]) for name in first.facts.keys() & other.facts
    }
    differences = compare(first.tensors, other.tensors, max_memory // _FRACTION)
    differences += _scalar_differences(first.scalars, other.scalars) + _fact_differences(both)
    scalars = first.scalars.keys() | other.scalars.keys()
    count = len(first.tensors.keys() | other.tensors.keys()) + len(scalars)
    return VerificationResult(
        count, len(both), differences, notes + _told_by_one(first.facts, other.facts)
    )


def compare(
    a: Mapping[str, LazyTensor],
    b: Mapping[str, LazyTensor],
    block: int,
) -> list[Difference]:
    """Return every tensor that is not the same in both, in the order of the names.

    Values count, not dtypes: a bfloat16 tensor equals its float32 copy, and a note says so where
    the values differ.

    Args:
        a: one checkpoint.
        b: the other.
        block: bytes of each to hold at a time.
    """
    differences = []
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
                note = " and ".join(sorted(kinds)) if len(kinds) > 1 else ""
                differences.append(Difference(name, "values", largest, note))
    return differences


def _largest_difference(a: LazyTensor, b: LazyTensor, block: int) -> float:
    largest = 0.0
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    for index in blocks(a.shape, itemsize, block):
        x, y = a.read(index), b.read(index)
        if x.dtype == y.dtype and x.dtype.kind in "biu":
            largest = max(largest, float(np.count_nonzero(x != y) > 0))
            continue
        wide = np.float64 if np.float64 in (x.dtype, y.dtype) else np.float32
        x, y = np.asarray(x, wide), np.asarray(y, wide)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        if not same.all():
            with np.errstate(invalid="ignore"):
                distance = np.abs(x - y)[~same]
            largest = max(largest, float(np.where(np.isfinite(distance), distance, np.inf).max()))
    return largest


def _by_own_keys(reference: CheckpointRef, weights_only: bool) -> _Contents:
    """A DCP checkpoint without a config."""
    dcp = reference.dcp()
    keys = dcp_state.sort_keys(dcp)
    if weights_only:
        return _Contents(keys.params, {})
    where = train_state.read_train_state(dcp)
    facts = _of_place(where) | _prefixed(common_settings(keys.groups))
    if where.batches is not None:  # which other ranks count otherwise
        facts[f"place.batches of {where.ranks} ranks"] = (where.epoch, where.batches)
    return _Contents(dcp.tensors, facts)


def _by_parameter(
    a: CheckpointRef, b: CheckpointRef, config: JobConfig, options: ReadOptions
) -> tuple[_Contents, _Contents, list[str]]:
    x, y = a.read(config, options), b.read(config, options)
    notes = [note for h in (x, y) if h.dialect.startswith("hf") for note in h.notes]
    alone = options.weights_only
    if not alone and (x.moments is None) != (y.moments is None):
        notes.append("only one has optimizer state: weights were compared, nothing else")
        alone = True
    return _contents(a, x, weights_only=alone), _contents(b, y, weights_only=alone), notes


def _contents(
    reference: CheckpointRef, checkpoint: CheckpointState, *, weights_only: bool
) -> _Contents:
    if weights_only:
        return _Contents(dict(checkpoint.model_tensors()), {})
    facts: dict[str, Any] = {}
    if reference.is_torch:
        facts = _of_place(train_state.read_train_state(reference.dcp())) | _prefixed(
            checkpoint.settings
        )
    elif reference.format == "jaxforge":
        config = reference.config(None, is_compared=True)
        assert config is not None
        facts = _of_run(checkpoint, config)
    if checkpoint.progress is not None and facts:
        facts["place.sequences"] = checkpoint.progress.samples
    return _Contents(dict(checkpoint.tensors()), facts, checkpoint.scalars)


def _of_place(where: train_state.TorchTrainState) -> dict[str, Any]:
    facts = {
        "place.step": where.step,
        "place.tokens": where.tokens,
        "schedule.updates": where.updates,
    }
    return {name: value for name, value in facts.items() if value is not None}


def _of_run(checkpoint: CheckpointState, config: JobConfig) -> dict[str, Any]:
    """Return the settings of a run of jaxforge, as a parameter group of PyTorch names them."""
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
    of_optimizer = {k: v for k, v in config.optimizer if k not in _IN_GROUPS}
    facts |= {f"optimizer.{key}": value for key, value in of_optimizer.items()}
    facts |= {f"schedule.{key}": value for key, value in config.scheduler}
    facts |= {f"model.{key}": getattr(config.model, key) for key in INVISIBLE_KEYS}
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


def _distance(x: Any, y: Any) -> float:  # noqa: ANN401 (numbers, texts, or some of them)
    """Return the distance of two numbers; inf for other values that differ."""
    try:
        a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    except (TypeError, ValueError, OverflowError):
        return 0.0 if x == y else float("inf")
    if a.shape != b.shape:
        return float("inf")
    near = 0.0 if isinstance(x, int) and isinstance(y, int) else _NEAR
    if np.allclose(a, b, rtol=near, atol=0.0, equal_nan=True):
        return 0.0
    largest = float(np.max(np.abs(a - b)))
    return largest if math.isfinite(largest) else float("inf")


def _told_by_one(first: Facts, other: Facts) -> list[str]:
    """Notes of what every format may say and only one of the two does."""
    if not first or not other:
        return []
    shown = ("place.", "schedule.updates", "optimizer.lr", "optimizer.weight_decay")
    names = [name for name in sorted(first.keys() ^ other.keys()) if name.startswith(shown)]
    return [f"only one says, so that it was not compared: {', '.join(names)}"] if names else []
