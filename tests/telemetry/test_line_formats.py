"""Lines compared with lines of other loops and with the expressions of their parsers."""

import io
import json
import math
import re
import types

import pytest
from rich.console import Console

from jaxforge.config.metrics import MetricsConfig
from jaxforge.telemetry import line_formats
from jaxforge.telemetry.line_formats import LINE_FORMATS, LineSink, RunFacts
from jaxforge.telemetry.measures import StepCost, Sums
from jaxforge.telemetry.metric_writers import open_writers
from tests.conftest import tiny_config

RUN = RunFacts(
    max_steps=500, seq_len=2048, grad_accum_steps=4, examples=64000,
    cost=StepCost(tokens=256 * 2048, flops=5.2e10, causal_flops=5.1e10, n_devices=8),
)  # fmt: skip
STEP = {
    "train/loss": 5.021314, "train/grad_norm": 1.23456, "train/lr": 3e-4,
    "train/samples": 2560.0, "train/tokens": 8 * 256 * 2048.0, "train/skipped_steps": 2.0,
    "train/tokens_per_sec": 256 * 2048 / 1.5, "train/step_time_sec": 1.5,
    "train/tflops_per_device": 2.2284, "interval/loss": 5.1234567, "interval/skipped_steps": 1.0,
    "interval/nan_steps": 1.0,
}  # fmt: skip
ON_GPU = {
    "train/mfu": 0.41304, "gpu/peak_gb": 61.2, "gpu/reserved_gb": 70.04, "gpu/total_gb": 79.6,
    "gpu/mem_utilization": 61.2 / 79.6,
}  # fmt: skip
EVALUATION = {"eval/loss": 4.5, "eval/perplexity": math.exp(4.5)}


@pytest.fixture(autouse=True)
def noon(monkeypatch):
    clock = types.SimpleNamespace(strftime=lambda form: "2026-08-22 12:00:00")
    monkeypatch.setattr(line_formats, "time", clock)


def printed(name, step, *logged, run=RUN):
    """Return the lines of a sink that writes to a pipe."""
    text = io.StringIO()
    sink = LineSink(Console(file=text, width=20), LINE_FORMATS[name](run))
    for metrics in logged:
        sink.write(step, metrics)
    return text.getvalue()


EXPECTED = {
    "kempnerforge": (
        "[step 10] loss=5.0213 | lr=3.00e-04 | grad_norm=1.235 | tok/s=349,525 | mfu=41.3% | "
        "mem=61.2/80GB | step_time=1.50s | skipped=2\n"
        "[step 10] eval_loss=4.5000 | eval_perplexity=90.02\n"
    ),
    "megatron": (
        "Step Time : 1.50s GPU utilization: 2.2MODEL_TFLOP/s/GPU\n"
        " [2026-08-22 12:00:00] iteration       10/     500 | consumed samples:         2560 |"
        " elapsed time per iteration (ms): 1500.0 | throughput per GPU (TFLOP/s/GPU): 2.2 |"
        " learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 5.123457E+00 |"
        " loss scale: 1.0 | grad norm: 1.235 | number of skipped iterations:   1 |"
        " number of nan iterations:   1 |\n"
        "------------------------------------------------------------"
        "----------------------------------\n"
        " validation loss at iteration 10 | lm loss value: 4.500000E+00 |"
        " lm loss PPL: 9.001713E+01 | \n"
        "------------------------------------------------------------"
        "----------------------------------\n"
    ),
    "torchtitan": (
        "step: 10  loss:  5.02131  grad_norm:  1.2346  memory: 61.20GiB(76.88%)  tps: 43,691  "
        "tflops: 2,271.91  mfu: 41.30%\n"
        "validate step: 10  loss:  4.5000  memory: 61.20GiB(76.88%)\n"
    ),
    "mindspeed": (
        "***** Running training (jaxforge) *****\n"
        "  Num examples = 64000\n"
        "  Num Epochs = 2\n"
        "  Total Batch Size = 256\n"
        "  Gradient Accumulation steps = 4\n"
        "  Total optimization steps = 500\n"
        " iteration       10/     500 | consumed samples:       2560 |"
        " consumed tokens:    4194304 | elapsed time per iteration (ms): 1500.00 |"
        " tokens/s: 349525.33 | mfu: 41.30 |"
        " learning rate: 3.000000E-04 | global batch size:   256 | lm loss: 5.123457E+00 |"
        " grad norm: 1.235 | max_memory_allocated(GB): 61.20 | max_memory_reserved(GB): 70.04 |\n"
    ),
    "textbook": "step     10  lr 3.00e-04  loss 5.0213  |g| 1.235\n  val loss 4.5000\n",
}


@pytest.mark.parametrize("name", EXPECTED)
def test_lines_equal_original_bytes(name):
    logged = [STEP | ON_GPU] if name == "mindspeed" else [STEP | ON_GPU, EVALUATION]
    assert printed(name, 10, *logged) == EXPECTED[name]


def test_megatron_line_has_collected_zeros_and_parameter_norm():
    extras = {"train/num_zeros_in_grad": 12.0, "train/params_norm": 98.7654}
    assert (
        " grad norm: 1.235 | num zeros: 12.0 | params norm: 98.765 |"
        " number of skipped iterations:   1 |"
    ) in printed("megatron", 10, STEP | extras)


