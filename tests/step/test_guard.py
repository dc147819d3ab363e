"""Detection of bad steps, reactions, and robustness of the statistics."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.train import TrainConfig
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import WINDOW, Counts, GuardState
from jaxforge.step.guard import Guard


def judge(losses, norms=None, **config):
    """Return whether each step is applied and halts, and the final state."""
    guard = Guard(TrainConfig(**config))
    judged = jax.jit(guard.judge)
    state, applied, is_halted = GuardState.fresh(), [], []
    for loss, norm in zip(losses, norms or [1.0] * len(losses), strict=True):
        good, state = judged(state, jnp.float32(loss), jnp.float32(norm))
        applied.append(bool(good))
        is_halted.append(bool(guard.is_halted(state)))
    return applied, is_halted, state


def counts(state):
    known = (name for name in state._fields if name != "losses" and "scale" not in name)
    return {name: int(getattr(state, name)) for name in known}


NORMAL = [2.0 + 0.01 * (i % 7) for i in range(40)]
SPIKES = {"on_spike": "skip", "spike_warmup": 20, "spike_threshold": 6.0}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["loss", "norm"])
def test_nonfinite_loss_or_gradient_is_skipped(bad, where):
    losses, norms = [1.0, 1.0, 1.0], [1.0, 1.0, 1.0]
    (losses if where == "loss" else norms)[1] = bad
    applied, is_halted, state = judge(losses, norms)
    assert applied == [True, False, True]
    assert not any(is_halted)
    assert counts(state) == {
        "consecutive": 0, "total": 1, "nonfinite": 1, "spikes": 0, "good": 2,
    }  # fmt: skip


def test_consecutive_bad_steps_halt_and_good_step_resets():
    nan = np.nan
    _, is_halted, _ = judge([nan, nan, 1.0, nan, nan, nan, nan], nan_consecutive_max=3)
    assert is_halted == [False, False, False, False, False, True, True]


def test_stop_halts_and_warn_applies_updates():
    applied, is_halted, _ = judge([1.0, np.nan, np.nan], on_nonfinite="stop")
    assert applied == [True, False, False]
    assert is_halted == [False, True, True]
    applied, is_halted, state = judge([1.0, np.nan, np.nan], on_nonfinite="warn")
    assert applied == [True] * 3
    assert not any(is_halted)
    assert (int(state.nonfinite), int(state.total)) == (2, 0)


def test_guard_ignores_excluded_updates():
    guard, nan = Guard(TrainConfig(nan_consecutive_max=2)), jnp.float32(jnp.nan)
    _, after_one = guard.judge(GuardState.fresh(), nan, nan)
    for loss in (nan, jnp.float32(1)):
        applied, state = guard.judge(after_one, loss, loss, apply=False)
        assert not applied
        assert not guard.is_halted(state)
        expected = {"consecutive": 1, "total": 2, "nonfinite": 1, "spikes": 0, "good": 0}
        assert counts(state) == expected


def test_spike_is_relative_to_recent_losses():
    applied, _, state = judge([*NORMAL, 2.5, *NORMAL[:3], 2.06], **SPIKES)
    assert applied == [True] * 40 + [False] + [True] * 4
    assert int(state.spikes) == 1
    assert all(judge([*NORMAL, 2.5])[0])  # off by default


def test_infinite_loss_is_nonfinite_and_no_spike():
    applied, _, state = judge([*NORMAL, np.inf], **{**SPIKES, "on_nonfinite": "warn"})
    assert applied[-1]
    assert (int(state.nonfinite), int(state.spikes)) == (1, 0)


def test_spikes_are_ignored_during_warmup():
    applied, _, _ = judge([*NORMAL[:19], 50.0, *NORMAL[:20], 50.0], **SPIKES)
    assert applied == [True] * 40 + [False]


def test_constant_losses_allow_one_percent():
    applied, _, _ = judge([2.0] * 30 + [2.11, 2.13], **SPIKES)
    assert applied == [True] * 31 + [False]


def test_bad_steps_do_not_change_spike_statistics():
    clean = judge(NORMAL, **SPIKES)[2]
    disturbed = [x for loss in NORMAL for x in (loss, np.nan, np.inf)]
    after = judge(disturbed, **SPIKES, nan_consecutive_max=1000)[2]
    np.testing.assert_array_equal(clean.losses, after.losses)
    spiky = NORMAL[:20] + [x for loss in NORMAL[20:] for x in (loss, 1e6)]
    after = judge(spiky, **SPIKES)[2]
    np.testing.assert_array_equal(clean.losses, after.losses)
    assert int(after.spikes) == 20


def test_persistent_spike_halts():
    _, is_halted, _ = judge(NORMAL + [5.0] * 4, **SPIKES, nan_consecutive_max=4)
    assert is_halted[-2:] == [False, True]


def test_spike_window_holds_the_last_losses():
    losses = [9.0 + 0.01 * (i % 5) for i in range(WINDOW)] + NORMAL * 4
    applied, _, state = judge([*losses, 5.0], **SPIKES)
    assert int(state.good) == WINDOW + 160
    assert not applied[-1]  # losses of 9 have left the window
    assert float(jnp.max(state.losses)) < 2.1


def test_counts_have_separate_buffers():
    leaves = jax.tree.leaves((GuardState.fresh(3), Counts.of(Progress())))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
