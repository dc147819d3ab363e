"""Tests of the order in which devices share sequences."""

import numpy as np
import pytest

from jaxforge.kernels.context_parallel import part_order, to_device_order, to_sequence_order


def test_ring_devices_hold_early_and_late_parts():
    assert part_order("ring", 4).tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    assert part_order("ulysses", 4).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_sequence_order_is_restored(strategy):
    tokens = np.arange(48).reshape(2, 24)
    laid_out = to_device_order(tokens, strategy, 4)
    assert (laid_out[0].tolist() != tokens[0].tolist()) == (strategy == "ring")
    np.testing.assert_array_equal(to_sequence_order(laid_out, strategy, 4), tokens)


@pytest.mark.parametrize("devices", [2, 4, 8])
def test_ring_devices_score_equal_numbers_of_pairs(devices):
    length = 2048
    held = to_device_order(np.arange(length), "ring", devices).reshape(devices, -1)
    for turn in range(devices):
        arrived = np.roll(held, turn, axis=0)
        pairs = np.sum(arrived[:, None, :] <= held[:, :, None], axis=(1, 2))
        assert len(set(pairs.tolist())) == 1