def test_mindspeed_tokens_exclude_padding():
    padded = {**STEP, "train/padding_tokens": 304.0}
    assert " | consumed tokens:    4194000 |" in printed("mindspeed", 10, padded)


@pytest.mark.parametrize("name", ["megatron", "mindspeed"])
def test_loss_terms_follow_the_loss(name):
    terms = {"terms/mtp_loss": 1.5, "terms/aux loss": 0.25}
    assert (
        " lm loss: 5.123457E+00 | mtp loss: 1.500000E+00 | aux loss: 2.500000E-01 |"
    ) in printed(name, 10, STEP | terms)


def test_segments_without_value_are_omitted():
    assert printed("torchtitan", 3, STEP, EVALUATION) == (
        "step:  3  loss:  5.02131  grad_norm:  1.2346  tps: 43,691  tflops: 2,271.91\n"
        "validate step:  3  loss:  4.5000\n"
    )
    all_skipped = {name: value for name, value in STEP.items() if name != "interval/loss"}
    line = printed("megatron", 10, all_skipped)
    assert "global batch size:   256 | loss scale: 1.0 |" in line
    line = printed("mindspeed", 10, STEP, run=RUN._replace(examples=None))
    assert "tokens/s: 349525.33 | learning rate" in line
    assert line.endswith("| grad norm: 1.235 |\n")
    assert "Num" not in line


@pytest.mark.parametrize(
    ("name", "expression", "expected"),
    [
        ("kempnerforge", r"loss=([\d.]+)", "5.0213"),
        ("megatron", r"lm loss: ([\d.E+-]+)", "5.123457E+00"),
        ("megatron", r"iteration +(\d+)/ +\d+ \|", "10"),
        ("megatron", r"elapsed time per iteration \(ms\): ([\d.]+)", "1500.0"),
        ("megatron", r"grad norm: ([\d.]+)", "1.235"),
        ("megatron", r"validation loss at .*lm loss value: ([\d.E+-]+)", "4.500000E+00"),
        ("torchtitan", r"step:\s*(\d+)\s+loss:\s*[\d.]+", "10"),
        ("torchtitan", r"tps:\s*([\d,]+)", "43,691"),
        ("mindspeed", r"lm loss: ([\d.E+-]+)", "5.123457E+00"),
        ("textbook", r"loss ([\d.]+)", "5.0213"),
    ],
)
def test_expressions_of_existing_parsers_match(name, expression, expected):
    assert re.search(expression, printed(name, 10, STEP, EVALUATION))[1] == expected


def test_json_format_equals_metrics_file():
    line = json.loads(printed("json", 10, STEP | {"train/loss": math.nan}))
    assert line.pop("time") > 0
    assert line == {"step": 10, **STEP, "train/loss": None}


def test_megatron_evaluation_names_every_set():
    text = printed(
        "megatron", 7, {"eval/loss": 2.0, "eval/a/b/loss": 3.0, "eval/a/b/perplexity": 9}
    )
    assert " validation loss at iteration 7 | lm loss value: 2.000000E+00 |" in text
    assert "| lm loss (a/b) value: 3.000000E+00 | lm loss (a/b) PPL: 2.008554E+01 | \n" in text


@pytest.mark.parametrize("name", sorted(LINE_FORMATS.keys() - {"json"}))
def test_other_metrics_have_no_line(name):
    assert printed(name, 7, {"other": 1.0}).removeprefix(LINE_FORMATS[name](RUN).banner()) in (
        "", "\n",
    )  # fmt: skip


@pytest.mark.parametrize("name", ["megatron", "mindspeed"])
def test_samples_and_batch_size_follow_growing_batch(name):
    """Eight steps of 256, two of them skipped, are followed by two of 512."""
    tokens, samples = (6 * 256 + 2 * 512) * 2048.0, 8 * 256.0 + 2 * 512
    line = printed(name, 10, STEP | {
        "train/tokens_per_sec": 512 * 2048 / 1.5, "train/tokens": tokens, "train/samples": samples,
    })  # fmt: skip
    assert re.search(r"consumed samples: +3072 \|", line)
    assert "global batch size:   512 |" in line


def test_explicit_format_gives_plain_lines_on_terminal(tmp_path):
    assert set(LINE_FORMATS) == set(
        MetricsConfig.model_json_schema()["properties"]["log_format"]["enum"]
    )
    text = io.StringIO()
    config = tiny_config(metrics={"log_format": "textbook"}, checkpoint={"dir": str(tmp_path)})
    console = Console(file=text, force_terminal=True)
    for writer in open_writers(console, config, "id", 0):
        writer.write(10, STEP)
        writer.close()
    assert text.getvalue() == "step     10  lr 3.00e-04  loss 5.0213  |g| 1.235\n"


def test_interval_means_exclude_skipped_and_nan_steps():
    start = Sums(skipped=3)
    first = start.plus([2.0, 9.0, math.nan, 4.0], [3, 4, 5, 5])
    assert first.since(start) == {
        "interval/loss": 3.0, "interval/skipped_steps": 2.0, "interval/nan_steps": 1.0,
    }  # fmt: skip
    applied_all_the_same = first.plus([math.nan, 1.0], [5, 5])
    assert applied_all_the_same.since(first)["interval/loss"] == 1.0
    nothing = first.plus([math.inf], [6])
    assert nothing.since(first) == {"interval/skipped_steps": 1.0, "interval/nan_steps": 1.0}
    assert nothing.since(start)["interval/loss"] == 3.0
