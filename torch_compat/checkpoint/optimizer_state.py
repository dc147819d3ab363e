"""Correspondence of optimizer state in torch and in our optax chain.

optimizer.state.{parameter}.{field}         equal flat keys for nested and flattened dicts
optimizer.param_groups.{g}.{key}            nested: one entry per group
optimizer.param_groups.{parameter}.{key}    flattened: every key for every parameter
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.optim.schedule import learning_rate_after
from torch_compat.formats.lazy import to_count
from torch_compat.formats.limits import shown
from torch_compat.names.translation import summarize_names

MAIN_KEYS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "momentum")
"""Settings of parameter groups that are read from a checkpoint."""

STEP, WEIGHT_SUM = "step", "weight_sum"


class OptimizerLayout(NamedTuple):
    """Layout of one optimizer's state in torch.

    Attributes:
        fields: our field -> torch's field.
        keys: keys of a parameter group other than lr, initial_lr, weight_decay and params.
        counts: whether each parameter has a `step`.
        optional: our fields that KempnerForge does not save.
        scalars: our scalar fields.
        covers_all_params: whether each parameter has all of `fields`.
    """

    fields: Mapping[str, str]
    keys: tuple[str, ...]
    counts: bool = False
    optional: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ("updates",)
    covers_all_params: bool = True

    @property
    def required(self) -> set[str]:
        """Our fields that every checkpoint holds."""
        return set(self.fields) - set(self.optional)


LAYOUTS: Mapping[str, OptimizerLayout] = {
    "adamw": OptimizerLayout(
        {"mu": "exp_avg", "nu": "exp_avg_sq"},
        # All keys of AdamW in torch 2.0 to 2.13: a loader needs those of its own version and
        # ignores the others.
        ("betas", "eps", "amsgrad", "maximize", "foreach", "capturable", "differentiable", "fused",
         "decoupled_weight_decay"),
        counts=True,
    ),
    "lion": OptimizerLayout({"mu": "exp_avg"}, ("betas",)),
    "muon": OptimizerLayout(
        {"momentum": "momentum_buffer", "mu": "exp_avg", "nu": "exp_avg_sq"},
        ("momentum", "ns_steps"),
        optional=("mu", "nu"),
        covers_all_params=False,
    ),
    "schedule_free_adamw": OptimizerLayout(
        {"nu": "v", "x": "x", "z": "z"}, ("betas", "eps"), scalars=("updates", WEIGHT_SUM)
    ),
}  # fmt: skip
"""`optimizer.name` -> layout in torch."""


def optimizer_layout(config: JobConfig) -> OptimizerLayout:
    """Return the torch layout of the run's optimizer.

    Raises:
        UserError: the optimizer is registered by the user, of optax, or a variant without
            counterpart.
    """
    name = config.optimizer.name
    if name == "muon":
        name = config.optimizer.muon.variant
    if name not in LAYOUTS:
        raise UserError(
            f'optimizer.name = "{name}": its counterpart in PyTorch is not known; convert with '
            "--weights-only"
        )
    return LAYOUTS[name]


def count_updates(steps: Mapping[str, float], where: str) -> int | None:
    """Return the number of updates that all parameters report; None if no parameter has one.

    Raises:
        UserError: the numbers differ.
    """
    values = {float(step) for step in steps.values()}
    if not values:
        return None
    if len(values) > 1:
        # Reversed, so that the first parameter with each number stays in the dict.
        first = {value: name for name, value in reversed(list(steps.items()))}
        raise UserError(
            f"{where}: parameters report different numbers of updates ("
            + ", ".join(f"{name}: {value:g}" for value, name in sorted(first.items()))
            + "); a parameter was frozen or added during training, but jaxforge has a single count"
        )
    return parse_updates(values.pop(), where)


def parse_updates(step: float, where: str) -> int:
    """Return a parameter's `step` as an integer.

    Raises:
        UserError: the value is not a possible number of updates.
    """
    try:
        updates = to_count(step)
    except ValueError as error:
        raise UserError(f"{where}: {STEP} of the optimizer is not a count ({error})") from error
    if updates >= 2**31:
        raise UserError(f"{where}: it records {updates} updates, which is impossible")
    return updates


def schedule_free_updates(weight_sum: float, config: JobConfig) -> int:
    """Recover the number of updates, which torch drops, from the sum of weights.

    Each update adds lr · (1 - b1) to the sum.

    Raises:
        UserError: during a warm-up, weights are smaller, so the number is not determined.
    """
    o = config.optimizer
    if o.schedule_free_adamw.warmup_steps:
        raise UserError(
            "schedule-free AdamW does not store its number of updates, and after a warm-up it "
            "does not follow from the sum of weights; import with --weights-only"
        )
    return round(weight_sum / (o.lr * (1 - o.betas[0])))


def common_settings(groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings that are equal in all groups; for weight decay, the largest value."""
    settings: dict[str, Any] = {}
    for key in MAIN_KEYS:
        values = [group[key] for group in groups if _is_setting(group.get(key))]
        for value in values:
            _check_range(key, value)
        # The group of vectors has no decay, so the largest value is that of the config.
        if key == "weight_decay" and values:
            settings[key] = max(values)
        elif values and all(value == values[0] for value in values):
            settings[key] = values[0]
    return settings


