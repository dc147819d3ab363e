"""Small callbacks, and the config keys that enable them."""

import gc
import logging
import types

import jax
import pytest

from jaxforge.training.callbacks import host
from jaxforge.training.callbacks.callback import RunParts
from jaxforge.training.callbacks.host import (
    CollectGarbage,
    MemoryReport,
    Synchronize,
    collecting_garbage,
)
from jaxforge.training.callbacks.order import callbacks_of
from tests.conftest import tiny_config
from tests.training.callbacks.contexts import after


@pytest.fixture
def calls(monkeypatch):
    """Calls of a fake garbage collector."""
    events = []
    fake = types.SimpleNamespace(
        isenabled=lambda: True, freeze=lambda: events.append("freeze"),
        unfreeze=lambda: events.append("unfreeze"), enable=lambda: events.append("enable"),
        disable=lambda: events.append("disable"),
        collect=lambda generation=2: events.append(f"collect {generation}"),
    )  # fmt: skip
    monkeypatch.setattr(host, "gc", fake)
    return events


def test_health_callbacks_are_disabled_by_default(calls):
    mesh = jax.make_mesh((1,), ("dp",), devices=jax.devices()[:1])

    def names(**sections):
        program = types.SimpleNamespace(config=tiny_config(**sections), mesh=mesh, model=None)
        parts = RunParts(program, {}, None, None)
        return [type(callback).__name__ for callback in callbacks_of(parts)]

    assert names() == ["DirectoryLock", "MemoryReport"]
    assert calls == []
    every = {
        "manual_gc_interval": 5, "train_sync_interval": 6, "nccl_health_check_interval": 7,
        "check_weight_hash_across_dp_replicas_interval": 8,
    }  # fmt: skip
    assert names(train=every, metrics={"straggler_report_interval": 100})[2:] == [
        "CollectGarbage", "Synchronize", "CollectiveHealth", "WeightHashes", "Stragglers",
        "DeviceSpeed",
    ]  # fmt: skip


def test_garbage_is_collected_only_at_interval(calls):
    callback = CollectGarbage(50)
    assert not callback.waits  # the devices compute meanwhile
    callback.on_compiled(None)
    callback.on_interval(after(50))
    callback.on_interval(after(100))
    callback.close()
    assert calls == ["disable", "collect 2", "freeze", "collect 2", "unfreeze", "enable"]


def test_garbage_is_collected_around_evaluations_in_manual_mode(calls):
    with collecting_garbage(tiny_config()):
        calls.append("evaluate")
    with collecting_garbage(tiny_config(train={"manual_gc_interval": 9})):
        calls.append("evaluate")
    assert calls == ["evaluate", "collect 2", "evaluate", "collect 0"]


def test_garbage_collector_is_restored():
    callback = CollectGarbage(9)
    callback.on_compiled(None)
    assert not gc.isenabled()
    callback.close()
    assert gc.isenabled()


def test_synchronization_waits_for_state(monkeypatch):
    states = []
    monkeypatch.setattr(jax, "block_until_ready", states.append)
    assert Synchronize(4).on_interval(after(4, "state")) is None
    assert states == ["state"]


@pytest.fixture
def reports(messages):
    messages.set_level(logging.INFO, "jaxforge")
    return messages


def test_memory_is_reported_once(reports, monkeypatch):
    stats = {"bytes_in_use": 12_345_678_901, "peak_bytes_in_use": 5e10, "bytes_limit": 8e10}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    analysis = types.SimpleNamespace(
        argument_size_in_bytes=11e9, temp_size_in_bytes=2.5e10, generated_code_size_in_bytes=1e6
    )
    callback = MemoryReport()
    step = types.SimpleNamespace(memory_analysis=lambda: analysis)
    callback.on_compiled(types.SimpleNamespace(largest=step))
    callback.on_interval(after(7, ()))
    callback.on_interval(after(8, ()))
    assert reports.messages == [
        "[Rank 0] (after 7 iterations) memory (GB) | mem-allocated-gigabytes: 12.346 | "
        "mem-max-allocated-gigabytes: 50.0 | mem-limit-gigabytes: 80.0 | "
        "step-arguments-gigabytes: 11.0 | step-temporaries-gigabytes: 25.0 | "
        "step-code-gigabytes: 0.001"
    ]


def test_devices_without_statistics_have_no_memory_report(reports):
    MemoryReport().on_interval(after(1, ()))
    assert reports.messages == []
