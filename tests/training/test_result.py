"""Metrics of a step under the names of Megatron's `train_step`."""

import numpy as np
import pytest

from jaxforge.config.train import TrainConfig
from jaxforge.training.own_loop import StepResult, reduce_loss

CONFIG = TrainConfig(nan_consecutive_max=3)
GOOD = {"loss": 2.5, "grad_norm": 0.5, "lr": 1e-3, "applied": True, "consecutive": 0}


def result(**metrics):
    values = {**GOOD, **metrics}
    return StepResult(
        {k: np.asarray(v) if np.isscalar(v) else v for k, v in values.items()}, CONFIG
    )


def test_good_step_is_applied():
    good = result()
    assert good.loss_dict == {"lm loss": 2.5}
    assert (good.skipped_iter, good.grad_norm, good.lr) == (0, 0.5, 1e-3)
    assert (good.should_checkpoint, good.should_exit, good.exit_code) == (False, False, 0)
    assert good.num_zeros_in_grad is good.params_norm is good.update_norm is good.grads is None


@pytest.mark.parametrize(("in_a_row", "should_exit", "code"), [(1, False, 0), (3, True, 65)])
def test_bad_step_is_skipped_and_may_exit(in_a_row, should_exit, code):
    bad = result(loss=np.nan, applied=False, consecutive=in_a_row)
    assert bad.skipped_iter == 1
    assert (bad.should_checkpoint, bad.should_exit, bad.exit_code) == (False, should_exit, code)


def test_collected_values_are_in_the_result():
    asked = result(num_zeros_in_grad=np.float32(7), params_norm=3.0, update_norm=0.1)
    assert asked.num_zeros_in_grad == 7
    assert isinstance(asked.num_zeros_in_grad, int)
    assert (asked.params_norm, asked.update_norm) == (3.0, 0.1)


def test_loss_terms_are_reduced_next_to_total():
    parts = {"wiki": np.array([6.0, 2.0]), "code": np.array([[4.0, 1.0], [8.0, 2.0]])}
    assert result(losses=parts).loss_dict == {"lm loss": 2.5, "wiki": 3.0, "code": 4.0}


@pytest.mark.parametrize(
    ("value", "reduced"),
    [
        ([6.0, 4.0], 1.5),
        ([[6.0, 4.0], [1.0, 0.0], [3.0, 1.0]], 2.0),  # Σ / Σ, not the mean of means
        ([0.0, 0.0], np.nan),
        ([5.0], 5.0),
        ([[5.0], [1.0]], 3.0),
    ],
)
def test_reduce_loss_handles_sums_and_means(value, reduced):
    np.testing.assert_equal(reduce_loss("x", value), reduced)


@pytest.mark.parametrize("value", [[1.0, 2.0, 3.0], [[1.0, 2.0, 3.0]], np.zeros((2, 2, 2))])
def test_reduce_loss_rejects_other_shapes(value):
    with pytest.raises(ValueError, match=r"loss 'x' has shape \(.*\)\. Return \[sum, divisor\]"):
        reduce_loss("x", value)
