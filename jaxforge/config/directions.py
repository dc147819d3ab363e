"""Directions of metrics: whether lower or higher values are better.

`checkpoint.best_metric`, `early_stop.metric` and the report compare values of a metric. The
direction of a built-in metric follows from its name. A task of lm_eval states those of its metrics.
All others need a mode in the config.
"""

from typing import Literal

from jaxforge.config.eval import AVERAGE_PREFIX

Mode = Literal["auto", "min", "max"]
"""Direction in a config: "min" if lower values are better, "max" if higher values are better."""

_LOSS_GROUPS = ("loss", "terms")  # first parts of the names of losses
_LOWER = ("loss", "perplexity", "bits_per_byte", "kl")  # endings of names
_LOWER_NAMES = ("grad_norm", "step_time", "step_time_sec", "data_wait_sec")
_HIGHER_NAMES = (
    "acc", "acc_norm", "accuracy", "centered_acc", "core", "exact_match", "f1", "margin", "mcc",
    "mfu", "mfu_causal", "tflops_per_device", "tokens_per_sec",
)  # fmt: skip


def higher_is_better(metric: str, mode: Mode = "auto") -> bool | None:
    """Return whether higher values are better; None if neither mode nor name determine it.

    Args:
        metric: name of the metric, such as "eval/<set>/ema_loss".
        mode: direction in the config.
    """
    if mode != "auto":
        return mode == "max"
    group, *parts = metric.split("/")
    names = [part for part in parts if not part.startswith(("layers.", "depths."))]
    name = names[-1].removeprefix(AVERAGE_PREFIX) if names else group
    if name in _HIGHER_NAMES:
        return True
    if group in _LOSS_GROUPS or name in _LOWER_NAMES or name.endswith(_LOWER):
        return False
    return None


def unknown_direction(key: str, metric: str) -> str:
    """Return the message for a metric whose direction is unknown.

    Args:
        key: config key of the metric.
        metric: name of the metric.
    """
    return (
        f'{key} = "{metric}": the direction of this metric is unknown. Set {MODE_KEYS[key]} to '
        '"min" if lower values are better, or to "max" if higher values are better'
    )


BEST_METRIC, EARLY_STOP_METRIC = "checkpoint.best_metric", "early_stop.metric"
MODE_KEYS = {BEST_METRIC: "checkpoint.best_mode", EARLY_STOP_METRIC: "early_stop.mode"}
"""Keys of metrics that a run compares, and of their modes."""
