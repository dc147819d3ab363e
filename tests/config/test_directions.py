"""Directions of metrics by name and mode."""

import pytest

from jaxforge.config.eval import higher_is_better


@pytest.mark.parametrize(
    "metric",
    [
        "eval/loss", "eval/ema_loss", "eval/web/perplexity", "eval/a/ema_bits_per_byte",
        "train/loss", "smoothed/loss", "loss/web", "terms/penalty", "train/mtp_loss/depths.1",
        "eval/dpo/loss", "distillation/kl", "eval/accuracy/loss", "eval/tasks/x/word_perplexity",
        "train/grad_norm", "model/aux_loss/layers.3",
    ],
)  # fmt: skip
def test_lower_is_better(metric):
    assert higher_is_better(metric) is False


@pytest.mark.parametrize(
    "metric",
    [
        "eval/accuracy", "eval/loss/accuracy", "eval/dpo/accuracy", "eval/tasks/core",
        "eval/tasks/ema_core", "eval/tasks/core/copa/centered_acc", "eval/tasks/piqa/acc_norm",
        "eval/tasks/gsm8k/strict-match/exact_match", "eval/tasks/x/ema_f1", "train/mfu",
        "train/tokens_per_sec",
    ],
)  # fmt: skip
def test_higher_is_better(metric):
    assert higher_is_better(metric) is True


@pytest.mark.parametrize(
    "metric",
    ["eval/entropy", "eval/tasks/x/acc_stderr", "train/loss_scale", "moe/dropped", "train/lr",
     "eval/loss/entropy"],
)  # fmt: skip
def test_other_metrics_need_a_mode(metric):
    assert higher_is_better(metric) is None
    assert higher_is_better(metric, "max") is True
    assert higher_is_better(metric, "min") is False
