"""Display names of metrics and axes: a table, and rules for composed names."""

import re
from collections.abc import Mapping
from typing import NamedTuple

AXES: Mapping[str, str] = {
    "steps": "step",
    "tokens": "tokens",
    "hours": "hours since the first step",
}
"""Horizontal axes, with their labels."""


class MetricName(NamedTuple):
    """A metric in words.

    Attributes:
        title: what it is.
        unit: of its values; empty for a mere number.
        group: the heading it stands under.
        label: which of several it is that share a title: a dataset, "layer 3"; empty if alone.
        zero: 0 is part of its axis.
        percent: logged as a part of 1, shown in per cent.
    """

    title: str
    unit: str
    group: str
    label: str = ""
    zero: bool = False
    percent: bool = False

    @property
    def exact(self) -> bool:
        """True if the value is noise-free: set or counted."""
        return self.unit in ("so far", "of the next update", "of the next step")


LOSS, EVALUATION, UPDATES, SPEED, MEMORY, DATA, EXPERTS, SAVING, MODEL = (
    "Loss", "Evaluation", "Updates", "Speed", "Memory of the fullest device", "Data", "Experts",
    "Checkpoints", "Model",
)  # fmt: skip
_NATS, _PER_LAYER = "nats per token", "layer {}"

NAMES: Mapping[str, MetricName] = {
    "train/loss": MetricName("Training loss", _NATS, LOSS),
    "eval/loss": MetricName("Evaluation loss", _NATS, EVALUATION, "all sets"),
    "eval/bits_per_byte": MetricName("Evaluation, bits per byte", "bits", EVALUATION, "all sets"),
    "eval/perplexity": MetricName("Perplexity", "", EVALUATION, "all sets"),
    "train/lr": MetricName("Learning rate", "of the next update", UPDATES, zero=True),
    "train/grad_norm": MetricName("Gradient norm", "before clipping", UPDATES),
    "train/params_norm": MetricName("Norm of the parameters", "", UPDATES),
    "train/update_norm": MetricName("Norm of the update", "", UPDATES, zero=True),
    "train/num_zeros_in_grad": MetricName("Zeros in the gradient", "elements", UPDATES, zero=True),
    "train/loss_scale": MetricName("Loss scale", "of the next step", UPDATES),
    "train/skipped_steps": MetricName("Skipped steps", "so far", UPDATES, zero=True),
    "train/nonfinite_steps": MetricName("Steps that were not finite", "so far", UPDATES, zero=True),
    "train/spike_steps": MetricName("Spikes of the loss", "so far", UPDATES, zero=True),
    "train/rollbacks": MetricName("Rollbacks", "so far", UPDATES, zero=True),
    "interval/loss": MetricName("Loss since the last line", _NATS, UPDATES),
    "interval/skipped_steps": MetricName(
        "Skipped since the last line", "steps", UPDATES, zero=True
    ),
    "interval/nan_steps": MetricName("Not finite since the last line", "steps", UPDATES, zero=True),
    "train/tokens_per_sec": MetricName("Throughput", "tokens per second", SPEED, zero=True),
    "train/step_time_sec": MetricName("Time of a step", "seconds", SPEED),
    "train/data_wait_sec": MetricName("Waiting for data", "seconds per step", SPEED, zero=True),
    "train/tflops_per_device": MetricName("Model FLOPs", "TFLOP/s per device", SPEED, zero=True),
    "train/mfu": MetricName("MFU", "% of peak", SPEED, zero=True, percent=True),
    "train/mfu_causal": MetricName("MFU, causal", "% of peak", SPEED, zero=True, percent=True),
    "smoothed/loss": MetricName("Smoothed loss", _NATS, UPDATES),
    "smoothed/tokens_per_sec": MetricName(
        "Smoothed throughput", "tokens per second", SPEED, zero=True
    ),
    "smoothed/mfu": MetricName("Smoothed MFU", "% of peak", SPEED, zero=True, percent=True),
    "smoothed/step_time": MetricName("Smoothed time of a step", "seconds", SPEED),
    "gpu/peak_gb": MetricName("Peak memory", "GiB", MEMORY, zero=True),
    "gpu/allocated_gb": MetricName("Memory in arrays", "GiB", MEMORY, zero=True),
    "gpu/reserved_gb": MetricName("Reserved memory", "GiB", MEMORY, zero=True),
    "gpu/total_gb": MetricName("Available memory", "GiB", MEMORY, zero=True),
    "gpu/mem_utilization": MetricName("Peak of the available memory", "%", MEMORY, "", True, True),
    "train/tokens": MetricName("Tokens", "so far", DATA, zero=True),
    "train/samples": MetricName("Sequences", "so far", DATA, zero=True),
    "train/padding_tokens": MetricName("Padding", "so far", DATA, zero=True),
    "train/valid_tokens": MetricName("Tokens learned from", "so far", DATA, zero=True),
    "moe/expert_balance": MetricName(
        "Balance of experts", "least over most loaded", EXPERTS, zero=True
    ),
    "moe/aux_loss": MetricName("Load-balancing loss", "sum over layers; even: 1 each", EXPERTS),
    "moe/router_z_loss": MetricName("Router z-loss", "sum over layers", EXPERTS),
    "moe/dropped": MetricName("Dropped assignments", "% of all", EXPERTS, zero=True, percent=True),
    "checkpoint/blocking_sec": MetricName(
        "Training held up by saves", "seconds", SAVING, zero=True
    ),
    "checkpoint/save_sec": MetricName("Time of a save", "seconds", SAVING, zero=True),
    "local_checkpoint/blocking_sec": MetricName(
        "Held up by local saves", "seconds", SAVING, zero=True
    ),
    "local_checkpoint/save_sec": MetricName("Time of a local save", "seconds", SAVING, zero=True),
}
"""Metrics that have a name of their own, in the order of the page."""

