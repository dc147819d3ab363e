"""Metrics computed on the host: speed, memory, moving averages.

`docs/metrics.md` lists every name with its unit and formula.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from jaxforge.config.fine_tuning import METRIC_PREFIXES
from jaxforge.config.job import JobConfig
from jaxforge.config.model import MTP_LOSS
from jaxforge.model import flops
from jaxforge.parallel import hardware
from jaxforge.telemetry.sinks import Metrics


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Cost of an update and peak speed of the devices.

    Attributes:
        tokens: tokens of one update, over all devices.
        samples: sequences of one update.
        flops: model FLOPs per token in the convention of KempnerForge.
        causal_flops: model FLOPs per token in the convention of Megatron.
        n_devices: number of devices of the job.
        peak_tflops: peak TFLOP/s of one device; None if unknown.
    """

    tokens: int
    samples: int = 1
    flops: float = 0.0
    causal_flops: float = 0.0
    n_devices: int = 1
    peak_tflops: float | None = None

    @classmethod
    def of(cls, config: JobConfig, samples: int) -> "StepCost":
        """Return the cost of a config's update on the devices of this job."""
        chip = hardware.chip_by_kind(jax.devices()[0].device_kind)
        return cls(
            samples * config.train.seq_len,
            samples,
            flops.flops_per_token(config.model, config.train.seq_len),
            flops.causal_flops_per_token(config.model, config.train.seq_len),
            jax.device_count(),
            config.metrics.peak_tflops or (chip and chip.peak_flops / 1e12),
        )

    def speed(self, seconds: float, samples: float) -> Metrics:
        """Return `train/*` speed metrics of an update; MFU only if the peak is known.

        Args:
            seconds: time of the update.
            samples: sequences of the update.
        """
        # Batches may grow (a ramp), so tokens scale with the sequences drawn.
        rate = self.tokens * samples / self.samples / seconds
        speed = {
            "train/tokens_per_sec": rate,
            "train/step_time_sec": seconds,
            "train/tflops_per_device": self._tflops(self.causal_flops, rate),
        }
        if self.peak_tflops is None:
            return speed
        return speed | {
            "train/mfu": self._tflops(self.flops, rate) / self.peak_tflops,
            "train/mfu_causal": self._tflops(self.causal_flops, rate) / self.peak_tflops,
        }

    def _tflops(self, flops_per_token: float, rate: float) -> float:
        return flops_per_token * rate / 1e12 / self.n_devices


_GB = 1024**3
_MEMORY = {
    "gpu/allocated_gb": "bytes_in_use",
    "gpu/peak_gb": "peak_bytes_in_use",
    "gpu/reserved_gb": "pool_bytes",
    "gpu/total_gb": "bytes_limit",
}


def memory(devices: Iterable[jax.Device]) -> Metrics:
    """Return `gpu/*` in GiB, each the largest over the devices; empty if they report none.

    The allocator on the host has these figures, so no device is waited for.
    """
    stats = [stats_ for device in devices if (stats_ := device.memory_stats())]
    gb = {
        name: max(stats_of_device[key] for stats_of_device in stats) / _GB
        for name, key in _MEMORY.items()
        if stats and all(key in stats_of_device for stats_of_device in stats)
    }
    if gb.get("gpu/total_gb") and "gpu/peak_gb" in gb:
        gb["gpu/mem_utilization"] = gb["gpu/peak_gb"] / gb["gpu/total_gb"]
    return gb


def describe_memory(
    devices: Iterable[jax.Device], compiled: jax.stages.Compiled | None
) -> str | None:
    """Return `memory (GB) | mem-allocated-gigabytes: 12.345 | …`, as Megatron reports (1e9 bytes).

    Args:
        devices: devices of this process; each figure is the largest over them.
        compiled: the step, whose arguments are state and batch; None leaves its figures out.

    Returns:
        The text; None if devices do not report memory.
    """
    stats = [stats_ for device in devices if (stats_ := device.memory_stats())]
    if not stats:
        return None
    sizes = {
        name: max(stat[key] for stat in stats)
        for name, key in _REPORTED.items()
        if all(key in stat for stat in stats)
    }
    if compiled is not None and (step := compiled.memory_analysis()):
        sizes["step-arguments"] = step.argument_size_in_bytes
        sizes["step-temporaries"] = step.temp_size_in_bytes
        sizes["step-code"] = step.generated_code_size_in_bytes
    return " | ".join(
        ["memory (GB)", *(f"{k}-gigabytes: {float(f'{v / 1e9:.5g}')}" for k, v in sizes.items())]
    )


_REPORTED = {
    "mem-allocated": "bytes_in_use",
    "mem-max-allocated": "peak_bytes_in_use",
    "mem-reserved": "pool_bytes",
    "mem-limit": "bytes_limit",
}


