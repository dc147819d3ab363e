"""Early stopping: conditions, reasons, and state across restarts."""

import json
import math

import pytest

from jaxforge.config import EarlyStopConfig
from jaxforge.errors import UserError
from jaxforge.training.early_stop import EarlyStop


def stop(**keys):
    return EarlyStop(EarlyStopConfig(**keys))


def ends_at(stopper, values, metric="eval/loss", every=10):
    """Return the step of the first reason to stop, with a value every `every` steps."""
    for i, value in enumerate(values, start=1):
        if stopper.reason(every * i, {metric: value}):
            return every * i
    return None


def test_early_stop_is_off_by_default():
    stopper = EarlyStop(EarlyStopConfig())
    assert stopper.reason(9, {"train/loss": 5.0, "eval/loss": 5.0}) is None


def test_patience_runs_from_the_best_value():
    assert ends_at(stop(patience_steps=30), [5, 4, 4.5, 4.2, 4.1, 4.05]) == 50
    assert ends_at(stop(patience_steps=30), [5, 4, 4.5, 4.2, 3.9, 4.05, 4]) is None


def test_gain_below_min_delta_is_no_improvement():
    falling = [5, 4.9, 4.8, 4.7, 4.6]
    assert ends_at(stop(patience_steps=20), falling) is None
    assert ends_at(stop(patience_steps=20, min_delta=0.5), falling) == 30


@pytest.mark.parametrize(
    "metric", ["eval/loss", "train/loss", "eval/perplexity", "eval/bits_per_byte"]
)
def test_loss_improves_when_lower(metric):
    stopper = stop(patience_steps=10, metric=metric)
    assert ends_at(stopper, [5, 4, 3], metric) is None
    assert ends_at(stopper, [3.5], metric, every=40) == 40


def test_other_metric_improves_when_higher():
    stopper = stop(patience_steps=10, metric="model/accuracy")
    assert ends_at(stopper, [0.1, 0.2, 0.3], "model/accuracy") is None
    assert "0.3 (step 30)" in stopper.reason(40, {"model/accuracy": 0.2})


@pytest.mark.parametrize(
    ("keys", "is_higher_better"),
    [
        ({"metric": "eval/loss"}, False),
        ({"metric": "eval/tasks/piqa/ema_acc_norm"}, True),
        ({"metric": "eval/entropy", "mode": "max"}, True),
        ({"metric": "eval/entropy", "mode": "min"}, False),
        ({"metric": "eval/tasks/mine/acc", "mode": "min"}, False),
    ],
)
def test_direction_determines_target_and_patience(keys, is_higher_better):
    better, worse = (0.6, 0.4) if is_higher_better else (0.4, 0.6)
    stopper = stop(target=better, patience_steps=30, **keys)
    metric = keys["metric"]
    assert stopper.reason(10, {metric: worse}) is None
    assert stopper.reason(30, {metric: 0.5}) is None
    assert "has not improved on 0.5 (step 30)" in stopper.reason(60, {metric: worse})
    assert "has reached" in stopper.reason(70, {metric: better})


def test_best_value_of_another_metric_does_not_count():
    loss = stop(patience_steps=10)
    loss.reason(10, {"eval/loss": 3.0})
    accuracy = stop(patience_steps=10, metric="eval/accuracy")
    accuracy.memory = json.loads(json.dumps(loss.memory))
    assert ends_at(accuracy, [0.1, 0.2, 0.2], "eval/accuracy") == 30
    assert accuracy.memory["best_step"] == 20


def test_patience_ignores_steps_without_the_metric():
    stopper = stop(patience_steps=10)
    assert stopper.reason(10, {"eval/loss": 4.0}) is None
    assert stopper.reason(500, {"train/loss": 9.0}) is None
    assert stopper.reason(510, {"eval/loss": 4.0}) is not None


def test_nan_is_never_the_best_value():
    assert ends_at(stop(patience_steps=20), [math.nan, 4, math.nan, math.nan, 3]) == 40
    assert ends_at(stop(patience_steps=20), [math.nan, 4, math.nan, 3, math.nan, 2]) is None


def test_limits_give_their_reason():
    assert stop(max_steps=100).reason(99, {}) is None
    assert stop(max_steps=100).reason(100, {}) == "early_stop.max_steps = 100 is reached"
    assert stop(max_loss=8).reason(5, {"train/loss": 8.0}) is None
    assert (
        stop(max_loss=8).reason(5, {"train/loss": 8.5})
        == "train/loss = 8.5 exceeds early_stop.max_loss = 8"
    )


def test_metric_that_steps_do_not_log_raises():
    logged = {"train/loss": 5.0, "train/lr": 1e-3, "smoothed/loss": 5.0}
    stopper = stop(patience_steps=5, metric="train/losses")
    stopper.check_metric({})
    with pytest.raises(UserError, match=r'"train/losses" is not logged by .* mean "train/loss"\?'):
        stopper.check_metric(logged)
    for keys in ({"patience_steps": 5, "metric": "train/loss"}, {"patience_steps": 5},
                 {"max_steps": 5, "metric": "train/losses"}):  # fmt: skip
        stop(**keys).check_metric(logged)


def test_run_ends_at_its_target():
    loss = stop(target=3.28)
    assert ends_at(loss, [5, 3.3, math.nan, 3.28]) == 40
    assert loss.reason(50, {"train/loss": 1.0}) is None
    reached = "eval/loss = 3.2 has reached early_stop.target = 3.28"
    assert loss.reason(60, {"eval/loss": 3.2}) == reached
    accuracy = stop(target=0.5, metric="model/accuracy")
    assert ends_at(accuracy, [0.3, 0.49, 0.5], "model/accuracy") == 30


def test_reasons_follow_order_of_keys():
    conditions = stop(patience_steps=10, max_steps=50, max_loss=1, metric="train/loss")
    bad = {"train/loss": 5.0}
    assert "max_loss" in conditions.reason(10, bad)
    assert "patience_steps" in conditions.reason(60, bad)
    assert "max_steps" in conditions.reason(60, {})


def test_restart_restores_patience():
    before = stop(patience_steps=30)
    before.reason(10, {"eval/loss": 4.0})
    retained = json.loads(json.dumps(before.memory))
    again = stop(patience_steps=30)
    again.memory = {**retained, "of_another_version": 1}
    assert again.reason(39, {"eval/loss": 5.0}) is None
    assert again.reason(40, {"eval/loss": 5.0}) is not None
    again.memory = {"best": None, "best_step": 0}  # written by earlier versions
    assert again.reason(50, {"eval/loss": 5.0}) is None
