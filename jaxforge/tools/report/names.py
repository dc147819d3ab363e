"""Display names of metrics and axes: a table, and rules for composed names."""

import re
from collections.abc import Mapping
from typing import NamedTuple

AXES: Mapping[str, str] = {
    "steps": "step",
    "tokens": "tokens",
    "hours": "hours since the first step",
}
"""Labels of the horizontal axes."""


class Name(NamedTuple):
    """Display name of a metric.

    Attributes:
        title: title of its chart.
        unit: unit of its values; empty for plain numbers.
        group: heading of its charts.
        label: label of its curve among several with the same title, such as a dataset or "layer 3";
            empty if there is only one curve.
        zero: the axis includes 0.
        percent: logged as a fraction, shown in percent.
    """

    title: str
    unit: str
    group: str
    label: str = ""
    zero: bool = False
    percent: bool = False

    @property
    def exact(self) -> bool:
        """True if the value is a setting or a count, without noise."""
        return self.unit in ("so far", "of the next update", "of the next step")


LOSS, EVALUATION, TASKS, UPDATES, SPEED, MEMORY, DATA, EXPERTS, SAVING, MODEL = (
    "Loss", "Evaluation", "Tasks", "Updates", "Speed", "Memory of the fullest device", "Data",
    "Experts", "Checkpoints", "Model",
)  # fmt: skip
_NATS, _PER_LAYER = "nats per token", "layer {}"

