"""Updates that each expert has had, as PyTorch counts them.

A PyTorch optimizer skips parameters without gradient. KempnerForge runs experts that are modules of
their own one after another in float32, and leaves out those without tokens, which then have no
gradient. So each of their parameters has its own `step`, and an expert that no token ever reached
has no optimizer state at all. In bfloat16 and float16, and with packed experts, one grouped product
holds all experts, and every expert has a gradient, zero without tokens.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.errors import UserError
from torch_compat.checkpoint.optimizer_state import kind_of
from torch_compat.checkpoint.state import AbstractTarget, CheckpointState
from torch_compat.formats.lazy import LazyTensor, of_array
from torch_compat.names.table import NameMap
from torch_compat.names.translation import Translation, summarize_names

States = Mapping[str, Mapping[str, Any]]
"""Parameter of theirs -> field of its optimizer state -> value."""
Counts = Mapping[str, float]
"""Parameter of theirs -> number of updates, or another number that grows with them."""

NOTE = (
    "experts without tokens in an update are skipped, as PyTorch skips them: "
    "optimizer.skip_idle_experts is set to true"
)


def keys_of_experts(target: AbstractTarget, dialect: NameMap) -> dict[str, str]:
    """Return our name of each parameter of an expert -> their key."""
    names = (name for name in target.params if target.stacking.expert_of(name))
    return {name: dialect.key_for(name) for name in names}


def by_expert(names: Iterable[str], target: AbstractTarget) -> list[list[str]]:
    """Return our names of experts' parameters, those of each expert together."""
    experts: dict[str | None, list[str]] = {}
    for name in names:
        experts.setdefault(target.stacking.expert_of(name), []).append(name)
    return list(experts.values())


def settle(
    states: States, counts: Counts, target: AbstractTarget, by: Translation, said: bool | None
) -> AbstractTarget:
    """Return the target with `optimizer.skip_idle_experts` decided.

    A config that says nothing skips idle experts where the checkpoint says or shows that its run
    did, or where KempnerForge would: unpacked experts in float32.

    Args:
        states: optimizer state by their keys.
        counts: what counts updates in it: `step`, or a sum of weights.
        target: what the config declares.
        by: whose keys they are, and the checkpoint for the message.
        said: what an export of ours says of its run; None where the checkpoint says nothing.

    Raises:
        UserError: the config skips no expert, and the checkpoint's run did.
    """
    config, dialect = target.config, by.dialect
    if not config.model.is_moe or config.optimizer.skip_idle_experts:
        return target
    keys = set(keys_of_experts(target, dialect).values())
    common = {count for key, count in counts.items() if key not in keys}
    own = sorted(key for key in keys & counts.keys() if counts[key] not in common)
    if config.optimizer.skip_idle_experts is None:
        if said is None:  # not an export of ours: as KempnerForge would
            said = dialect.name == "kempnerforge" and config.train.mixed_precision == "fp32"
        skips = own or unreached(states, target, dialect) or said
        return target.with_idle_experts_skipped() if skips else target
    if own and common:
        raise UserError(
            f"{by.where}: {summarize_names(own)} have had fewer updates than other parameters, as "
            "the run "
            "skipped experts without tokens, and optimizer.skip_idle_experts is false; leave it "
            "out, or set it to true"
        )
    return target


def unreached(states: States, target: AbstractTarget, dialect: NameMap) -> set[str]:
    """Return our names of the parameters of experts that no token ever reached.

    None of them has optimizer state. In a tensor of several experts, each of them has.
    """
    keys = keys_of_experts(target, dialect)
    sharing = Counter(keys.values())
    kind = kind_of(target.config)
    saved = {name for field in kind.always for name in target.moments[field]}
    result: set[str] = set()
    for names in by_expert(keys, target):
        own = [keys[name] for name in names if name in saved and sharing[keys[name]] == 1]
        if own and not any(key in states for key in own):
            result.update(names)
    return result


def without_experts(counts: Counts, target: AbstractTarget, dialect: NameMap) -> Counts:
    """Return the counts of parameters that all updates change."""
    if not target.config.skips_idle_experts:
        return counts
    keys = set(keys_of_experts(target, dialect).values())
    return {key: count for key, count in counts.items() if key not in keys}


def per_expert(
    counts: Counts, default: float, target: AbstractTarget, dialect: NameMap, absent: set[str]
) -> dict[str, float]:
    """Return the count of each parameter of an expert, by our names.

    Args:
        counts: by their keys.
        default: count of experts without one, as of optimizers that do not count.
        target: what the config declares.
        dialect: whose keys they are.
        absent: our names of parameters that were never updated.
    """
    keys = keys_of_experts(target, dialect)
    return {name: 0 if name in absent else counts.get(key, default) for name, key in keys.items()}


def check(steps: Mapping[str, int], updates: int, target: AbstractTarget, where: str) -> None:
    """Refuse counts that no run can have.

    Args:
        steps: updates of each parameter of an expert, by our names.
        updates: those of other parameters.
        target: what the config declares.
        where: the checkpoint, for the message.

    Raises:
        UserError: an expert has several counts, or had more updates than there were.
    """
    for names in by_expert(steps, target):
        own = {steps[name] for name in names}
        if len(own) > 1 or max(own) > updates:
            what = ", ".join(f"{name}: {steps[name]}" for name in names)
            raise UserError(
                f"{where}: the optimizer has different numbers of updates for one expert, or more "
                f"than the run made ({updates}): {what}. It was damaged or changed; import with "
                "--weights-only"
            )


def fields(counts: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, LazyTensor]]:
    """Return the fields of our optimizer state that hold counts of experts.

    Args:
        counts: "updates" and the like -> our name -> count.
    """
    return {
        EXPERT_FIELD + field: {
            name: of_array(np.asarray(value, np.int32 if field == "updates" else np.float32))
            for name, value in of_field.items()
        }
        for field, of_field in counts.items()
    }


def by_their_keys(checkpoint: CheckpointState, field: str, dialect: NameMap) -> dict[str, float]:
    """Return a number per parameter for the keys of an export; of experts their own.

    Args:
        checkpoint: the state.
        field: "updates" or "weight_sum".
        dialect: whose keys to use.

    Raises:
        UserError: one tensor of the dialect holds experts whose numbers differ.
    """
    own = (checkpoint.moments or {}).get(EXPERT_FIELD + field, {})
    shared = checkpoint.scalars[field]
    names: dict[str, float] = {}
    for name in checkpoint.params:
        key = dialect.key_for(name)
        value = float(own[name].all() if name in own else shared)
        if names.setdefault(key, value) != value:
            raise UserError(
                f"{key} holds several experts, which have had different numbers of updates "
                f"(optimizer.skip_idle_experts), and {dialect.name} has one number for all: "
                "export with --dialect kempnerforge, or with --weights-only"
            )
    return names
