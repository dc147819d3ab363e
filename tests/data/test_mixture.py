"""Samples of a mixture by position: exact shares, none twice, always the same."""

import json
import pickle
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from jaxforge.data.mixture import GrainMixture, TorchMixture, epoch_targets, proportions
from jaxforge.data.segments import Segment, block_counts
from jaxforge.errors import UserError

SAMPLERS = json.loads((Path(__file__).parent / "golden_small.json").read_text())["samplers"]
SIZES = {"a": 11, "b": 29, "c": 7}
FIRST, SECOND = {"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 0.1, "b": 0.0, "c": 0.9}


def owner(index, sizes=SIZES):
    """Name and own index of an index of the concatenation."""
    for name, n in sizes.items():
        if index < n:
            return name, index
        index -= n
    raise AssertionError


def names(order, start, stop):
    return Counter(owner(order[i])[0] for i in range(start, stop))


def grain(*segments, sizes=SIZES, block=20, seed=3, shuffle=True):
    return GrainMixture(sizes, [Segment(*segment) for segment in segments], seed, shuffle, block)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_proportions_and_targets_match_kempnerforge(temperature):
    case = SAMPLERS[f"mix sizes=11,29,7 w=.7,.2,.1 R=2 seed=5 epoch=1 T={temperature} rank=0"]
    shares = proportions({"a": 0.7, "b": 0.2, "c": 0.1}, temperature, as_torch=True)
    np.testing.assert_allclose(list(shares.values()), case["probs"], rtol=1e-15)
    assert epoch_targets(list(shares.values()), 22) == case["target"]


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_two_rank_epoch_matches_kempnerforge(temperature):
    shares = proportions({"a": 0.7, "b": 0.2, "c": 0.1}, temperature, as_torch=True)
    order = TorchMixture(SIZES, [Segment(0, shares)], seed=5, rows=4, ranks=2)
    for rank in range(2):
        case = f"mix sizes=11,29,7 w=.7,.2,.1 R=2 seed=5 epoch=1 T={temperature} rank={rank}"
        of_rank = [order[order.epoch_length + 2 * k + rank] for k in range(22)]
        assert of_rank == SAMPLERS[case]["idx"]


def test_weight_change_within_epoch_matches_kempnerforge():
    case = SAMPLERS["mix after update_weights(0,1,1) skip 6 R=1 seed=5 epoch0"]
    new = proportions({"a": 0, "b": 1, "c": 1}, 1.0, as_torch=True)
    assert epoch_targets(list(new.values()), 47) == case["target"]
    order = TorchMixture(SIZES, [Segment(0, FIRST), Segment(6, new)], seed=5, rows=1, ranks=1)
    assert [order[i] for i in range(6, 47)] == case["idx"]
    before = TorchMixture(SIZES, [Segment(0, FIRST)], seed=5, rows=1, ranks=1)
    assert [order[i] for i in range(6)] == [before[i] for i in range(6)]


def test_torch_mixture_drops_partial_batch():
    order = TorchMixture(SIZES, [Segment(0, FIRST)], seed=0, rows=10, ranks=2)
    assert order.epoch_length == 40  # 22 samples of each rank, in batches of 5
    second = TorchMixture(SIZES, [Segment(0, FIRST)], seed=1, rows=10, ranks=2)
    assert [order[40 + i] for i in range(40)] == [second[i] for i in range(40)]


@pytest.mark.parametrize(("rows", "ranks", "message"), [
    (48, 1, r"hold 47 samples, less than the 48"),
    (8, 8, r"c holds 7 samples, less than one for each of 8"),
])  # fmt: skip
def test_torch_mixture_needs_enough_samples(rows, ranks, message):
    with pytest.raises(UserError, match=message):
        TorchMixture(SIZES, [Segment(0, FIRST)], seed=0, rows=rows, ranks=ranks)


def test_temperature_draws_zero_weights_only_for_kempnerforge():
    weights = {"a": 8.0, "b": 2.0, "c": 0.0}
    assert proportions(weights, 1.0, as_torch=False) == {"a": 0.8, "b": 0.2, "c": 0.0}
    warm = proportions(weights, 2.0, as_torch=False)
    assert warm == pytest.approx({"a": 2 / 3, "b": 1 / 3, "c": 0.0})
    assert proportions(weights, 10.0, as_torch=True)["c"] > 0.02
    huge = proportions({"a": 1e300, "b": 1e-300}, 0.1, as_torch=False)
    assert huge == {"a": 1.0, "b": 0.0}
    assert proportions({}, 2.0, as_torch=False) == {}


@pytest.mark.parametrize(
    ("shares", "counts"),
    [
        ([0.5, 0.3, 0.2], [10, 6, 4]),
        ([1 / 3, 1 / 3, 1 / 3], [7, 7, 6]),
        ([0.62, 0.32, 0.06], [13, 6, 1]),  # 12.4, 6.4, 1.2
        ([0.999, 0.001, 0.0], [19, 1, 0]),
        ([0.48, 0.48, 0.02, 0.02], [9, 9, 1, 1]),
        ([1.0], [20]),
    ],
)
def test_block_counts_sum_to_block(shares, counts):
    got = block_counts(shares, 20)
    assert sum(got) == 20
    assert got == counts


def test_each_block_has_exact_proportions():
    order = grain((0, FIRST), (90, SECOND))
    for start in (0, 20, 40, 60):
        assert names(order, start, start + 20) == {"a": 10, "b": 6, "c": 4}
    for start in (90, 110, 110 + 20 * 50):  # blocks are counted from the segment's start
        assert names(order, start, start + 20) == {"a": 2, "c": 18}
    blocks = [[owner(order[i])[0] for i in range(b, b + 20)] for b in range(0, 80, 20)]
    assert len({tuple(block) for block in blocks}) == 4


@pytest.mark.parametrize("cuts", [(), (33,), (1, 2, 33, 60, 61), (20, 40)])
def test_samples_repeat_only_after_dataset_epoch(cuts):
    shares = [FIRST, {"a": 0.2, "b": 0.6, "c": 0.2}]
    order = grain(*((at, shares[i % 2]) for i, at in enumerate((0, *cuts))))
    seen = {name: [] for name in SIZES}
    for i in range(200):
        name, index = owner(order[i])
        seen[name].append(index)
    for name, n in SIZES.items():
        for epoch in range(len(seen[name]) // n):
            assert sorted(seen[name][epoch * n : (epoch + 1) * n]) == list(range(n))


def test_dataset_has_its_order_whatever_stands_beside_it():
    def of_b(order, sizes):
        drawn = [owner(order[i], sizes) for i in range(200)]
        return [index for name, index in drawn if name == "b"]

    more = {"z": 5, "b": 29}
    alone, beside = grain((0, FIRST)), grain((0, {"z": 0.5, "b": 0.5}), sizes=more)
    drawn_alone, drawn_together = of_b(alone, SIZES), of_b(beside, more)
    n = min(len(drawn_alone), len(drawn_together))
    assert n > 50
    assert drawn_alone[:n] == drawn_together[:n]


def test_datasets_may_be_added_and_removed():
    """Draws of a removed dataset do not count; a new dataset begins at its start."""
    past, now = Segment(0, {"gone": 0.5, "b": 0.5}), Segment(30, {"b": 0.5, "new": 0.5})
    sizes = {"new": 40, "b": 29}
    order = GrainMixture(sizes, [past, now], 3, False, 20)
    drawn = [owner(order[i], sizes) for i in range(30, 70)]
    b_before = GrainMixture({"gone": 9, "b": 29}, [past], 3, False, 20)
    n = sum(b_before[i] >= 9 for i in range(30))
    assert [i for name, i in drawn if name == "new"] == list(range(20))
    assert [i for name, i in drawn if name == "b"] == [(n + i) % 29 for i in range(20)]


def test_unshuffled_datasets_are_read_in_order():
    order = grain((0, FIRST), shuffle=False)
    drawn = [owner(order[i]) for i in range(60)]
    assert [i for name, i in drawn if name == "a"] == [i % 11 for i in range(30)]


def test_order_depends_on_seed():
    def order_of(seed):
        order = grain((0, FIRST), seed=seed)
        return [order[i] for i in range(50)]

    assert order_of(3) == order_of(3) != order_of(4)
    assert order_of(-1) == order_of(2**32 - 1)


@pytest.mark.parametrize(
    "order",
    [
        grain((0, FIRST), (50, SECOND)),
        TorchMixture(SIZES, [Segment(0, FIRST), Segment(50, SECOND)], 3, 4, 2),
    ],
)
def test_mixtures_are_pure_across_threads_and_pickles(order):
    positions = np.random.default_rng(0).integers(0, 300, 100).tolist()
    expected = [order[position] for position in positions]
    copy = pickle.loads(pickle.dumps(order))
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(copy.__getitem__, positions)) == expected


def test_empty_dataset_is_refused():
    with pytest.raises(UserError, match="no sample"):
        grain((0, FIRST), sizes={**SIZES, "c": 0})