class Sums(NamedTuple):
    """Sums over the steps of a run. Differences of two are sums over an interval.

    Attributes:
        loss: sum of the losses of applied updates. A loss that is not finite is excluded, since it
            would make all later means NaN.
        updates: number of applied updates.
        skipped: number of steps whose update was not applied.
        nan: number of steps with labels whose loss was not finite, except for left-out steps.
        left_out: number of skipped steps that `train.iterations_to_skip` names.
        unlabeled: number of other skipped steps, those without valid labels.
    """

    loss: float = 0.0
    updates: int = 0
    skipped: int = 0
    nan: int = 0
    left_out: int = 0
    unlabeled: int = 0

    def plus(
        self,
        losses: Sequence[float],
        skipped: Sequence[int],
        labels: Sequence[int] | None = None,
        is_left_out: Sequence[bool] | None = None,
    ) -> "Sums":
        """Return the sums with further steps added.

        Args:
            losses: loss of each step.
            skipped: count of skipped steps of the run after each step.
            labels: number of valid labels of each step; without any, the loss of a step is NaN, the
                mean of nothing. None means that each step has some.
            is_left_out: whether `train.iterations_to_skip` names each step; None means no step.
        """
        # A loss is in the mean only if it is finite and its update was applied.
        finite = [math.isfinite(loss) for loss in losses]
        applied = [
            loss
            for loss, good, was, now in zip(
                losses, finite, (self.skipped, *skipped[:-1]), skipped, strict=True
            )
            if good and now <= was  # the count of skipped steps has not grown
        ]
        named = [False] * len(losses) if is_left_out is None else is_left_out
        has_labels = [n > 0 for n in labels] if labels is not None else [True] * len(losses)
        # Steps that the user leaves out count neither as NaN nor as unlabeled.
        drawn = [
            (had, good)
            for had, good, left_out in zip(has_labels, finite, named, strict=True)
            if not left_out
        ]
        return Sums(
            loss=self.loss + sum(applied),
            updates=self.updates + len(applied),
            skipped=skipped[-1],
            nan=self.nan + sum(had and not good for had, good in drawn),
            left_out=self.left_out + sum(named),
            unlabeled=self.unlabeled + sum(not had for had, _ in drawn),
        )

    def since(self, before: "Sums") -> Metrics:
        """Return `interval/*` of the steps after `before`.

        `interval/loss` is missing if no update was applied, `interval/left_out_steps` and
        `interval/unlabeled_steps` if they are 0.
        """
        updates = self.updates - before.updates
        loss = {"interval/loss": (self.loss - before.loss) / updates} if updates else {}
        counts = {
            "interval/left_out_steps": self.left_out - before.left_out,
            "interval/unlabeled_steps": self.unlabeled - before.unlabeled,
        }
        named = {name: float(count) for name, count in counts.items() if count}
        return {
            **loss,
            **named,
            "interval/skipped_steps": float(self.skipped - before.skipped),
            "interval/nan_steps": float(self.nan - before.nan),
        }


def collected(extras: Mapping[str, Any]) -> Metrics:
    """Return `train/*` of `metrics.collect`; norms of layers are `train/grad_norm/*`."""
    metrics: Metrics = {}
    for name, value in extras.items():
        if name != "grad_norms_per_layer":
            metrics[f"train/{name}"] = float(value)
            continue
        for part, norm in value.items():
            norms = (
                {part: norm} if norm.ndim == 0 else {f"{part}.{i}": n for i, n in enumerate(norm)}
            )
            metrics |= {f"train/grad_norm/{layer}": float(n) for layer, n in norms.items()}
    return metrics


def aux_metrics(values: Mapping[str, Any]) -> Metrics:
    """Return metrics of auxiliary outputs.

    They are `terms/*`, `attention/*`, `moe/*`, `train/mtp_loss`, and `model/*` for all others.

    Metrics of `train.objective` keep their names, such as `dpo/accuracy`. An output with one number
    per layer becomes `model/<name>/layers.<i>`.
    """
    metrics = {f"terms/{name}": float(term) for name, term in values.get("losses", {}).items()}
    logits = values.get("logits", {}).items()
    metrics |= {f"attention/{name}": float(value) for name, value in logits}
    aux = dict(values.get("side", {}))
    # [depths] of multi-token prediction; the mean is the metric, each depth has its own.
    by_depth = [float(loss) for loss in aux.pop(MTP_LOSS, ())]
    if by_depth:
        metrics[f"train/{MTP_LOSS}"] = sum(by_depth) / len(by_depth)
        metrics |= {f"train/{MTP_LOSS}/depths.{k}": loss for k, loss in enumerate(by_depth, 1)}
    metrics |= moe_metrics(aux)
    for name, value in aux.items():
        # `moe_metrics` has these, in units that do not depend on the batch.
        if name in ROUTER_OUTPUTS and "expert_counts" in aux:
            continue
        if name.startswith(METRIC_PREFIXES):
            metrics[name] = float(value)
        elif value.ndim == 0:
            metrics[f"model/{name}"] = float(value)
        else:
            metrics |= {
                f"model/{name}/layers.{i}": float(element) for i, element in enumerate(value)
            }
    return metrics


