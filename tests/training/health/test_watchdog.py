"""Time limits of sections, and the end of a hanging process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxforge.exit_codes import Exit
from jaxforge.training.health.watchdog import Limits, Watchdog
from tests.machine import PATIENCE

LIMITS = Limits(setup=100, step=10)
ROOT = Path(__file__).parents[3]


@pytest.fixture
def watchdog():
    return Watchdog(LIMITS)  # the thread does not run: `idle` advances time


def test_setup_limit_holds_until_first_step(watchdog):
    assert watchdog.idle(99) is None
    assert watchdog.idle(1) == (
        "hung: no progress in training for 100 s, before the first step "
        "(train.watchdog_setup_sec = 100)"
    )


def test_each_step_restarts_the_count(watchdog):
    watchdog.tick(1)
    for step in range(2, 20):
        assert watchdog.idle(9) is None
        watchdog.tick(step)
    assert watchdog.idle(10) == (
        "hung: no progress in training for 10 s, after step 19 (train.watchdog_step_sec = 10)"
    )


def test_checkpoint_limit_pauses_step_limit(watchdog):
    watchdog.tick(7)
    assert watchdog.idle(9) is None
    with watchdog.section("checkpoint"):
        assert watchdog.idle(99) is None
        message = watchdog.idle(1)
    assert message == (
        "hung: no progress in checkpoint for 100 s, after step 7 (train.watchdog_setup_sec = 100)"
    )
    assert "10 s" in watchdog.idle(1)  # 9 s before the checkpoint, 1 s after


@pytest.mark.parametrize("name", ["data", "end"])
def test_unlimited_sections_never_expire(watchdog, name):
    with watchdog.section(name):
        assert watchdog.idle(1e9) is None
        watchdog.tick()
        assert watchdog.idle(1e9) is None


def test_tick_in_checkpoint_restarts_its_count(watchdog):
    with watchdog.section("checkpoint"):
        for _ in range(3):
            assert watchdog.idle(99) is None
            watchdog.tick()
        assert "train.watchdog_setup_sec" in watchdog.idle(100)


def test_evaluation_has_setup_limit_then_step_limit(watchdog):
    watchdog.tick(3)
    with watchdog.section("evaluation"):
        assert watchdog.idle(99) is None
        watchdog.tick()
        assert watchdog.idle(9) is None
        with watchdog.section("checkpoint"):
            assert watchdog.idle(49) is None
        assert "no progress in evaluation for 10 s, after step 3" in watchdog.idle(1)
    assert watchdog.idle(9) is None
    assert "in training" in watchdog.idle(1)


def test_section_ends_with_exception(watchdog):
    watchdog.tick(1)
    with pytest.raises(ValueError, match="disk"), watchdog.section("checkpoint"):
        raise ValueError("disk")
    assert "in training" in watchdog.idle(10)


def test_zero_limit_never_expires():
    watchdog = Watchdog(Limits(0, 0))
    assert watchdog.idle(1e9) is None
    watchdog.tick(1)
    with watchdog.section("checkpoint"):
        assert watchdog.idle(1e9) is None


HANG = """
import logging, sys, threading
from pathlib import Path
from jaxforge.training.health import watchdog
from jaxforge.training.health.watchdog import Limits, Watchdog

watchdog.POLL_SEC = 0.05
logging.basicConfig()
short, long = 0.1, 1e9
where, stacks = sys.argv[1], Path(sys.argv[2])
limits = Limits(long, short) if where == "step" else Limits(short, long)
dog = Watchdog(limits)
dog._expire = lambda message: dog.die(message, linger=0.5)


def stuck_in_a_lock():
    lock = threading.Lock()
    lock.acquire()
    if where == "checkpoint":  # and whatever reports to the log is stuck too
        logging.getLogger().handlers[0].acquire()
    threading.Thread(target=lock.acquire, name="main waits for no signal").start()
    lock.acquire()


with dog:
    dog.write_stacks_to(stacks)
    if where != "setup":
        dog.tick(4)
    with dog.section("checkpoint" if where == "checkpoint" else "evaluation"):
        dog.tick(5) if where == "step" else None
        stuck_in_a_lock()
"""


@pytest.mark.parametrize(
    ("where", "limit", "said"),
    [
        ("setup", "setup", "in evaluation for 0 s, before the first step"),
        ("step", "step", "in evaluation for 0 s, after step 5"),
        ("checkpoint", "setup", "in checkpoint for 0 s, after step 4"),
    ],
)
def test_hanging_process_exits_with_stacks_and_code(where, limit, said, tmp_path):
    stacks = tmp_path / "stacks.txt"
    done = subprocess.run(
        [sys.executable, "-c", HANG, where, stacks],
        cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == Exit.HUNG.code, done.stderr
    for text in (done.stderr, stacks.read_text()):
        assert f"hung: no progress {said} (train.watchdog_{limit}_sec = 0.1)" in text
        assert text.count("in stuck_in_a_lock") == 1
        assert text.count("most recent call first") >= 3  # main, the other thread, the watchdog
    assert ("exiting with code 70" in done.stderr) == (where != "checkpoint")


def test_progressing_run_does_not_expire(tmp_path):
    expired = []
    with Watchdog(Limits(60, 60), expired.append) as watchdog:
        watchdog.tick(1)
    assert expired == []
    assert not watchdog._thread.is_alive()


def test_watchdog_only_reports_in_notebook(monkeypatch, caplog):
    """The kernel and the state of the user must survive."""
    ended = []
    monkeypatch.setattr(os, "_exit", ended.append)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    Watchdog(Limits(1, 1)).die("hung: for a test", linger=0)
    assert not ended
