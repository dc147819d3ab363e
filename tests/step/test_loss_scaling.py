"""Loss scaling with fp16: overflows skip a step and halve the scale."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.train import TrainConfig
from jaxforge.state.train_state import GuardState
from jaxforge.step.guard import Guard
from tests.conftest import tiny_config
from tests.helpers import progress_of, random_batches, setup, underway


def judge(norms, losses=None, **config):
    """Return whether each step is applied, the scales, whether the run halts, and the state."""
    guard = Guard(TrainConfig(mixed_precision="fp16", **config))
    judged = jax.jit(guard.judge)
    state, applied, scales, is_halted = GuardState.fresh(scales_loss=True), [], [], False
    for loss, norm in zip(losses or [1.0] * len(norms), norms, strict=True):
        good, state = judged(state, jnp.float32(loss), jnp.float32(norm))
        applied.append(bool(good))
        scales.append(float(state.loss_scale))
        is_halted = is_halted or bool(guard.is_halted(state))
    return applied, scales, is_halted, state


INF = np.inf


def test_overflow_halves_loss_scale_without_bad_step():
    applied, scales, is_halted, state = judge([1.0, INF, np.nan, 1.0], nan_consecutive_max=1)
    assert applied == [True, False, False, True]
    assert scales == [65536.0, 32768.0, 16384.0, 16384.0]
    assert not is_halted
    assert (int(state.total), int(state.nonfinite), int(state.consecutive)) == (2, 0, 0)
    assert int(state.good) == 2


def test_overflow_at_minimum_scale_is_bad_step():
    config = {"initial_loss_scale": 2.0, "nan_consecutive_max": 2}
    _, scales, is_halted, state = judge([INF, INF], **config)
    assert (scales, is_halted, int(state.nonfinite)) == ([1.0, 1.0], False, 1)
    assert judge([INF, INF, INF], **config)[2]


def test_nonfinite_loss_is_bad_step_at_any_scale():
    _, scales, _, state = judge([1.0, INF], [1.0, np.nan])
    assert scales == [65536.0] * 2
    assert (int(state.nonfinite), int(state.consecutive)) == (1, 1)


def test_loss_scale_grows_after_window_without_overflow():
    norms = [1.0, 1.0, INF, 1.0, 1.0, 1.0, 1.0]
    _, scales, *_ = judge(norms, initial_loss_scale=8.0, loss_scale_window=3)
    assert scales == [8.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0]


def fp16(**train):
    return setup(tiny_config(train={
        "mixed_precision": "fp16", "grad_accum_steps": 2, "loss_scale_window": 2, **train
    }))  # fmt: skip


def restored(program, path, step):
    checkpoints = Checkpoints(path, program.config.checkpoint)
    try:
        like = program.abstract_state()
        return checkpoints.restore(like, step)[0]
    finally:
        checkpoints.close()


def save(program, path, state):
    checkpoints = Checkpoints(path, program.config.checkpoint, axes=program.model.axes)
    checkpoints.save(progress_of(state), state)
    checkpoints.wait()
    checkpoints.close()


@pytest.mark.slow
def test_fp16_run_resumes_bit_exactly(tmp_path):
    """The initial scale makes gradients overflow; the scale decreases, and a restart is exact."""
    program = fp16(initial_loss_scale=2.0**26)
    batches = random_batches(program.config, 12)
    before = jax.device_get(program.state().params)
    state, first = program.run(program.state(), batches[:1])
    assert (first["applied"][0], first["loss_scale"][0]) == (False, 2.0**25)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.params), before)
    state, metrics = program.run(state, batches[1:8])
    assert metrics["applied"][-1] or metrics["applied"][-2]  # the scale grows again and overflows
    assert metrics["consecutive"].max() == 0
    np.testing.assert_allclose(metrics["loss"][0], plain_loss(batches[1]), rtol=1e-3)
    save(program, tmp_path, state)
    again = restored(program, tmp_path, 8)
    _, uninterrupted = program.run(state, batches[8:])
    _, resumed = program.run(again, batches[8:])
    for name in ("loss", "grad_norm", "loss_scale", "skipped"):
        np.testing.assert_array_equal(uninterrupted[name], resumed[name])


def plain_loss(batch):
    """Return the loss from the same initial parameters in float32."""
    plain = setup(tiny_config(train={"mixed_precision": "fp32", "grad_accum_steps": 2}))
    return plain.run(plain.state(), [batch])[1]["loss"][0]


def test_checkpoint_without_loss_scale_starts_at_initial_scale(tmp_path):
    """A bf16 checkpoint has no scale, and a bf16 run ignores a stored one."""
    bf16 = setup(tiny_config(train={"mixed_precision": "bf16", "grad_accum_steps": 2}))
    program = fp16()
    save(bf16, tmp_path / "bf16", underway(bf16, 1))
    state = restored(program, tmp_path / "bf16", 1)
    assert float(state.guard.loss_scale) == 0
    state, metrics = program.run(state, random_batches(program.config, 1))
    assert (metrics["loss_scale"][0], int(state.guard.total)) == (65536.0, 0)
    save(program, tmp_path / "fp16", state)
    back = restored(bf16, tmp_path / "fp16", 2)
    assert back.guard.loss_scale is None
