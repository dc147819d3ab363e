"""When actions run, and what the small ones do."""

import contextlib
import dataclasses
import gc
import logging
import types

import jax
import pytest

from jaxforge.exit_codes import Exit
from jaxforge.training.health import actions
from jaxforge.training.health.actions import (
    CollectGarbage,
    MemoryReport,
    PeriodicActions,
    Synchronize,
    collecting_garbage,
    open_actions,
)
from jaxforge.training.health.periodic_action import PeriodicAction
from tests.conftest import tiny_config


@dataclasses.dataclass
class Looking(PeriodicAction):
    name: str
    interval: int
    events: list
    reason: Exit | None = None
    waits: bool = True

    def run(self, step, state):
        self.events.append(f"{self.name} {step}")
        return self.reason


@pytest.fixture
def garbage(monkeypatch):
    """What is done to the collector, and nothing to that of the tests."""
    events = []
    fake = types.SimpleNamespace(
        isenabled=lambda: True, freeze=lambda: events.append("freeze"),
        unfreeze=lambda: events.append("unfreeze"), enable=lambda: events.append("enable"),
        disable=lambda: events.append("disable"),
        collect=lambda generation=2: events.append(f"collect {generation}"),
    )  # fmt: skip
    monkeypatch.setattr(actions, "gc", fake)
    return events


def test_each_looks_at_its_interval_in_order_and_waits_if_it_must():
    events = []

    @contextlib.contextmanager
    def between_steps():
        events.append("wait")
        yield
        events.append("go on")

    both = PeriodicActions([Looking("a", 2, events), Looking("b", 3, events, waits=False)])
    assert [both.run(step, None, between_steps) for step in range(1, 7)] == [None] * 6
    assert events == [
        "wait", "a 2", "go on", "b 3", "wait", "a 4", "go on", "wait", "a 6", "go on", "b 6",
    ]  # fmt: skip


def test_a_reason_to_end_ends_the_looking():
    events = []
    sick = Looking("a", 1, events, reason=Exit.UNHEALTHY)
    found = PeriodicActions([sick, Looking("b", 1, events)]).run(7, None, contextlib.nullcontext)
    assert found is Exit.UNHEALTHY
    assert events == ["a 7"]


def test_actions_are_off_until_asked_for(garbage):
    mesh = jax.make_mesh((1,), ("dp",), devices=jax.devices()[:1])

    def opened(**sections):
        actions = open_actions(tiny_config(**sections), mesh, None)
        return [type(action).__name__ for action in actions._actions]

    assert opened() == ["MemoryReport"]
    assert garbage == []
    every = {
        "manual_gc_interval": 5, "train_sync_interval": 6, "nccl_health_check_interval": 7,
        "check_weight_hash_across_dp_replicas_interval": 8,
    }  # fmt: skip
    assert opened(train=every, metrics={"log_straggler": True})[1:] == [
        "CollectGarbage", "Synchronize", "CollectiveHealth", "WeightHashes", "Stragglers",
    ]  # fmt: skip


def test_garbage_is_collected_when_told_and_never_else(garbage):
    action = CollectGarbage(50)
    assert not action.waits  # the devices go on meanwhile
    action.run(50, None)
    action.run(100, None)
    action.close()
    assert garbage == ["disable", "collect 2", "freeze", "collect 2", "unfreeze", "enable"]


def test_garbage_is_collected_around_evaluations_where_that_is_done_by_hand(garbage):
    with collecting_garbage(tiny_config()):
        garbage.append("evaluate")
    with collecting_garbage(tiny_config(train={"manual_gc_interval": 9})):
        garbage.append("evaluate")
    assert garbage == ["evaluate", "collect 2", "evaluate", "collect 0"]


def test_the_collector_is_left_as_it_was():
    CollectGarbage(9).close()
    assert gc.isenabled()


def test_synchronizing_waits_for_the_state(monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    assert Synchronize(4).run(4, "state") is None
    assert waited == ["state"]


@pytest.fixture
def told(caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    caplog.set_level(logging.INFO, "jaxforge")
    return caplog


def test_memory_is_reported_once(told, monkeypatch):
    stats = {"bytes_in_use": 12_345_678_901, "peak_bytes_in_use": 5e10, "bytes_limit": 8e10}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    analysis = types.SimpleNamespace(
        argument_size_in_bytes=11e9, temp_size_in_bytes=2.5e10, generated_code_size_in_bytes=1e6
    )
    action = MemoryReport(types.SimpleNamespace(memory_analysis=lambda: analysis))
    action.run(7, ())
    action.run(8, ())
    assert told.messages == [
        "[Rank 0] (after 7 iterations) memory (GB) | mem-allocated-gigabytes: 12.346 | "
        "mem-max-allocated-gigabytes: 50.0 | mem-limit-gigabytes: 80.0 | "
        "step-arguments-gigabytes: 11.0 | step-temporaries-gigabytes: 25.0 | "
        "step-code-gigabytes: 0.001"
    ]


def test_devices_that_do_not_tell_have_no_memory_report(told):
    action = MemoryReport(None)
    action.run(1, ())
    assert told.messages == []