_RULES: tuple[tuple[str, MetricName], ...] = (
    (r"eval/(.+)/loss", MetricName("Evaluation loss", _NATS, EVALUATION, "{}")),
    (r"eval/(.+)/bits_per_byte", MetricName("Evaluation, bits per byte", "bits", EVALUATION, "{}")),
    (r"eval/(.+)/perplexity", MetricName("Perplexity", "", EVALUATION, "{}")),
    (r"loss/(.+)", MetricName("Loss by dataset", _NATS, DATA, "{}")),
    (r"data/(.+)/tokens", MetricName("Tokens by dataset", "so far", DATA, "{}", zero=True)),
    (r"train/grad_norm/layers\.(\d+)", MetricName("Gradient norm by layer", "", UPDATES, _PER_LAYER)),
    (r"train/grad_norm/(.+)", MetricName("Gradient norm of other parts", "", UPDATES, "{}")),
    (r"moe/balance/layers\.(\d+)",
     MetricName("Balance by layer", "least over most loaded expert", EXPERTS, _PER_LAYER, zero=True)),
    (r"moe/router_entropy/layers\.(\d+)",
     MetricName("Router entropy by layer", "nats", EXPERTS, _PER_LAYER)),
    (r"moe/router_bias/layers\.(\d+)",
     MetricName("Largest router bias by layer", "", EXPERTS, _PER_LAYER)),
    (r"moe/load/layers\.(\d+)", MetricName("Load of experts", "of an even load", EXPERTS, _PER_LAYER)),
)  # fmt: skip
_GROUPS = {"terms": "Terms of the loss", "model": MODEL, "data": DATA, "moe": EXPERTS,
           "eval": EVALUATION, "train": UPDATES, "gpu": MEMORY}  # fmt: skip


def metric_name(metric: str) -> MetricName:
    """A metric in words; one that no table knows, from the parts of its name."""
    if metric in NAMES:
        return NAMES[metric]
    for pattern, name in _RULES:
        if match := re.fullmatch(pattern, metric):
            return name._replace(label=name.label.format(match[1]))
    return _composed(metric)


def _composed(metric: str) -> MetricName:
    """`mine/head_entropy/layers.3` is "Head entropy by layer" of layer 3, under "Mine"."""
    first, slash, tail = metric.partition("/")
    group = _GROUPS.get(first, _sentence(first)) if slash else "Other"
    of_layer = re.fullmatch(r"(.+)/layers\.(\d+)", tail)
    title = _sentence((of_layer[1] if of_layer else tail or first).replace("/", ", "))
    if of_layer:
        return MetricName(f"{title} by layer", "", group, _PER_LAYER.format(of_layer[2]))
    return MetricName(title, "", group)


def _sentence(words: str) -> str:
    words = words.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