class Smoothed:
    """Moving averages of KempnerForge: the first value, then 0.1 new + 0.9 old at every step."""

    def __init__(self) -> None:
        self._values: Metrics = {}

    def update(self, losses: Sequence[float], steps: int, speed: Metrics) -> Metrics:
        """Add the steps since the last update and return `smoothed/*`.

        Args:
            losses: loss of each step; losses that are not finite are ignored.
            steps: number of steps.
            speed: `StepCost.speed` of the mean step time, used for each of the steps.
        """
        for loss in losses:
            if math.isfinite(loss):
                self._add("smoothed/loss", loss, 1)
        for name in ("tokens_per_sec", "mfu", "step_time"):
            value = speed.get(f"train/{'step_time_sec' if name == 'step_time' else name}")
            if value is not None:
                self._add(f"smoothed/{name}", value, steps)
        # Until the first finite loss, the name exists with NaN, so that lines have equal keys.
        return {"smoothed/loss": math.nan, **self._values}

    def _add(self, name: str, value: float, times: int) -> None:
        old = self._values.get(name, value)
        # `times` updates with the same value: old <- 0.1 value + 0.9 old, in closed form.
        self._values[name] = value + 0.9**times * (old - value)


ROUTER_OUTPUTS = (
    "expert_counts",
    "aux_loss",
    "router_z",
    "router_entropy",
    "router_bias",
    "dropped",
)
"""Outputs of the router of every layer (`model.router`)."""
LOAD = "moe/load/layers."
"""Prefix of the list of loads of a layer."""


def moe_metrics(outputs: Mapping[str, Any]) -> Metrics:
    """Return the metrics of routers; empty without experts.

        moe/aux_loss          Σ over layers of E Σ f p, before its weight; 1 each at an even load
        moe/router_z_loss     Σ over layers of mean (log Σ exp logit)², before its weight
        moe/expert_balance    load of the least loaded expert / most loaded, over all layers
        moe/dropped           share of the assignments beyond the capacity of their expert
        moe/balance/…         the same ratio of loads within each layer
        moe/router_entropy/…  mean entropy of each layer's scores, nats
        moe/router_bias/…     the largest bias of each layer, if routers have biases
        moe/load/…            list of the assignments of each expert, relative to an even load

    Args:
        outputs: values by the names of `ROUTER_OUTPUTS`, one row for each layer; NaN or 0 for
            layers without experts.
    """
    if "expert_counts" not in outputs:
        return {}
    # [layers, experts]; rows of dense layers are 0.
    counts_LE = np.asarray(outputs["expert_counts"], np.float64)
    layers = np.flatnonzero(counts_LE.sum(axis=1))
    means = {
        name: np.asarray(outputs[name], np.float64)
        for name in ROUTER_OUTPUTS[1:]
        if name in outputs
    }
    metrics: Metrics = {
        "moe/aux_loss": float(means["aux_loss"][layers].sum()),
        "moe/router_z_loss": float(means["router_z"][layers].sum()),
        "moe/expert_balance": _balance(counts_LE[layers]),
        "moe/dropped": float(means["dropped"][layers].mean()),
    }
    for layer in layers.tolist():
        metrics[f"moe/balance/layers.{layer}"] = _balance(counts_LE[layer])
        for name in ("router_entropy", "router_bias"):
            if name in means:
                metrics[f"moe/{name}/layers.{layer}"] = float(means[name][layer])
        # [experts]; 1 is an even load.
        load_E = counts_LE[layer] / counts_LE[layer].mean()
        metrics[f"{LOAD}{layer}"] = load_E.round(3).tolist()
    return metrics


def _balance(counts: Float[np.ndarray, "..."]) -> float:
    return float(counts.min() / counts.max()) if counts.size else float("nan")


def epoch_summary(epoch: int, steps: int, seconds: float, interval: Metrics) -> Metrics:
    """Return the metrics of an epoch.

    After a restart or a rollback within an epoch they cover the steps since then.

    Args:
        epoch: number of complete epochs.
        steps: number of steps in the summary.
        seconds: time of these steps, without pauses.
        interval: `Sums.since` of these steps.
    """
    names = {"interval/loss": "epoch/loss", "interval/skipped_steps": "epoch/skipped_steps"}
    sums = {names[name]: value for name, value in interval.items() if name in names}
    return {
        "epoch/number": float(epoch),
        **sums,
        "epoch/steps": float(steps),
        "epoch/time_sec": seconds,
    }


def describe_epoch(step: int, summary: Metrics) -> str:
    """Return the log message of an epoch; without a loss if no update was applied."""
    loss = f"mean loss {summary['epoch/loss']:.4f}, " if "epoch/loss" in summary else ""
    return (
        f"epoch {summary['epoch/number']:.0f} ended at step {step}: {loss}"
        f"{summary['epoch/steps']:.0f} steps, {summary['epoch/skipped_steps']:.0f} skipped, "
        f"{summary['epoch/time_sec']:.1f} s"
    )
