"""Timed matrix products on each device: throttled devices are named."""

import logging

import jax
import pytest

from jaxforge.config.metrics import MetricsConfig
from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks import speed
from jaxforge.training.callbacks.speed import DeviceSpeed, seconds_of, slow_devices
from tests.training.callbacks.contexts import after


def test_products_run_on_the_device_that_is_timed(monkeypatch):
    device, computed = jax.devices()[5], []
    multiply = speed._multiply

    def recording(x):
        computed.append(multiply(x))
        return computed[-1]

    monkeypatch.setattr(speed, "_multiply", recording)
    assert seconds_of(device) > 0
    assert len(computed) == 1 + 3
    assert {*computed[0].devices()} == {device}


def test_slow_devices_follow_threshold():
    assert slow_devices({0: 1.0, 1: 1.42, 2: 1.43, 7: 2.0}) == [2, 7]
    assert slow_devices({0: 1.0}) == []


@pytest.mark.parametrize("stop", [True, False])
def test_throttled_device_is_named(monkeypatch, messages, stop):
    messages.set_level(logging.INFO, "jaxforge")
    throttled = jax.devices()[3]
    monkeypatch.setattr(speed, "seconds_of", lambda d: 0.005 if d is throttled else 0.002)
    config = MetricsConfig(straggler_report_interval=50, stop_if_detected_straggler=stop)
    check = DeviceSpeed(config)
    check.on_train_begin(None)
    assert check.every == 50
    assert check.on_interval(after(50)) is (Exit.STRAGGLER if stop else None)
    spread, slow, *_ = messages.messages
    assert spread == (
        "step 50: milliseconds for matrix products, min/median/max of 8 devices: 2.000/2.000/5.000"
    )
    assert slow == (
        f"step 50: {throttled} of process 0 is slow: 5.000 ms for matrix products, the fastest "
        "device 2.000 ms. It may be throttled"
    )
