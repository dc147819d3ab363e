"""Attempts recorded in a run directory."""

import contextlib
import json
import logging
import logging.handlers
import queue

import pytest

from jaxforge.errors import UserError
from jaxforge.runs import attempts
from jaxforge.runs.attempts import AttemptLog
from jaxforge.telemetry.goodput import ActivityClock
from tests.machine import wait_until


@pytest.fixture
def run(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def lines(run, process=0):
    texts = ((run / name).read_text() for name in attempts.file_names(process))
    return [json.loads(line) for text in texts for line in text.splitlines()]


def test_later_attempt_continues_the_account(run):
    first = ActivityClock()
    log = AttemptLog(first)
    log.open(run, 0)
    first.begin_steps(0)
    for step in (1, 2, 3):
        first.launched(step)
    log.close(75)
    second = ActivityClock()
    log = AttemptLog(second)
    log.open(run, 0)
    assert second.furthest == 3
    earlier = lines(run)[0]
    assert (earlier["step"], earlier["code"]) == (3, 75)
    total = second.run()
    assert total["step"] == pytest.approx(earlier["seconds"]["step"], abs=0.001)
    assert total["down"] >= 0
    log.close(0)
    assert [line["code"] for line in lines(run)] == [75, 0]
    (of_process,) = attempts.read(run)[0].values()
    assert [attempt.step for attempt in of_process] == [3, 0]


def test_running_attempt_is_updated_without_its_help(run, monkeypatch):
    """A killed process leaves what the thread wrote last."""
    monkeypatch.setattr(attempts, "BEAT_SEC_OF_WORKERS", 0.01)
    clock = ActivityClock()
    log = AttemptLog(clock)
    log.open(run, 3)
    with clock.during("compile"):
        wait_until(lambda: lines(run, 3)[0]["seconds"].get("compile", 0) > 0)
    (line,) = lines(run, 3)
    assert line["code"] is None
    assert line["began"] < line["seen"]
    log.close(1)


def test_update_writes_the_latest_attempt_alone(run, monkeypatch):
    monkeypatch.setattr(attempts, "BEAT_SEC", 0.01)
    for code in (75, 70, 69):
        log = AttemptLog(ActivityClock())
        log.open(run, 0)
        log.close(code)
    earlier, latest = (run / name for name in attempts.file_names(0))
    log = AttemptLog(ActivityClock())
    log.open(run, 0)
    before, first = earlier.stat(), latest.read_text()
    wait_until(lambda: latest.read_text() != first)
    log.close(0)
    after = earlier.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert [line["code"] for line in lines(run)] == [75, 70, 69, 0]


def test_start_killed_between_its_two_writes_counts_no_attempt_twice(run):
    for code in (75, 70):
        log = AttemptLog(ActivityClock())
        log.open(run, 0)
        log.close(code)
    earlier, latest = (run / name for name in attempts.file_names(0))
    earlier.write_text(earlier.read_text() + latest.read_text())
    assert [attempt.code for attempt in attempts.read(run)[0][0]] == [75, 70]


def test_damaged_lines_are_named_and_left_out(run, caplog, monkeypatch):
    sound = {"began": 1, "seen": 2, "step": 5, "seconds": {"step": 1.0}, "code": None}
    damaged = [
        {**sound, "seconds": {"sleep": 1.0}}, {**sound, "seconds": {"step": -1.0}},
        {**sound, "step": 0.5}, {**sound, "code": "x"}, [],
    ]  # fmt: skip
    path = run / attempts.file_name(0)
    path.write_text("".join(json.dumps(line) + "\n" for line in [*damaged, sound]))
    by_process, damage = attempts.read(run)
    assert [attempt.step for attempt in by_process[0]] == [5]
    assert "goodput_0.jsonl:1: seconds is not a table of seconds; the line is left out" in damage[0]
    monkeypatch.setattr(logging.getLogger("jaxforge"), "propagate", True)
    clock = ActivityClock()
    log = AttemptLog(clock)
    log.open(run, 0)
    log.close(0)
    assert "goodput_0.jsonl:1: seconds is not" in caplog.text
    assert [line["step"] for line in lines(run)] == [5, 0]
    assert clock.furthest == 5


def test_unwritable_file_is_warned_of_once(run, monkeypatch):
    records = logging.handlers.QueueHandler(queue.SimpleQueue())
    monkeypatch.setattr(attempts.log, "handlers", [records])
    (run / attempts.file_name(0)).mkdir()
    log = AttemptLog(ActivityClock())
    log.open(run, 0)
    log.close(0)
    message = records.queue.get_nowait().getMessage()
    assert "goodput counts the time as down time" in message
    assert records.queue.empty()


def test_failed_start_is_closed_with_its_code(run):
    with contextlib.suppress(UserError), AttemptLog(ActivityClock()) as log:
        log.open(run, 0)
        raise UserError("the checkpoint does not fit")
    assert [line["code"] for line in lines(run)] == [2]
    with AttemptLog(ActivityClock()) as log:
        log.open(run, 0)
    assert [line["code"] for line in lines(run)] == [2, None]  # closed later, with a reason
    log.close(69)
    assert [line["code"] for line in lines(run)] == [2, 69]


def test_attempt_that_was_not_opened_writes_nothing(run):
    AttemptLog(ActivityClock()).close(2)
    assert list((run / "logs").iterdir()) == []
