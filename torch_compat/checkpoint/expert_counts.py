"""Number of updates of each expert, as PyTorch counts them.

A PyTorch optimizer skips parameters without gradient. In float32, KempnerForge runs experts that
are separate modules one after another and omits experts without tokens, which then have no
gradient. Each parameter of an expert therefore has its own `step`, and an expert that no token ever
reached has no optimizer state. In bfloat16 and float16, and with packed experts, all experts are
one grouped product, so that every expert has a gradient, which is zero without tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.errors import UserError
from torch_compat.checkpoint.optimizer_state import optimizer_layout
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats.lazy import LazyTensor, from_array
from torch_compat.names.table import NameMap
from torch_compat.names.translation import Translation, summarize_names

States = Mapping[str, Mapping[str, Any]]
"""Their parameter name -> field of its optimizer state -> value."""
Counts = Mapping[str, float]
"""Their parameter name -> number of updates, or another number that grows with updates."""

NOTE = (
    "experts without tokens in an update are skipped, as PyTorch skips them: "
    "optimizer.skip_idle_experts is set to true"
)


def expert_keys(target: AbstractTarget, dialect: NameMap) -> dict[str, str]:
    """Return our name -> their key for all parameters of experts."""
    names = (name for name in target.params if target.stacking.expert_of(name))
    return {name: dialect.key_for(name) for name in names}


def group_by_expert(names: Iterable[str], target: AbstractTarget) -> list[list[str]]:
    """Group our names of experts' parameters by expert."""
    experts: dict[str | None, list[str]] = {}
    for name in names:
        experts.setdefault(target.stacking.expert_of(name), []).append(name)
    return list(experts.values())


def resolve_skip_idle_experts(
    states: States, counts: Counts, target: AbstractTarget, by: Translation, recorded: bool | None
) -> AbstractTarget:
    """Return the target with `optimizer.skip_idle_experts` resolved.

    If the config does not set it, idle experts are skipped if the checkpoint records or shows that
    its run skipped them, or if KempnerForge would skip them: unpacked experts in float32.

    Args:
        states: optimizer state by their keys.
        counts: update counters in `states`: `step`, or a sum of weights.
        target: state that the config declares.
        by: translation of the keys.
        recorded: setting that an export of jaxforge records; None if the checkpoint does not.

    Raises:
        UserError: the config skips no expert, but the run of the checkpoint did.
    """
    config, dialect = target.config, by.dialect
    if not config.model.is_moe or config.optimizer.skip_idle_experts:
        return target
    keys = set(expert_keys(target, dialect).values())
    # Parameters outside experts get a gradient in each update: their count is that of the run.
    common = {count for key, count in counts.items() if key not in keys}
    differing = sorted(key for key in keys & counts.keys() if counts[key] not in common)
    if config.optimizer.skip_idle_experts is None:
        if recorded is None:  # no export of jaxforge: the behaviour of KempnerForge
            recorded = dialect.name == "kempnerforge" and config.train.mixed_precision == "fp32"
        skips = differing or unreached(states, target, dialect) or recorded
        return target.with_idle_experts_skipped() if skips else target
    if differing and common:
        raise UserError(
            f"{by.where}: {summarize_names(differing)} have had fewer updates than other "
            "parameters, as the run skipped experts without tokens, and "
            "optimizer.skip_idle_experts is false; leave it out, or set it to true"
        )
    return target


def unreached(states: States, target: AbstractTarget, dialect: NameMap) -> set[str]:
    """Return our names of parameters of experts that no token ever reached.

    These have no optimizer state. Experts that share a tensor always have optimizer state.
    """
    keys = expert_keys(target, dialect)
    sharing = Counter(keys.values())
    kind = optimizer_layout(target.config)
    saved = {name for field in kind.required for name in target.moments[field]}
    result: set[str] = set()
    for names in group_by_expert(keys, target):
        saved_keys = [keys[name] for name in names if name in saved and sharing[keys[name]] == 1]
        if saved_keys and not any(key in states for key in saved_keys):
            result.update(names)
    return result


def drop_expert_counts(counts: Counts, target: AbstractTarget, dialect: NameMap) -> Counts:
    """Return the counts of parameters outside experts if experts have counts of their own."""
    if not target.config.skips_idle_experts:
        return counts
    keys = set(expert_keys(target, dialect).values())
    return {key: count for key, count in counts.items() if key not in keys}


def per_expert_counts(
    counts: Counts, default: float, target: AbstractTarget, dialect: NameMap, absent: set[str]
) -> dict[str, float]:
    """Return the count of each parameter of an expert by our names.

    Args:
        counts: counts by their keys.
        default: count of experts without one, for optimizers that do not count.
        target: state that the config declares.
        dialect: dialect of the keys.
        absent: our names of parameters that were never updated.
    """
    keys = expert_keys(target, dialect)
    return {name: 0 if name in absent else counts.get(key, default) for name, key in keys.items()}


def check(steps: Mapping[str, int], updates: int, target: AbstractTarget, where: str) -> None:
    """Check that counts are possible.

    Args:
        steps: number of updates of each parameter of an expert by our names.
        updates: number of updates of other parameters.
        target: state that the config declares.
        where: path of the checkpoint, for messages.

    Raises:
        UserError: an expert has several counts, or more updates than the run.
    """
    # The matrices of an expert get their gradients together, so they must agree.
    for names in group_by_expert(steps, target):
        values = {steps[name] for name in names}
        if len(values) > 1 or max(values) > updates:
            what = ", ".join(f"{name}: {steps[name]}" for name in names)
            raise UserError(
                f"{where}: the optimizer has different numbers of updates for one expert, or more "
                f"than the run made ({updates}): {what}. The checkpoint is damaged or was changed; "
                "import with --weights-only"
            )


def fields(counts: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, LazyTensor]]:
    """Return the fields of our optimizer state that hold counts of experts.

    Args:
        counts: "updates" or "weight_sum" -> our name -> count.
    """
    return {
        EXPERT_FIELD + field: {
            name: from_array(np.asarray(value, np.int32 if field == "updates" else np.float32))
            for name, value in of_field.items()
        }
        for field, of_field in counts.items()
    }


def counts_by_torch_key(
    checkpoint: CheckpointState, field: str, dialect: NameMap
) -> dict[str, float]:
    """Return the counter of each parameter by the keys of an export; experts have their own.

    Args:
        checkpoint: the state.
        field: "updates" or "weight_sum".
        dialect: dialect of the keys.

    Raises:
        UserError: a tensor of the dialect holds experts whose counters differ.
    """
    of_experts = (checkpoint.moments or {}).get(EXPERT_FIELD + field, {})
    shared = checkpoint.scalars[field]
    names: dict[str, float] = {}
    for name in checkpoint.params:
        key = dialect.key_for(name)
        value = float(of_experts[name].all() if name in of_experts else shared)
        if names.setdefault(key, value) != value:
            raise UserError(
                f"{key} holds several experts, which have had different numbers of updates "
                f"(optimizer.skip_idle_experts), and {dialect.name} has one number for all: "
                "export with --dialect kempnerforge, or with --weights-only"
            )
    return names
