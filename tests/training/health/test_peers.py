"""Suspicion of a hang, by heartbeats through a real coordination service.

Tests count the seconds of the watch, so they need not wait for them.
"""

import dataclasses
import logging
import threading

import pytest

from jaxforge.errors import PeerLostError
from jaxforge.training.health import peers
from jaxforge.training.health.autopsy import State
from jaxforge.training.health.heartbeats import Status
from jaxforge.training.health.peers import PeerWatch
from tests.machine import wait_until

TIMEOUT = 1.0  # a beat in a tenth of it
STALLED = Status(7, "training", "", has_own_limit=False, idle=TIMEOUT, is_unusual=True)


class Process:
    """A process of the job. Its training thread is blocked, and the test sets its status."""

    def __init__(self, job, thread) -> None:
        self.status, self.is_frozen = STALLED, False
        self.watch = PeerWatch(TIMEOUT, job, lambda: self.status)
        self.watch._thread = thread.ident
        self.heartbeats = self.watch._heartbeats

    def publish(self):
        """Publish the current status, unless the process is frozen."""
        answers = self.heartbeats.answers
        self.heartbeats.wake()
        wait_until(lambda: self.is_frozen or self.heartbeats.answers > answers + 1)

    def suspect(self, other, seconds=0.0):
        """Return the result of `PeerWatch.suspect` after a reading of the other's current beat."""
        other.publish()
        self.heartbeats.is_listening = True
        readings = self.heartbeats.readings
        self.heartbeats.wake()
        wait_until(lambda: self.heartbeats.readings > readings + 1)
        return self.watch.suspect(seconds)

    def freeze(self):
        """End the heartbeat without a last word, as SIGSTOP does."""
        self.heartbeats.close()
        self.is_frozen = True


@pytest.fixture
def processes(service, monkeypatch):
    monkeypatch.setattr(peers, "_LATE_SEC", 0.0)
    monkeypatch.setattr(peers, "_LINGER_SEC", 0.0)
    event = threading.Event()
    thread = threading.Thread(target=event.wait)
    thread.start()
    processes = [Process(service(index), thread) for index in range(2)]
    for process in processes:
        process.watch.__enter__()
    yield processes
    for process in processes:
        process.watch.__exit__()
    event.set()
    thread.join()


def test_silent_process_is_suspected_each_time(processes):
    first, second = processes
    second.freeze()
    first.suspect(second)
    assert not (first.suspect(second, 0.6) or first.watch.examine()).culprits
    for _ in range(2):
        autopsy = first.suspect(second, 0.2)
        assert autopsy.states[1] is State.SILENT
        assert autopsy.culprits == [1]


def test_silence_of_process_is_no_hang_while_loop_progresses(processes):
    first, second = processes
    second.freeze()
    first.suspect(second)
    assert first.suspect(second, TIMEOUT).culprits == [1]
    for change in ({"idle": 0.5}, {"section": "end"}):
        first.status = dataclasses.replace(STALLED, **change)
        assert first.watch.suspect(0.0) is None


def test_beats_are_read_only_after_a_part_of_the_timeout(processes):
    first, _ = processes
    first.status = dataclasses.replace(STALLED, idle=0.1)
    first.watch.suspect(0.0)
    assert not first.heartbeats.is_listening
    first.status = dataclasses.replace(STALLED, idle=0.2)
    first.watch.suspect(0.0)
    assert first.heartbeats.is_listening


def test_living_process_is_reported_once_until_progress(processes, caplog):
    caplog.set_level(logging.INFO)
    first, second = processes
    second.status = dataclasses.replace(STALLED, activity="waiting for data")
    autopsy = first.suspect(second)
    assert autopsy.states == [State.WAITING, State.BEHIND]
    assert autopsy.culprits == [1]
    assert not autopsy.has_lost_process
    assert first.suspect(second) is None
    first.status = dataclasses.replace(STALLED, idle=0.0)
    assert first.watch.suspect(0.0) is None
    assert "the job makes progress again" in caplog.text
    first.status = STALLED
    assert first.suspect(second).culprits == [1]


@pytest.mark.parametrize(
    "change",
    [
        {"has_own_limit": True, "activity": "saving"},
        {"idle": 0.1},
    ],
)
def test_only_processes_without_progress_are_waited_for(processes, change):
    first, second = processes
    second.status = dataclasses.replace(STALLED, **{"activity": "waiting for data", **change})
    assert first.suspect(second) is None
    second.status = dataclasses.replace(STALLED, activity="waiting for data")
    assert first.suspect(second).culprits == [1]


def test_usual_time_between_steps_is_not_reported(processes):
    first, second = processes
    first.status = dataclasses.replace(STALLED, is_unusual=False)
    second.status = dataclasses.replace(STALLED, activity="waiting for data")
    assert first.suspect(second) is None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("first line\nsecond"), "ValueError: first line"),
        (SystemExit(9), "SystemExit: 9"),
    ],
)
def test_failure_is_published_to_other_processes(processes, error, reason):
    first, second = processes
    second.watch.note_failure(error)
    second.freeze()
    autopsy = first.suspect(second)
    assert autopsy.states[1] is State.FAILED
    assert autopsy.verdict().endswith(f"), failed: {reason}")
    assert autopsy.has_lost_process


def test_broken_connection_is_attributed_to_failed_process(processes, caplog):
    first, second = processes
    second.watch.note_failure(ValueError("a bug"))
    second.freeze()
    first.watch.note_failure(PeerLostError("connection closed"))
    assert "a connection broke; most likely culprit: process 1 (" in caplog.text
    assert "failed: ValueError: a bug" in caplog.text


def test_broken_connection_is_attributed_to_silent_process(processes, caplog, monkeypatch):
    monkeypatch.setattr(peers, "_LOST_SEC", 0.5)
    first, second = processes
    second.freeze()
    first.watch.note_failure(PeerLostError("connection closed"))
    assert "a connection broke; most likely culprit: process 1 (" in caplog.text
    assert "silent: no heartbeat for" in caplog.text


def test_reported_process_is_no_culprit(processes):
    first, second = processes
    second.watch.note_hang()
    second.publish()
    second.freeze()
    first.suspect(second)
    autopsy = first.suspect(second, TIMEOUT) or first.watch.examine()
    assert autopsy.states[1] is State.WAITING
    assert not autopsy.culprits
