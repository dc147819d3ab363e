"""Exit reasons of a run: order, messages, and agreement of processes."""

import _thread
import concurrent.futures
import logging
import os
import signal
import sys
import threading
import time
import types

import jax
import numpy as np
import psutil
import pytest

from jaxforge.cli import process
from jaxforge.config.train import TrainConfig
from jaxforge.training import launch, preemption
from jaxforge.training.preemption import Exit, Exits, Signals
from tests.conftest import tiny_config
from tests.helpers import devices_here
from tests.machine import PATIENCE, wait_until


class Received:
    """Fake signals of a process."""

    name = "SIGTERM"

    def __init__(self, stop=None):
        self.stop, self.sent = stop, 0

    def requested(self):
        return self.stop

    def time_is_up(self):
        self.sent += 1


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test advances; the time of day is fixed."""
    now = types.SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(preemption, "time", types.SimpleNamespace(
        monotonic=lambda: now.seconds, strftime=lambda form: f"noon by {form}",
    ))  # fmt: skip
    return now


@pytest.fixture
def logged(messages):
    messages.set_level(logging.INFO, "jaxforge")
    return messages


DUE = TrainConfig(exit_interval=4, exit_duration_in_mins=2)


def test_signal_precedes_duration_and_interval(clock):
    exits, signals = Exits(DUE, received := Received(Exit.SIGNAL)), received
    clock.seconds = 121.0
    assert exits.requested(8) is Exit.SIGNAL
    signals.stop = None
    assert exits.requested(8) is Exit.DURATION
    clock.seconds = 119.0
    assert exits.requested(8) is Exit.INTERVAL
    assert exits.requested(9) is None
    assert Exits(TrainConfig(), Received()).requested(8) is None


def test_duration_counts_from_start_of_command(clock):
    clock.seconds = 1000.0
    began_before = Exits(DUE, Received(), since=1000.0 - 121.0)
    assert began_before.requested(5) is Exit.DURATION
    assert Exits(DUE, Received()).requested(5) is None


@pytest.mark.parametrize(("processes", "reason", "sent"), [(1, Exit.DURATION, 0), (2, None, 1)])
def test_duration_stops_evaluation(clock, monkeypatch, processes, reason, sent):
    """Several processes stop at the step that the preemption service determines."""
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    exits = Exits(DUE, signals := Received())
    assert exits.requested_in_evaluation() is None
    clock.seconds = 121.0
    assert exits.requested_in_evaluation() is reason
    assert signals.sent == sent
    signals.stop = Exit.SIGNAL
    assert exits.requested_in_evaluation() is Exit.SIGNAL


def test_command_starts_with_its_process(monkeypatch):
    monkeypatch.delenv("JAXFORGE_BEGAN", raising=False)
    assert process.began() == pytest.approx(time.monotonic(), abs=PATIENCE)
    began = float(process.began_env()["JAXFORGE_BEGAN"])
    age = time.time() - psutil.Process().create_time()
    assert time.monotonic() - began == pytest.approx(age, abs=2.0)
    monkeypatch.setenv("JAXFORGE_BEGAN", "12.5")  # set by the supervisor
    assert (process.began(), process.began_env()["JAXFORGE_BEGAN"]) == (12.5, "12.5")


def test_exit_messages_match_megatron(clock, logged):
    exits = Exits(DUE, Received(Exit.SIGNAL))
    exits.requested(4)
    assert not logged.messages  # the message follows the save
    clock.seconds = 150.0
    for reason in (Exit.SIGNAL, Exit.INTERVAL, Exit.DURATION, Exit.COMPLETED, Exit.NON_FINITE):
        exits.log_reason(reason, 4)
    exits.log_total_time()
    when = "datetime: noon by %Y-%m-%d %H:%M:%S "
    assert logged.messages == [
        f"[exiting program after receiving SIGTERM.] {when}",
        f"[exiting program at iteration 4] {when}",
        f"[exiting program after 2.5 minutes] {when}",
        "total time: 150.00 s",
    ]


@pytest.mark.parametrize(("process", "sent"), [(0, 1), (1, 0)])
def test_clock_of_process_zero_decides_for_all(clock, monkeypatch, process, sent):
    """All processes stop at the step that the preemption service determines."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    exits = Exits(TrainConfig(exit_duration_in_mins=2), signals := Received())
    clock.seconds = 1000.0
    assert exits.requested(7) is None
    assert signals.sent == sent


