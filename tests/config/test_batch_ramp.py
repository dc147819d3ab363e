"""Batch ramp against a count of samples per update."""

import itertools

import pytest

from jaxforge.config import TrainConfig
from jaxforge.config.batch_ramp import BatchRamp, RampSpan, Stage
from jaxforge.config.reading.load import make_config

RAMP = BatchRamp((Stage(0, 2), Stage(3, 4), Stage(10, 6)), rows=5)
SIZES = [2] * 3 + [4] * 7 + [6] * 20
DRAWN = [0, *itertools.accumulate(5 * size for size in SIZES)]


def test_ramp_gives_microbatches_per_update():
    assert [RAMP.accum(step) for step in range(30)] == SIZES


def test_ramp_counts_samples_before_each_update():
    assert [RAMP.samples(step) for step in range(31)] == DRAWN


@pytest.mark.parametrize("since", [0, 2, 3, 7, 10, 15])
def test_updates_are_rounded_up_to_draw_samples(since):
    for samples in range(200):
        n = RAMP.updates(samples, since)
        assert RAMP.samples(since + n) - RAMP.samples(since) >= samples
        assert n == 0 or RAMP.samples(since + n - 1) - RAMP.samples(since) < samples


def test_samples_count_from_known_point_in_both_directions():
    location = (5, 1000)
    assert RAMP.samples_at(5, location) == 1000
    assert RAMP.samples_at(12, location) == 1000 + 5 * (5 * 4 + 2 * 6)
    assert RAMP.samples_at(2, location) == 1000 - 5 * (1 * 2 + 2 * 4)
    assert RAMP.samples_at(2, (12, RAMP.samples_at(12, (2, 7)))) == 7


@pytest.mark.parametrize(
    ("step", "n", "spans"),
    [
        (0, 12, [(0, 3, 2), (3, 7, 4), (10, 2, 6)]),
        (2, 1, [(2, 1, 2)]),
        (3, 7, [(3, 7, 4)]),
        (9, 2, [(9, 1, 4), (10, 1, 6)]),
        (20, 5, [(20, 5, 6)]),
        (4, 0, []),
    ],
)
def test_spans_have_one_batch_size(step, n, spans):
    assert list(RAMP.spans(step, n)) == [RampSpan(*span) for span in spans]


def megatron_sizes(start, increment, samples, full, n_updates):
    """Sizes of the first updates, as Megatron-LM computes each from the samples consumed."""
    per_increment = samples / ((full - start) // increment)
    sizes, consumed = [], 0
    for _ in range(n_updates):
        size = full
        if consumed <= samples:
            size = start + int(consumed / per_increment) * increment
        sizes.append(size)
        consumed += size
    return sizes


@pytest.mark.parametrize(
    ("ramp", "full"),
    [
        ((16, 16, 20_000), 1024),
        ((32, 8, 1000), 64),
        ((8, 8, 1), 64),  # full at the second update
        ((8, 8, 100), 64),  # an update passes several increments
        ((4, 20, 4096), 64),
        ((1, 1, 777), 7),
    ],
)
def test_sample_ramp_follows_megatron(ramp, full):
    keys = {"global_batch_size": full, "grad_accum_steps": full, "max_steps": 1000}
    train = make_config({"train": {**keys, "rampup_batch_size": list(ramp)}}).train
    expected = megatron_sizes(*ramp, full, 1000)
    assert expected[0] < full == expected[-1]
    assert [train.ramp(1).accum(step) for step in range(1000)] == expected
    assert train.ramp(1).rows == 1
    assert len({stage.start for stage in train.stages()}) == len(set(expected))


def test_batch_without_ramp_is_constant():
    train = TrainConfig(batch_size=3, grad_accum_steps=2)
    assert train.ramp(dp=4) == BatchRamp((Stage(0, 2),), rows=12)


def test_stages_count_microbatches():
    stages = [{"grad_accum_steps": 2}, {"start": 9, "grad_accum_steps": 8}]
    train = TrainConfig(grad_accum_steps=8, batch_ramp=stages)
    assert train.stages() == (Stage(0, 2), Stage(9, 8))


def test_stages_in_sequences_keep_the_microbatch():
    stages = [{"global_batch_size": 16}, {"start": 9, "global_batch_size": 64}]
    train = TrainConfig(grad_accum_steps=8, global_batch_size=64, batch_ramp=stages)
    assert train.ramp(dp=2) == BatchRamp((Stage(0, 2), Stage(9, 8)), rows=8)