NAMES: Mapping[str, Name] = {
    "train/loss": Name("Training loss", _NATS, LOSS),
    "train/mtp_loss": Name("Loss of further tokens", _NATS, LOSS),
    "dpo/loss": Name("Loss of DPO", "per pair", LOSS),
    "dpo/accuracy": Name("Preferred answers", "% of pairs", LOSS, zero=True, percent=True),
    "dpo/margin": Name("Margin of rewards", "", LOSS),
    "dpo/chosen_reward": Name("Reward of chosen answers", "", LOSS),
    "dpo/rejected_reward": Name("Reward of rejected answers", "", LOSS),
    "distillation/kl": Name("Divergence from the teacher", _NATS, LOSS, zero=True),
    "eval/loss": Name("Evaluation loss", _NATS, EVALUATION, "all sets"),
    "eval/ema_loss": Name("Evaluation loss", _NATS, EVALUATION, "all sets, average"),
    "eval/bits_per_byte": Name("Evaluation, bits per byte", "bits", EVALUATION, "all sets"),
    "eval/ema_bits_per_byte": Name(
        "Evaluation, bits per byte", "bits", EVALUATION, "all sets, average"
    ),
    "eval/perplexity": Name("Perplexity", "", EVALUATION, "all sets"),
    "eval/ema_perplexity": Name("Perplexity", "", EVALUATION, "all sets, average"),
    "eval/tasks/core": Name("CORE", "mean centered accuracy", TASKS),
    "eval/tasks/ema_core": Name("CORE", "mean centered accuracy", TASKS, "average"),
    "train/lr": Name("Learning rate", "of the next update", UPDATES, zero=True),
    "train/grad_norm": Name("Gradient norm", "before clipping", UPDATES),
    "train/params_norm": Name("Norm of the parameters", "", UPDATES),
    "train/update_norm": Name("Norm of the update", "", UPDATES, zero=True),
    "train/max_attention_logit": Name("Largest attention logit", "", UPDATES),
    "attention/max_logit": Name("Largest attention logit", "of the update", UPDATES),
    "attention/clipped_heads": Name("Heads scaled by QK-Clip", "of all layers", UPDATES, zero=True),
    "train/num_zeros_in_grad": Name("Zeros in the gradient", "elements", UPDATES, zero=True),
    "train/loss_scale": Name("Loss scale", "of the next step", UPDATES),
    "train/skipped_steps": Name("Skipped steps", "so far", UPDATES, zero=True),
    "train/nonfinite_steps": Name("Steps that were not finite", "so far", UPDATES, zero=True),
    "train/spike_steps": Name("Spikes of the loss", "so far", UPDATES, zero=True),
    "train/rollbacks": Name("Rollbacks", "so far", UPDATES, zero=True),
    "interval/loss": Name("Loss since the last line", _NATS, UPDATES),
    "interval/skipped_steps": Name("Skipped since the last line", "steps", UPDATES, zero=True),
    "interval/left_out_steps": Name("Left out since the last line", "steps", UPDATES, zero=True),
    "interval/unlabeled_steps": Name(
        "Without labels since the last line", "steps", UPDATES, zero=True
    ),
    "interval/nan_steps": Name("Not finite since the last line", "steps", UPDATES, zero=True),
    "train/tokens_per_sec": Name("Throughput", "tokens per second", SPEED, zero=True),
    "train/step_time_sec": Name("Time of a step", "seconds", SPEED),
    "train/data_wait_sec": Name("Waiting for data", "seconds per step", SPEED, zero=True),
    "train/tflops_per_device": Name("Model FLOPs", "TFLOP/s per device", SPEED, zero=True),
    "train/mfu": Name("MFU", "% of peak", SPEED, zero=True, percent=True),
    "train/mfu_causal": Name("MFU, causal", "% of peak", SPEED, zero=True, percent=True),
    "goodput/ratio": Name("Goodput", "% of all time so far", SPEED, zero=True, percent=True),
    "goodput/total_sec": Name("Time since the first start", "seconds", SPEED, zero=True),
    "smoothed/loss": Name("Smoothed loss", _NATS, UPDATES),
    "smoothed/tokens_per_sec": Name("Smoothed throughput", "tokens per second", SPEED, zero=True),
    "smoothed/mfu": Name("Smoothed MFU", "% of peak", SPEED, zero=True, percent=True),
    "smoothed/step_time": Name("Smoothed time of a step", "seconds", SPEED),
    "gpu/peak_gb": Name("Peak memory", "GiB", MEMORY, zero=True),
    "gpu/allocated_gb": Name("Memory in arrays", "GiB", MEMORY, zero=True),
    "gpu/reserved_gb": Name("Reserved memory", "GiB", MEMORY, zero=True),
    "gpu/total_gb": Name("Available memory", "GiB", MEMORY, zero=True),
    "gpu/mem_utilization": Name("Peak of the available memory", "%", MEMORY, "", True, True),
    "train/tokens": Name("Tokens", "so far", DATA, zero=True),
    "train/epoch": Name("Passes over the data", "so far", DATA, zero=True),
    "epoch/number": Name("Complete epochs", "so far", DATA, zero=True),
    "epoch/loss": Name("Loss of an epoch", _NATS, DATA),
    "epoch/skipped_steps": Name("Skipped steps of an epoch", "steps", DATA, zero=True),
    "epoch/steps": Name("Steps of an epoch", "steps", DATA, zero=True),
    "epoch/time_sec": Name("Time of an epoch", "seconds", DATA, zero=True),
    "train/left_out_samples": Name("Left-out sequences", "so far", DATA, zero=True),
    "train/samples": Name("Sequences", "so far", DATA, zero=True),
    "train/padding_tokens": Name("Padding", "so far", DATA, zero=True),
    "train/valid_tokens": Name("Tokens learned from", "so far", DATA, zero=True),
    "bucket/requests": Name("Requests to buckets", "since the last line", DATA, zero=True),
    "bucket/bytes_fetched": Name("Fetched from buckets", "bytes", DATA, zero=True),
    "bucket/retries": Name("Repeated requests", "since the last line", DATA, zero=True),
    "bucket/cache_hit_rate": Name("Blocks from the cache", "% of all", DATA, "", True, True),
    "moe/expert_balance": Name("Balance of experts", "least over most loaded", EXPERTS, zero=True),
    "moe/aux_loss": Name("Load-balancing loss", "sum over layers; even: 1 each", EXPERTS),
    "moe/router_z_loss": Name("Router z-loss", "sum over layers", EXPERTS),
    "moe/dropped": Name("Dropped assignments", "% of all", EXPERTS, zero=True, percent=True),
    "checkpoint/blocking_sec": Name("Training held up by saves", "seconds", SAVING, zero=True),
    "checkpoint/save_sec": Name("Time of a save", "seconds", SAVING, zero=True),
    "local_checkpoint/blocking_sec": Name("Held up by local saves", "seconds", SAVING, zero=True),
    "local_checkpoint/save_sec": Name("Time of a local save", "seconds", SAVING, zero=True),
    "replica/blocking_sec": Name("Held up by replicas", "seconds", SAVING, zero=True),
    "replica/save_sec": Name("Time of a replica", "seconds", SAVING, zero=True),
    "replica/bytes": Name("Size of a replica", "bytes of process 0", SAVING, zero=True),
}
"""Metrics with fixed names, in the order of the page."""