def disagreements(settings: Mapping[str, Any], config: JobConfig) -> list[str]:
    """Return messages about optimizer settings that differ between checkpoint and config."""
    o = config.optimizer
    here = {"initial_lr": o.lr, "betas": o.betas, "eps": o.eps, "weight_decay": o.weight_decay}
    names = {"initial_lr": "lr"}
    return [
        f"optimizer.{names.get(key, key)} was {settings[key]} in PyTorch and is {value} in the "
        "config: the config is used"
        for key, value in here.items()
        if key in settings and not _same(settings[key], value)
    ]


def decay_disagreements(theirs: Mapping[str, bool], here: Mapping[str, bool]) -> Iterator[str]:
    """Yield messages about parameters that decay either in PyTorch or with the config."""
    for decayed, key in ((True, "decay_patterns"), (False, "no_decay_patterns")):
        names = [n for n, value in theirs.items() if value is decayed is not here.get(n, decayed)]
        if names:
            states = ("on", "off") if decayed else ("off", "on")
            yield (
                f"weight decay was {states[0]} in PyTorch for {summarize_names(names)} and is "
                f"{states[1]} in the config, which is used. Set optimizer.{key} for these"
            )


def group_lr(config: JobConfig, updates: int) -> float:
    """Return `lr` of a parameter group after a number of updates: the rate of the next update.

    Schedule-free AdamW applies its warm-up internally and keeps `lr` constant.
    """
    if config.optimizer.name == "schedule_free_adamw":
        return config.optimizer.lr
    return learning_rate_after(config, updates)


class GroupKey(NamedTuple):
    """Settings by which parameters are grouped.

    Attributes:
        decays: whether weight decay applies.
        lr_factor: factor on the learning rate.
    """

    decays: bool
    lr_factor: float = 1.0


def groups(
    config: JobConfig, updates: int, settings: Mapping[str, GroupKey]
) -> list[dict[str, Any]]:
    """Return the parameter groups: with weight decay, without, then those of `lr_patterns`.

    Args:
        config: config of the run.
        updates: number of updates.
        settings: parameter -> its settings.
    """
    o = config.optimizer
    lr = group_lr(config, updates)
    defaults: dict[str, Any] = {
        "betas": tuple(o.betas), "eps": o.eps, "amsgrad": False, "maximize": False,
        "foreach": None, "capturable": False, "differentiable": False, "fused": True,
        "decoupled_weight_decay": True, "momentum": o.muon.momentum, "ns_steps": o.muon.ns_steps,
    }  # fmt: skip
    values = {key: defaults[key] for key in optimizer_layout(config).keys}
    return [
        {
            "lr": lr * key.lr_factor,
            **values,
            "weight_decay": o.weight_decay if key.decays else 0.0,
            "initial_lr": o.lr * key.lr_factor,
            "params": [name for name, of_name in settings.items() if of_name == key],
        }
        for key in group_keys(settings)
    ]


def group_keys(settings: Mapping[str, GroupKey]) -> list[GroupKey]:
    """Return the settings of each parameter group, in the order of `groups`."""
    return list(dict.fromkeys([GroupKey(True), GroupKey(False), *settings.values()]))


def _is_setting(value: Any) -> bool:  # noqa: ANN401 (untrusted)
    """Return whether a value is a number or at most three numbers."""
    numbers = value if isinstance(value, tuple | list) else (value,)
    return len(numbers) <= 3 and all(isinstance(n, int | float | np.number) for n in numbers)


def _check_range(key: str, value: Any) -> None:  # noqa: ANN401 (checked by `_is_setting`)
    """Check that a setting is possible.

    Raises:
        UserError: the value is impossible: the checkpoint is damaged, or of another kind.
    """
    most = 1.0 if key in ("betas", "momentum", "eps") else 1e9
    numbers = value if isinstance(value, tuple | list) else (value,)
    if not all(0 <= n <= most for n in numbers):
        raise UserError(
            f"the checkpoint's optimizer has {key} = {shown(value)}, which none can have: it is "
            "damaged, or was written by something else"
        )


def _same(a: Any, b: Any) -> bool:  # noqa: ANN401
    a, b = np.atleast_1d(np.asarray(a, float)), np.atleast_1d(np.asarray(b, float))
    return a.shape == b.shape and all(
        math.isclose(x, y, rel_tol=1e-9) for x, y in zip(a, b, strict=True)
    )
