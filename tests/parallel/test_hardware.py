"""Table of chips: usable memory, and lookup by JAX's device kind."""

from pathlib import Path

import pytest

from jaxforge.parallel.hardware import CHIPS, known_memory


@pytest.mark.parametrize(
    ("kind", "nbytes"),
    [
        ("NVIDIA H100 80GB HBM3", 3 * 84_942_979_072 // 4),
        ("TPU v5 lite", 63 << 28),
        ("TPU v4", 123 << 28),
        ("TPU7x", 379 << 28),
        ("NVIDIA GB200", 3 * 197_897_748_480 // 4),
        ("NVIDIA GB300", 3 * 297_021_079_552 // 4),
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
    assert list(CHIPS) == ["v5e", "v5p", "v6e", "tpu7x", "h100", "h200", "b200", "gb200", "gb300"]
    for chip in CHIPS.values():
        assert min(chip.bandwidth, chip.link, chip.network, chip.peak_flops) > 0
        assert (chip.flops_per_cycle > 0) == (chip.target is None)
        assert (chip.chip_link > 0) == (chip.per_chip > 1)


def test_docs_show_figures_of_every_chip():
    page = Path(__file__).parents[2] / "docs" / "plan.md"
    table = page.read_text().partition("## Figures of the hardware")[2].partition("\n- ")[0]
    shown = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert shown == [
        f"| {name} | {chip.peak_flops / 1e12:,.0f} | "
        f"{f'{chip.fp8_flops / 1e12:,.0f}' if chip.fp8_flops else '-'} | {chip.capacity / 1e9:.1f} "
        f"| {chip.bandwidth / 1e9:,.0f} | {chip.link / 1e9:.0f} | {chip.network / 1e9:.1f} |"
        for name, chip in CHIPS.items()
    ]


def test_devices_of_tpu7x_add_up_to_a_chip():
    """cloud.google.com/tpu/docs/tpu7x, except for the clock, which follows from the MXUs."""
    device = CHIPS["tpu7x"]
    assert device.per_chip * device.peak_flops == 2307e12
    assert device.per_chip * device.fp8_flops == 4614e12
    assert device.per_chip * device.bandwidth == 7380e9
    assert device.per_chip * device.link * 2 * 6 == 1200e9, "both directions of six links"
    assert device.cycles_per_second == pytest.approx(2.2e9, rel=1e-4)


@pytest.mark.parametrize(("name", "memory"), [("gb200", 13.4e12), ("gb300", 20.1e12)])
def test_nvl72_racks_add_up_to_data_sheet(name, memory):
    """Data sheets of GB200 NVL72 and GB300 NVL72, whose FLOP/s are with sparsity: twice as many.

    They state memory in units of 2^30 bytes per GPU. The driver reports 99% of it.
    """
    gpu = CHIPS[name]
    assert gpu.per_domain * gpu.peak_flops * 2 == 360e15
    assert gpu.per_domain * gpu.fp8_flops * 2 == 720e15
    assert gpu.per_domain * gpu.bandwidth == pytest.approx(576e12, rel=0.01)
    assert gpu.per_domain * gpu.link * 2 == pytest.approx(130e12, rel=0.01)
    assert gpu.per_domain * gpu.capacity / 1.024**3 == pytest.approx(memory, rel=0.02)
