"""Console lines in the formats of other training loops, for existing parsers.

The lines equal those of the loops byte by byte, without the prefix of their loggers. A segment
without a known value (memory on CPUs, MFU without a peak) is omitted with its separator.

    kempnerforge  the format of jaxforge and of KempnerForge
    megatron      Megatron-LM's and Megatron-Bridge's `training_log`
    torchtitan    its `MetricsProcessor.log` and `log_validation`, without colours
    mindspeed     MindSpeed-LLM's FSDP2 `TrainMonitor`
    textbook      `step … lr … loss … |g| …`
    json          the objects of metrics.jsonl
"""

import abc
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rich.console import Console

from jaxforge.config.model import MTP_LOSS
from jaxforge.telemetry.measures import StepCost
from jaxforge.telemetry.sinks import (
    Metrics,
    Sample,
    Sink,
    as_json,
    format_line,
    format_sample,
    is_step,
    sample_as_json,
)

Value = float | int
Segments = Mapping[str, tuple[str, ...]]
"""Segment of a line -> the values that it needs."""


class RunFacts(NamedTuple):
    """Facts of a run that log lines contain in addition to metrics.

    Attributes:
        max_steps: `train.max_steps`.
        seq_len: `train.seq_len`.
        grad_accum_steps: `train.grad_accum_steps`.
        cost: tokens and FLOPs of an update.
        examples: sequences of the training data; None if unknown.
    """

    max_steps: int
    seq_len: int
    grad_accum_steps: int
    cost: StepCost
    examples: int | None = None


class Lines(abc.ABC):
    """Base class of the formats: no banner, and samples in the format of jaxforge."""

    def __init__(self, run: RunFacts) -> None:
        self._run = run

    def banner(self) -> str:
        """Return the empty string."""
        return ""

    @abc.abstractmethod
    def train(self, step: int, metrics: Metrics) -> str:
        """Return the line of a logged step."""

    @abc.abstractmethod
    def evaluation(self, step: int, metrics: Metrics) -> str:
        """Return the line of an evaluation; may be empty."""

    def sample(self, step: int, sample: Sample) -> str:
        """Return the line of a sample in the format of jaxforge."""
        return format_sample(step, sample)


class KempnerForge(Lines):
    """Format `[step 10] loss=5.0213 | lr=3.00e-04 | …`."""

    def train(self, step: int, metrics: Metrics) -> str:
        """Return the line of a step."""
        return format_line(step, metrics)

    def evaluation(self, step: int, metrics: Metrics) -> str:
        """Return the line of an evaluation."""
        return format_line(step, metrics)


class Json(Lines):
    """Format `{"step": 10, "time": …, "train/loss": …}`."""

    def train(self, step: int, metrics: Metrics) -> str:
        """Return the object of a step."""
        return as_json(step, metrics)

    def evaluation(self, step: int, metrics: Metrics) -> str:
        """Return the object of an evaluation."""
        return as_json(step, metrics)

    def sample(self, step: int, sample: Sample) -> str:
        """Return the object of a sample."""
        return sample_as_json(step, sample)


class Textbook(Lines):
    """Format `step     10  lr 3.00e-04  loss 5.0213  |g| 1.234`, and `  val loss 4.9876`."""

    def train(self, step: int, metrics: Metrics) -> str:
        """Return the line of a step."""
        return "  ".join(_fill_segments(_TEXTBOOK, {**metrics, "step": step}))

    def evaluation(self, step: int, metrics: Metrics) -> str:
        """Return the loss over all sets."""
        return "".join(_fill_segments({"  val loss {:.4f}": ("eval/loss",)}, metrics))


_TEXTBOOK: Segments = {
    "step {:6d}": ("step",),
    "lr {:.2e}": ("train/lr",),
    "loss {:.4f}": ("train/loss",),
    "|g| {:.3f}": ("train/grad_norm",),
}


class Torchtitan(Lines):
    """Format `step: 10  loss:  5.02130  grad_norm:  1.2345  memory: 61.20GiB(77.00%)  …`."""

    def __init__(self, run: RunFacts) -> None:
        super().__init__(run)
        self._memory: Metrics = {}

    def train(self, step: int, metrics: Metrics) -> str:
        """Return the line of a step; tokens and full-attention FLOPs are per second and device."""
        self._memory = {k: v for k, v in metrics.items() if k.startswith("gpu/")}
        # torchtitan reports tokens and FLOPs per device, not of the job.
        tps = metrics["train/tokens_per_sec"] / self._run.cost.n_devices
        tflops = self._run.cost.flops * tps / 1e12
        values = {**metrics, "step": step, "tps": round(tps), "tflops": tflops}
        return "  ".join(_fill_segments(_TORCHTITAN, values))

    def evaluation(self, step: int, metrics: Metrics) -> str:
        """Return the line of an evaluation over all sets, with the memory of the last step."""
        if "eval/loss" not in metrics:
            return ""
        values = {**self._memory, **metrics, "step": step}
        return "  ".join(_fill_segments(_TORCHTITAN_EVALUATION, values))