@pytest.mark.parametrize(
    ("received", "time_is_up", "reason", "name"),
    [
        (
            [0, 0],
            [0, 0],
            Exit.SIGNAL,
            "SIGTERM",
        ),  # JAX handles SIGTERM, so no process has received it
        ([0, 0], [1, 0], Exit.DURATION, None),
        ([0, signal.SIGUSR1], [1, 0], Exit.SIGNAL, "SIGUSR1"),
        ([signal.SIGUSR1, signal.SIGINT], [0, 0], Exit.INTERRUPT, "SIGINT"),
    ],
)
@pytest.mark.parametrize("process", [0, 1])
def test_processes_agree_on_exit_reason(
    clock, logged, monkeypatch, process, received, time_is_up, reason, name
):
    """Repeated requests give the same reason, although the service reports the point only once."""
    service = types.SimpleNamespace(
        reached_preemption_sync_point=lambda exits: exits == 3,
        process_allgather=lambda mine: np.stack(
            [mine, others]
        ),  # order of processes does not matter
    )
    others = np.array([received[1 - process], time_is_up[1 - process], 0])
    monkeypatch.setattr(preemption, "multihost_utils", service)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(preemption.os, "kill", lambda *_: None)
    with Signals(timeout_seconds=60) as signals:
        exits = Exits(TrainConfig(exit_duration_in_mins=2), signals)
        assert exits.requested(1) is None
        if received[process]:
            signals._receive(received[process], None)
        clock.seconds = 150.0 if any(time_is_up) else 0.0
        assert exits.requested(2) is None
        assert signals.requested() is reason  # between two batches of an evaluation
        assert exits.requested(2) is reason
        exits.log_reason(reason, 2)
    assert (f"receiving {name}." if name else "after 2.5 minutes") in logged.messages[-1]


@pytest.mark.parametrize("process", [0, 1])
def test_failed_save_precedes_other_exit_reasons(monkeypatch, process):
    """SIGTERM is sent once to JAX's service, which stops every process at the same step."""
    sent = []
    mine, others = [np.array([signal.SIGINT, 0, i == 1]) for i in (process, 1 - process)]
    service = types.SimpleNamespace(
        reached_preemption_sync_point=lambda exits: bool(sent),
        process_allgather=lambda status: np.stack([status, others]),
    )
    monkeypatch.setattr(preemption, "multihost_utils", service)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(preemption.os, "kill", lambda *arguments: sent.append(arguments))
    signals = Signals(timeout_seconds=60)
    assert signals.requested() is None
    if mine[2]:
        assert signals.stop_for_failed_save()
        assert signals.stop_for_failed_save()
    else:
        signals.stop_everywhere()
    assert sent == [(os.getpid(), signal.SIGTERM)]
    assert signals.requested() is Exit.STORAGE
    assert Exits(TrainConfig(), signals).requested(3) is Exit.STORAGE


def test_failed_save_raises_in_single_process():
    assert not Signals(timeout_seconds=60).stop_for_failed_save()


@pytest.mark.parametrize(
    ("sig", "reason"),
    [
        (signal.SIGTERM, Exit.SIGNAL),
        (signal.SIGUSR1, Exit.SIGNAL),
        (signal.SIGHUP, Exit.SIGNAL),
        (signal.SIGINT, Exit.INTERRUPT),
    ],
)
def test_received_signal_is_the_exit_reason(logged, sig, reason):
    with Signals(timeout_seconds=60) as signals:
        assert signals.requested() is None
        signal.raise_signal(sig)
        assert (signals.requested(), signals.name) == (reason, sig.name)
    assert logged.messages[0].startswith(f"{sig.name}: saving a checkpoint, then exiting")
    names_cost = "A second Ctrl-C ends the run at once, without" in logged.messages[0]
    assert names_cost == (sig is signal.SIGINT)


