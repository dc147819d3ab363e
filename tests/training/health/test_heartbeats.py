"""Heartbeats through a real coordination service."""

import dataclasses
import inspect
import threading

import jax
import numpy as np
import pytest

from jaxforge.training.health.heartbeats import Beat, Heartbeats, Listener, Status, locate
from tests.machine import wait_until

BEAT = Beat("host", Status(3, "training", "", has_own_limit=False, idle=0.5), True, "loop.py:9")
PERIOD = 0.01


@pytest.fixture
def new_heartbeats(service):
    started = []

    def start(index, beat=lambda: BEAT):
        started.append(Heartbeats(service(index), beat, PERIOD))
        started[-1].start()
        return started[-1]

    yield start
    for heartbeats in started:
        heartbeats.close()


def test_beats_of_all_processes_are_read_while_listening(new_heartbeats):
    other = dataclasses.replace(BEAT, host="other")
    heartbeats = [new_heartbeats(0), new_heartbeats(1, lambda: other)]
    wait_until(lambda: all(each.answers > 1 for each in heartbeats))
    assert heartbeats[0].readings == 0
    heartbeats[0].is_listening = True
    wait_until(lambda: 1 in heartbeats[0].received)
    sequence, beat = heartbeats[0].received[1]
    assert beat == other
    wait_until(lambda: heartbeats[0].received[1][0] > sequence)


def test_last_beat_has_reason(new_heartbeats):
    reasons = [""]
    first = new_heartbeats(0)
    second = new_heartbeats(1, lambda: dataclasses.replace(BEAT, reason=reasons[-1]))
    heartbeats = [first, second]
    heartbeats[0].is_listening = True
    wait_until(lambda: 1 in heartbeats[0].received)
    reasons.append("ValueError: x")
    heartbeats[1].close()
    wait_until(lambda: heartbeats[0].received[1][1].reason == reasons[-1])
    sequence = heartbeats[0].received[1][0]
    readings = heartbeats[0].readings
    wait_until(lambda: heartbeats[0].readings > readings + 3)
    assert heartbeats[0].received[1][0] == sequence


def test_listener_counts_silence_between_readings(new_heartbeats):
    heartbeats, other = new_heartbeats(0), new_heartbeats(1)
    listener = Listener(heartbeats, [1, 2])

    def count_next_reading():
        readings = heartbeats.readings
        wait_until(lambda: heartbeats.readings > readings)
        listener.count(4.0)

    listener.count(4.0)
    assert listener.quiet == {}
    heartbeats.is_listening = True
    wait_until(lambda: 1 in heartbeats.received)
    listener.count(4.0)
    assert listener.quiet == {1: 0.0, 2: 0.0}
    other.close()
    while listener.quiet[1] == 0.0:
        count_next_reading()
    silence = dict(listener.quiet)
    count_next_reading()
    assert {i: listener.quiet[i] - silence[i] for i in silence} == {1: 4.0, 2: 4.0}
    assert listener.unanswered == 0.0
    heartbeats.is_listening = False
    listener.count(4.0)
    assert listener.quiet == {}


def test_listener_counts_seconds_without_answer(new_heartbeats):
    heartbeats = new_heartbeats(0)
    listener = Listener(heartbeats, [1])
    heartbeats.close()
    listener.count(4.0)
    answers = heartbeats.answers
    listener.count(4.0)
    listener.count(4.0)
    assert heartbeats.answers == answers
    assert listener.unanswered >= 8.0


def blocked_in_python(event):
    event.wait()


def blocked_in_jax(event):
    def wait(operand):
        event.wait()
        return np.zeros((), np.float32)

    shape = jax.ShapeDtypeStruct((), np.float32)
    jax.jit(lambda x: jax.pure_callback(wait, shape, x))(0.0).block_until_ready()


@pytest.mark.parametrize("function", [blocked_in_python, blocked_in_jax])
def test_location_is_line_outside_of_libraries(function):
    event = threading.Event()
    thread = threading.Thread(target=function, args=(event,))
    thread.start()
    lines, first = inspect.getsourcelines(function)
    location = f"health/test_heartbeats.py:{first + len(lines) - 1} ({function.__name__})"
    wait_until(lambda: locate(thread.ident) == (function is blocked_in_jax, location))
    event.set()
    thread.join()
    assert locate(thread.ident) == (False, "")