_MEMORY = {"memory: {:5.2f}GiB({:.2%})": ("gpu/peak_gb", "gpu/mem_utilization")}
_TORCHTITAN: Segments = {
    "step: {:2}": ("step",),
    "loss: {:8.5f}": ("train/loss",),
    "grad_norm: {:7.4f}": ("train/grad_norm",),
    **_MEMORY,
    "tps: {:,}": ("tps",),
    "tflops: {:,.2f}": ("tflops",),
    "mfu: {:.2%}": ("train/mfu",),
}
_TORCHTITAN_EVALUATION: Segments = {
    "validate step: {:2}": ("step",),
    "loss: {:7.4f}": ("eval/loss",),
    **_MEMORY,
}


class Megatron(Lines):
    """Format ` [time] iteration       10/     500 | consumed samples:         2560 | … |`.

    The loss is the mean over applied updates since the last line. Skipped and NaN iterations count
    since the last line. As in Megatron, skipped iterations are updates that were refused (overflow,
    not finite, a spike), without iterations in `train.iterations_to_skip` and without labels.
    Skipped samples are those of `train.iterations_to_skip` so far; they are left out while 0.
    `metrics.collect` adds zeros in gradients and the norm of the parameters.
    """

    def train(self, step: int, metrics: Metrics) -> str:
        """Return a line with time and FLOPs of the step, and the line that parsers look for."""
        values = _counts(self._run, step, metrics)
        # Megatron-Bridge prints this line of its own before that of Megatron-LM.
        speed = "Step Time : {:.2f}s GPU utilization: {:.1f}MODEL_TFLOP/s/GPU".format(
            metrics["train/step_time_sec"], metrics["train/tflops_per_device"]
        )
        now = time.strftime("%Y-%m-%d %H:%M:%S")
        return f"{speed}\n [{now}]" + _join_segments(_MEGATRON, values)

    def evaluation(self, step: int, metrics: Metrics) -> str:
        """Return loss and perplexity of all sets and of each set, between lines of dashes."""
        losses: dict[str, float] = {}
        for name, value in metrics.items():
            if name.startswith("eval/") and name.endswith("/loss"):
                # eval/<dataset>/loss; eval/loss is that of all sets.
                dataset = "/".join(name.split("/")[1:-1])
                losses[f"lm loss ({dataset})" if dataset else "lm loss"] = value
        if not losses:
            return ""
        line = f" validation loss at iteration {step} | " + "".join(
            # Megatron caps the exponent at 20, so that PPL stays finite.
            f"{key} value: {loss:.6E} | {key} PPL: {math.exp(min(20, loss)):.6E} | "
            for key, loss in losses.items()
        )
        dashes = "-" * (len(line) + 1)
        return f"{dashes}\n{line}\n{dashes}"


class MindSpeed(Megatron):
    """Format ` iteration 10/ 500 | consumed samples: 2560 | consumed tokens: … |`.

    The loss is the mean over applied updates since the last line. Consumed tokens are the tokens of
    applied updates without padding. The original loop has no evaluations; the lines of Megatron
    are used.
    """

    def banner(self) -> str:
        """Return the banner of transformers' `Trainer`."""
        run, batch = self._run, self._run.cost.tokens // self._run.seq_len
        rows = {
            "Num examples": run.examples,
            "Num Epochs": math.ceil(run.max_steps * batch / run.examples) if run.examples else None,
            "Total Batch Size": batch,
            "Gradient Accumulation steps": run.grad_accum_steps,
            "Total optimization steps": run.max_steps,
        }
        known = [f"  {name} = {value}" for name, value in rows.items() if value]
        return "\n".join(["***** Running training (jaxforge) *****", *known])

    def train(self, step: int, metrics: Metrics) -> str:
        """Return the line of a step."""
        return _join_segments(_MINDSPEED, _counts(self._run, step, metrics))