def test_hangup_is_ignored_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Signals(timeout_seconds=60) as signals:
            signal.raise_signal(signal.SIGHUP)
            assert signals.requested() is None
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.fixture
def blocked_log(logged, monkeypatch):
    """Hold the lock of the log in another thread for the whole test; return its release."""
    monkeypatch.setattr(preemption, "_MESSAGE_SEC", 0.05)
    holds, is_over = threading.Event(), threading.Event()

    def hold():
        with logged.handler.lock:
            holds.set()
            is_over.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    holds.wait()
    yield is_over.set
    is_over.set()
    thread.join()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_signal_handler_does_not_wait_for_log(blocked_log, logged, sig):
    """The thread that holds the lock may wait for the main thread, which the handler interrupts."""
    with Signals(timeout_seconds=60) as signals:
        signal.raise_signal(sig)
        assert signals.requested() is (Exit.INTERRUPT if sig is signal.SIGINT else Exit.SIGNAL)
        assert not logged.messages
        blocked_log()
        wait_until(lambda: logged.messages)


@pytest.mark.usefixtures("blocked_log")
def test_slow_checkpoint_ends_process_with_blocked_log(monkeypatch):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(_thread, "interrupt_main", lambda: None)
    with Signals(timeout_seconds=0):
        signal.raise_signal(signal.SIGTERM)
        wait_until(lambda: codes)
    assert codes == [1]


def test_wait_returns_result_without_signal():
    with Signals(timeout_seconds=60) as signals:
        assert signals.wait_for(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            signals.wait_for(lambda: 1 // 0)
        assert not signals.has_background_thread


@pytest.mark.parametrize("end", [Exit.SIGNAL, Exit.INTERVAL, Exit.NON_FINITE, ZeroDivisionError])
def test_every_exit_closes_run_with_reason(monkeypatch, end):
    """`Trainer.close` notifies the hooks. Megatron-Bridge exits without notification."""
    closed = []

    def run_loop(signals, since):
        if isinstance(end, Exit):
            return end
        raise end

    def close(reason):
        closed.append(reason)
        return reason

    trainer = types.SimpleNamespace(train=run_loop, close=close)
    monkeypatch.setattr(launch, "build_trainer", lambda *arguments: trainer)
    config = tiny_config(distributed={"dp_shard": -1})
    if isinstance(end, Exit):
        assert launch.fit(config) is end
        assert closed == [end]
    else:
        with pytest.raises(end):
            launch.fit(config)
        assert closed == [None]


@pytest.mark.parametrize("interactive", [False, True])
def test_slow_checkpoint_ends_process_or_interrupts_notebook(monkeypatch, interactive):
    events = []
    monkeypatch.setattr(os, "_exit", events.append)
    monkeypatch.setattr(_thread, "interrupt_main", lambda: events.append("interrupted"))
    if interactive:
        monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with Signals(timeout_seconds=0):
        signal.raise_signal(signal.SIGUSR1)
        wait_until(lambda: events)
    assert events[0] == ("interrupted" if interactive else 1)


def test_second_ctrl_c_raises_in_notebook(monkeypatch):
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    with Signals(timeout_seconds=60) as signals:
        signal.raise_signal(signal.SIGINT)
        assert signals.requested() is Exit.INTERRUPT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_run_in_thread_works_without_signals(tmp_path):
    section = {"max_steps": 2, "batch_size": 1}
    config = tiny_config(train=section, checkpoint={"dir": str(tmp_path)})
    with devices_here(1), concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert pool.submit(launch.fit, config).result() is Exit.COMPLETED
    assert (tmp_path / "checkpoints" / "step_2").is_dir()
