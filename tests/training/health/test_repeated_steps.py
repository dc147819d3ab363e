"""Comparison of two executions of a step, and the devices that are named if they differ."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxforge.training.health import attribution
from jaxforge.training.health.attribution import find_fault


def metrics_of(*copies, norm=1.0):
    """Return metrics whose loss has one copy on each of the first devices."""
    devices = jax.devices()[: len(copies)]
    everywhere = NamedSharding(Mesh(np.array(devices), ("all",)), PartitionSpec())
    arrays = [
        jax.device_put(np.float32(x), device) for x, device in zip(copies, devices, strict=True)
    ]
    loss = jax.make_array_from_single_device_arrays((), everywhere, arrays)
    return {"loss": loss, "grad_norm": jax.device_put(np.float32(norm), everywhere)}


def test_equal_results_are_no_fault():
    assert find_fault(metrics_of(2, 2, 2), metrics_of(2, 2, 2)) is None
    assert find_fault(metrics_of(np.nan, np.nan), metrics_of(np.nan, np.nan)) is None


def test_device_with_changed_copy_is_named():
    third = jax.devices()[2]
    next_value = np.nextafter(np.float32(2), np.float32(3))
    fault = find_fault(metrics_of(2, 2, 2, 2), metrics_of(2, 2, next_value, 2))
    assert fault == f"The result changed on {third} of process 0"


@pytest.mark.parametrize("outlier", [None, 1])
def test_common_change_is_attributed_by_test_computation(monkeypatch, outlier):
    real = attribution.device_checksum
    monkeypatch.setattr(
        attribution, "device_checksum", lambda device: real(device) + (device.id == outlier)
    )
    fault = find_fault(metrics_of(2, 2, norm=1), metrics_of(2, 2, norm=1.5))
    expected = "No device fails the test computation, so the fault is intermittent"
    if outlier is not None:
        expected = (
            f"These devices compute another result than the others: {jax.devices()[1]} of process 0"
        )
    assert fault == expected
