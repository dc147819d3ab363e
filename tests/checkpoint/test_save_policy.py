"""Steps that are saved, and checkpoints that are retained."""

from types import SimpleNamespace

import pytest
from orbax.checkpoint import checkpoint_managers as policies

from jaxforge.checkpoint.save_policy import SavePolicy, milestones
from jaxforge.config import DynCkptWindow
from tests.conftest import tiny_config


def due(interval=1000, ramp=(), **window):
    checkpoint = {"interval": interval, **({"dyn_ckpt_window": window} if window else {})}
    train = {"grad_accum_steps": ramp[-1]["grad_accum_steps"] if ramp else 1, "batch_ramp": ramp}
    return SavePolicy(tiny_config(checkpoint=checkpoint, train=train))


def test_interval_is_due_except_at_start():
    assert [step for step in range(3500) if due()(step)] == [1000, 2000, 3000]


def test_window_matches_kempnerforge():
    got = [step for step in range(2100) if due(start=0, stop=512)(step)]
    assert got == [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000]


def test_window_overrides_interval():
    got = [step for step in range(60) if due(interval=5, start=10, stop=30)(step)]
    assert got == [5, 10, 11, 12, 14, 18, 26, 35, 40, 45, 50, 55]


@pytest.mark.parametrize(("start", "stop"), [(7, 7), (0, 0)])
def test_window_of_one_step_saves_it(start, stop):
    assert list(milestones(DynCkptWindow(start=start, stop=stop))) == [start]


def test_milestones_are_window_steps():
    policy = due(interval=4, start=0, stop=8)
    assert [step for step in range(30) if policy.is_milestone(step)] == [0, 1, 2, 4, 8]
    assert not any(due().is_milestone(step) for step in range(30))


def test_checkpoint_is_due_before_batch_grows():
    ramp = [{"grad_accum_steps": 1}, {"start": 7, "grad_accum_steps": 2}]
    assert [step for step in range(30) if due(interval=10, ramp=ramp)(step)] == [7, 10, 20]


@pytest.mark.parametrize("last", [0, 4, 9, 26, 100])
@pytest.mark.parametrize("window", [{}, {"start": 10, "stop": 30}, {"start": 0, "stop": 5}])
def test_steps_and_count_match_policy(window, last):
    policy = due(interval=5, **window)
    expected = [step for step in range(last + 1) if policy(step)]
    assert list(policy.steps(last)) == expected
    assert policy.count(last) == len(expected)


def test_orbax_retains_milestones():
    saved = [SimpleNamespace(step=step) for step in (0, 1, 2, 3, 4, 10, 20, 30)]
    window = DynCkptWindow(start=0, stop=4)
    policy = policies.AnyPreservationPolicy(
        [policies.LatestN(2), policies.CustomSteps(list(milestones(window)))]
    )
    retained = policy.should_preserve(saved, context=policies.PreservationContext())
    assert [item.step for item, keep in zip(saved, retained, strict=True) if keep] == [
        0,
        1,
        2,
        4,
        20,
        30,
    ]