_MEGATRON: Segments = {
    "iteration {:8d}/{:8d}": ("step", "max_steps"),
    "consumed samples: {:12d}": ("samples",),
    "skipped samples: {:12d}": ("skipped samples",),
    "elapsed time per iteration (ms): {:.1f}": ("ms",),
    "throughput per GPU (TFLOP/s/GPU): {:.1f}": ("train/tflops_per_device",),
    "learning rate: {:.6E}": ("train/lr",),
    "global batch size: {:5d}": ("batch",),
    "lm loss: {:.6E}": ("interval/loss",),
    "loss scale: {:.1f}": ("loss_scale",),
    "grad norm: {:.3f}": ("train/grad_norm",),
    "num zeros: {}": ("train/num_zeros_in_grad",),
    "params norm: {:.3f}": ("train/params_norm",),
    "max attention logit: {:.3f}": ("train/max_attention_logit",),
    "number of skipped iterations: {:3d}": ("skipped",),
    "number of nan iterations: {:3d}": ("nan",),
}
_MINDSPEED: Segments = {
    "iteration {:8d}/{:8d}": ("step", "max_steps"),
    "consumed samples: {:10d}": ("samples",),
    "consumed tokens: {:10d}": ("tokens",),
    "elapsed time per iteration (ms): {:.2f}": ("ms",),
    "tokens/s: {:.2f}": ("train/tokens_per_sec",),
    "mfu: {:.2f}": ("% of peak",),
    "learning rate: {:.6E}": ("train/lr",),
    "global batch size: {:5d}": ("batch",),
    "lm loss: {:.6E}": ("interval/loss",),
    "grad norm: {:.3f}": ("train/grad_norm",),
    "max_memory_allocated(GB): {:.2f}": ("gpu/peak_gb",),
    "max_memory_reserved(GB): {:.2f}": ("gpu/reserved_gb",),
}


def _counts(run: RunFacts, step: int, metrics: Metrics) -> dict[str, Value]:
    """Return the metrics with the counts and units of Megatron added."""
    # Batches may grow, so the size of the latest update is rate times time.
    tokens = metrics["train/tokens_per_sec"] * metrics["train/step_time_sec"]
    values: dict[str, Value] = {
        **metrics,
        "step": step,
        "max_steps": run.max_steps,
        "batch": round(tokens / run.seq_len),
        "samples": round(metrics["train/samples"]),
        "tokens": round(metrics["train/tokens"] - metrics.get("train/padding_tokens", 0)),
        "ms": 1000 * metrics["train/step_time_sec"],
        "loss_scale": metrics.get("train/loss_scale", 1.0),  # only fp16 needs one
        "skipped": round(
            metrics["interval/skipped_steps"]
            - metrics.get("interval/left_out_steps", 0)
            - metrics.get("interval/unlabeled_steps", 0)
        ),
        "nan": round(metrics["interval/nan_steps"]),
    }
    if "train/left_out_samples" in metrics:
        values["skipped samples"] = round(metrics["train/left_out_samples"])
    if "train/mfu" in metrics:
        values["% of peak"] = 100 * metrics["train/mfu"]
    return values


def _join_segments(segments: Segments, values: Mapping[str, Value]) -> str:
    """Return the segments with separators; the terms of the loss follow it, such as `mtp loss`."""
    terms = {
        f"{name.removeprefix('terms/').replace(MTP_LOSS, 'mtp loss')}: {{:.6E}}": (name,)
        for name in values
        if name.startswith("terms/")
    }
    # Insertion order is the order of the line: terms directly follow the loss.
    with_terms: dict[str, tuple[str, ...]] = {}
    for text, names in segments.items():
        with_terms |= {text: names, **(terms if names == ("interval/loss",) else {})}
    return "".join(f" {segment} |" for segment in _fill_segments(with_terms, values))


def _fill_segments(segments: Segments, values: Mapping[str, Value]) -> Iterator[str]:
    """Yield the segments whose values are known."""
    for text, names in segments.items():
        if values.keys() >= set(names):
            yield text.format(*(values[name] for name in names))


LINE_FORMATS: Mapping[str, Callable[[RunFacts], Lines]] = {
    "kempnerforge": KempnerForge,
    "megatron": Megatron,
    "torchtitan": Torchtitan,
    "mindspeed": MindSpeed,
    "textbook": Textbook,
    "json": Json,
}
"""Values of `metrics.log_format`."""


class LineSink(Sink):
    """Plain lines for each logged step, for output that is not a terminal or that is parsed.

    Args:
        console: receives the lines verbatim, without wrapping, colours or markup.
        lines: format of the lines.
    """

    def __init__(self, console: Console, lines: Lines) -> None:
        self._console, self._lines = console, lines
        self._print(lines.banner())

    def write(self, step: int, metrics: Metrics) -> None:
        """Print a step or an evaluation."""
        line = self._lines.train if is_step(metrics) else self._lines.evaluation
        self._print(line(step, metrics))

    def write_samples(self, step: int, samples: Sequence[Sample]) -> None:
        """Print each sample."""
        for sample in samples:
            self._print(self._lines.sample(step, sample))

    def _print(self, text: str) -> None:
        if text:
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
