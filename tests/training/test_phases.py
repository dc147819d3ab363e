"""Phases as a function of the step, and mixtures as the history of a run."""

import json

import pytest

from jaxforge.config.data import DataConfig
from jaxforge.data.segments import Segment
from jaxforge.training.training_data import Phases

SOURCES = [{"name": "web", "path": "w", "weight": 3}, {"name": "code", "path": "c"}]
WEB, EVEN, CODE = ({"web": w, "code": 1 - w} for w in (0.75, 0.5, 0.0))
PHASES = [
    {"start_step": 10, "dataset_weights": {"web": 1}, "lr_scale": 0.5},
    {"start_step": 12, "lr_scale": 0.25},
    {"start_step": 13, "dataset_weights": {"web": 0}},
]


def phases(**data):
    return Phases.of(DataConfig(**{"datasets": SOURCES, "phases": PHASES, **data}))


def drawn(*segments):
    return [Segment(*segment) for segment in segments]


def by_fours(step, samples):
    """Return positions for batches of four sequences, from `samples` at `step` on."""
    return lambda later: samples + 4 * (later - step)


def test_phase_starts_with_update_at_its_first_step():
    assert [phases().lr_scale(step) for step in range(9, 15)] == [1, 0.5, 0.5, 0.25, 1, 1]
    assert [phases().index(step) for step in (0, 9, 10, 12, 13, 99)] == [0, 0, 1, 2, 3, 3]


def test_learning_rate_lag_delays_scale_but_not_weights():
    lagged = phases(phase_lr_lag=True)
    assert [lagged.lr_scale(step) for step in range(9, 15)] == [1, 1, 0.5, 0.5, 0.25, 1]
    for step in range(15):
        assert lagged.index(step) == phases().index(step)
    from_the_start = phases(phase_lr_lag=True, phases=[{"lr_scale": 0.5}])
    assert [from_the_start.lr_scale(step) for step in range(3)] == [1, 0.5, 0.5]


def test_learning_rate_scale_works_without_datasets():
    alone = phases(datasets=[], phases=[{"start_step": 2, "lr_scale": 0.1}])
    assert [alone.lr_scale(step) for step in range(4)] == [1, 1, 0.1, 0.1]
    assert alone.recorded([], 5, 20) == []
    assert alone.segments([], 0, 0, by_fours(0, 0)) == []


def test_run_without_phases_has_scale_one():
    assert phases(phases=[]).lr_scale(7) == 1
    assert phases(phases=[]).segments([], 0, 0, by_fours(0, 0)) == drawn((0, WEB))


def test_omitted_datasets_keep_their_weight():
    assert phases().mixtures == (WEB, EVEN, WEB, CODE)
    assert phases(mix_temperature=2.0).mixtures[0]["web"] == pytest.approx(3**0.5 / (1 + 3**0.5))


def test_new_run_has_segment_per_phase():
    expected = drawn((0, WEB), (40, EVEN), (48, WEB), (52, CODE))
    assert phases().segments([], 0, 0, by_fours(0, 0)) == expected


def test_segments_do_not_depend_on_resume_step():
    whole = phases().segments([], 0, 0, by_fours(0, 0))
    history = []
    for step in range(16):
        history = json.loads(json.dumps(phases().recorded(history, step, 4 * step)))
        assert phases().segments(history, step, 4 * step, by_fours(step, 4 * step)) == whole


def test_phase_with_same_weights_adds_no_segment():
    """A segment would start a new block at the start, but not at a resume."""
    same = phases(phases=[{"start_step": 2, "lr_scale": 0.5}, {"start_step": 3}])
    assert same.segments([], 0, 0, by_fours(0, 0)) == drawn((0, WEB))
    assert same.recorded([(0, WEB)], 5, 20) == drawn((0, WEB))


def test_several_phases_can_start_at_once():
    assert phases().recorded([(0, WEB)], 20, 80) == drawn((0, WEB), (80, CODE))


def test_growing_batches_move_later_phases():
    grown = phases().segments([(0, WEB)], 5, 20, lambda step: 20 + 100 * (step - 5))
    assert grown == drawn((0, WEB), (520, EVEN), (720, WEB), (820, CODE))


def test_rollback_adds_segment():
    """The run is back at step 8 with data position 60: the first mixture is current again."""
    history = phases().recorded([(0, WEB)], 11, 44)
    assert history == drawn((0, WEB), (44, EVEN))
    back = phases().segments(history, 8, 60, by_fours(8, 60))
    assert back == drawn((0, WEB), (44, EVEN), (60, WEB), (68, EVEN), (76, WEB), (80, CODE))


def test_mixture_without_draws_is_dropped():
    assert phases().recorded([(0, WEB), (40, CODE)], 10, 40) == drawn((0, WEB), (40, EVEN))
    assert phases().recorded([(0, WEB), (44, EVEN)], 9, 36) == drawn((0, WEB))  # no longer drawn


def test_changed_config_adds_segment():
    third = [*SOURCES, {"name": "math", "path": "m", "weight": 4}]
    now = phases(datasets=third, phases=[])
    assert now.recorded([(0, WEB)], 5, 20) == [
        Segment(0, WEB),
        Segment(20, {"web": 0.375, "code": 0.125, "math": 0.5}),
    ]
