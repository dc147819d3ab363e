"""Health check of collectives: wrong, late and failing answers end the run."""

import threading

import jax
import numpy as np
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks import speed
from jaxforge.training.callbacks.speed import CollectiveHealth
from tests.training.callbacks.contexts import after


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def compiled(mesh):
    check = CollectiveHealth(5, mesh)
    check.on_train_begin(None)
    return check


@pytest.fixture
def check(compiled, monkeypatch):
    """Return the check; tests may replace its program."""
    monkeypatch.setattr(compiled, "_sum", compiled._sum)
    return compiled


def test_healthy_devices_pass_repeatedly(check, messages):
    assert check.every == 5
    assert [check.on_interval(after(step)) for step in (5, 10)] == [None, None]
    assert not messages.messages


def test_device_with_wrong_contribution_is_named(check, mesh, messages):
    def deaf_to_the_sixth(counts):
        answer = np.ones(counts.shape, np.int32)
        answer[3, 5] = 0  # only the fourth device gets a wrong sum
        return jax.device_put(answer, counts.sharding)

    check._sum = deaf_to_the_sixth
    assert check.on_interval(after(15)) is Exit.UNHEALTHY
    assert messages.messages == [
        "collective health check of process 0 failed at step 15: wrong contribution from "
        f"{mesh.devices.flat[5]} (process 0)"
    ]


def test_missing_answer_fails_after_timeout(check, monkeypatch, messages):
    released = threading.Event()
    monkeypatch.setattr(check, "_sum", lambda counts: released.wait())
    monkeypatch.setattr(speed, "_ANSWER_SEC", 0.01)
    try:
        assert check.on_interval(after(20)) is Exit.UNHEALTHY
    finally:
        released.set()
    [message] = messages.messages
    assert "no answer within 0.01 s; still waiting: " in message
    assert all(str(device) in message for device in jax.local_devices())


def test_failing_collective_is_a_failure(check, monkeypatch, messages):
    def fail(counts):
        raise jax.errors.JaxRuntimeError("connection reset by peer")

    monkeypatch.setattr(check, "_sum", fail)
    assert check.on_interval(after(25)) is Exit.UNHEALTHY
    assert "connection reset by peer" in messages.messages[0]