_RULES: tuple[tuple[str, Name], ...] = (
    (r"eval/tasks/(.+)/([^/]+)", Name("Tasks, {1}", "", TASKS, "{}")),
    (r"eval/(.+)/ema_loss", Name("Evaluation loss", _NATS, EVALUATION, "{}, average")),
    (r"eval/(.+)/ema_bits_per_byte",
     Name("Evaluation, bits per byte", "bits", EVALUATION, "{}, average")),
    (r"eval/(.+)/ema_perplexity", Name("Perplexity", "", EVALUATION, "{}, average")),
    (r"eval/(.+)/loss", Name("Evaluation loss", _NATS, EVALUATION, "{}")),
    (r"eval/(.+)/bits_per_byte", Name("Evaluation, bits per byte", "bits", EVALUATION, "{}")),
    (r"eval/(.+)/perplexity", Name("Perplexity", "", EVALUATION, "{}")),
    (r"goodput/(.+)_sec", Name("Time by category", "seconds", SPEED, "{}", zero=True)),
    (r"loss/(.+)", Name("Loss by dataset", _NATS, DATA, "{}")),
    (r"data/(.+)/tokens", Name("Tokens by dataset", "so far", DATA, "{}", zero=True)),
    (r"train/grad_norm/layers\.(\d+)",
     Name("Gradient norm by layer", "", UPDATES, _PER_LAYER)),
    (r"train/grad_norm/(.+)", Name("Gradient norm of other parts", "", UPDATES, "{}")),
    (r"moe/balance/layers\.(\d+)",
     Name("Balance by layer", "least over most loaded expert", EXPERTS, _PER_LAYER,
                zero=True)),
    (r"moe/router_entropy/layers\.(\d+)",
     Name("Router entropy by layer", "nats", EXPERTS, _PER_LAYER)),
    (r"moe/router_bias/layers\.(\d+)",
     Name("Largest router bias by layer", "", EXPERTS, _PER_LAYER)),
    (r"moe/load/layers\.(\d+)",
     Name("Load of experts", "of an even load", EXPERTS, _PER_LAYER)),
)  # fmt: skip
_GROUPS = {"terms": "Terms of the loss", "model": MODEL, "data": DATA, "moe": EXPERTS,
           "eval": EVALUATION, "train": UPDATES, "gpu": MEMORY}  # fmt: skip


def metric_name(metric: str) -> Name:
    """Return a metric's display name; for unknown metrics it is composed from the parts."""
    if metric in NAMES:
        return NAMES[metric]
    for pattern, name in _RULES:
        if match := re.fullmatch(pattern, metric):
            groups = match.groups()
            return name._replace(label=name.label.format(*groups), title=name.title.format(*groups))
    return _composed(metric)


def _composed(metric: str) -> Name:
    """Compose a name: `mine/head_entropy/layers.3` is "Head entropy by layer" in group "Mine"."""
    first, slash, tail = metric.partition("/")
    group = _GROUPS.get(first, _sentence(first)) if slash else "Other"
    of_layer = re.fullmatch(r"(.+)/layers\.(\d+)", tail)
    title = _sentence((of_layer[1] if of_layer else tail or first).replace("/", ", "))
    if of_layer:
        return Name(f"{title} by layer", "", group, _PER_LAYER.format(of_layer[2]))
    return Name(title, "", group)


def _sentence(words: str) -> str:
    words = words.replace("_", " ").strip()
    return words[:1].upper() + words[1:]
