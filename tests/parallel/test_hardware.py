"""Table of chips: usable memory, and lookup by JAX's device kind."""

import pytest

from jaxforge.parallel.hardware import CHIPS, known_memory


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("NVIDIA H100 80GB HBM3", 3 * 84_942_979_072 // 4),
        ("TPU v5 lite", 63 << 28),
        ("TPU v4", 123 << 28),
        ("NVIDIA H100 PCIe", None),
        ("cpu", None),
    ],
)
def test_known_memory_needs_exact_device_kind(kind, nbytes, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    assert known_memory(kind) == nbytes


def test_gpu_memory_fraction_follows_environment(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert CHIPS["h100"].memory == 84_942_979_072 // 2
    assert CHIPS["v5e"].memory == 63 << 28


def test_every_planned_chip_has_bandwidth_links_and_network():
    assert list(CHIPS) == ["v5e", "v5p", "v6e", "h100", "h200", "b200"]
    for chip in CHIPS.values():
        assert min(chip.bandwidth, chip.link, chip.network, chip.peak_flops) > 0
        assert (chip.flops_per_cycle > 0) == (chip.target is None)
