"""Live line of a terminal: width, time left, and output above the line."""

import io
import logging
import re
import threading
import time

import pytest
from rich.console import Console

from jaxforge.telemetry.console import Activity, LiveLine, clock, setup_logging
from jaxforge.telemetry.metric_writers import open_writers
from jaxforge.training.health.watchdog import Limits, Watchdog
from jaxforge.training.launch import open_live_line
from tests.conftest import tiny_config
from tests.machine import wait_until

STEP = {
    "train/loss": 3.21449, "train/tokens_per_sec": 349_525.0, "train/step_time_sec": 0.5,
    "train/skipped_steps": 0.0,
}  # fmt: skip


class Terminal(io.StringIO):
    """A terminal that records the text and the final lines of the screen."""

    def on_screen(self):
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", self.getvalue())
        return [line.rpartition("\r")[2].rstrip() for line in plain.split("\n")]


def line_at(activity, width=80, steps=((1000, 9.0), (1200, 0.5)), ascii_only=False, **more):
    line = LiveLine(Console(file=io.StringIO()), lambda: activity)
    line.begin(990, 100_000)
    for step, seconds in steps:
        line.write(step, STEP | {"train/step_time_sec": seconds} | more)
    return line.text(activity, width, ascii_only=ascii_only)


STEPPING = Activity(1200, "", 0.0)


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (20, "step 1200/100000  1%"),
        (40, "step 1200/100000  1%  loss 3.2145"),
        (60, "step 1200/100000  1%  loss 3.2145  350K tok/s  13:43:20 left"),
        (80, "step 1200/100000  1%  loss 3.2145  350K tok/s  13:43:20 left  " + "─" * 18),
        (120, "step 1200/100000  1%  loss 3.2145  350K tok/s  13:43:20 left  " + "─" * 30),
    ],
)
def test_narrow_line_drops_the_least_important_parts(width, expected):
    assert line_at(STEPPING, width) == expected


def test_less_important_part_does_not_replace_dropped_part():
    line = line_at(STEPPING, 57, **{"train/skipped_steps": 3.0})
    assert line == "step 1200/100000  1%  loss 3.2145  350K tok/s"
    assert "3 skipped" in line_at(STEPPING, 80, **{"train/skipped_steps": 3.0})


def test_wide_terminal_shows_extras_and_bar():
    more = {"train/mfu": 0.413, "train/lr": 3e-4, "train/grad_norm": 1.2346,
            "gpu/peak_gb": 61.2, "gpu/total_gb": 80.0}  # fmt: skip
    begun = "step 1200/100000  1%  loss 3.2145  350K tok/s  13:43:20 left  "
    assert line_at(STEPPING, 80, **more) == begun + "─" * 18
    assert line_at(STEPPING, 100, **more) == f"{begun}MFU 41%  lr 3.00e-04  {'─' * 16}"
    everything = f"{begun}MFU 41%  lr 3.00e-04  |g| 1.235  61.2/80 GB  "
    assert line_at(STEPPING, 140, **more) == everything + "─" * 30


def test_line_never_exceeds_width():
    for activity in (
        STEPPING,
        Activity(1200, "evaluating", 75.2),
        Activity(None, "loading data", 3),
    ):
        for width in range(1, 130):
            assert len(line_at(activity, width, **{"train/mfu": 0.41, "train/lr": 1e-3})) <= width


def test_pause_is_named_and_time_left_is_hidden():
    assert line_at(Activity(1200, "evaluating", 75.2), 60) == (
        "step 1200/100000  ⠋ evaluating 1:16  1%  loss 3.2145"
    )
    assert " left" not in line_at(Activity(1200, "evaluating", 75.2), 120)
    line = LiveLine(Console(file=io.StringIO()), lambda: STEPPING)
    assert line.text(Activity(None, "compiling", 0.6), 80) == "⠙ compiling 0:01"
    assert line.text(Activity(None, "compiling", 0.6), 80, ascii_only=True) == "/ compiling 0:01"


def test_skipped_steps_are_counted():
    skipped = line_at(STEPPING, 80, **{"train/skipped_steps": 3.0})
    assert skipped.endswith("13:43:20 left  3 skipped")


def left(activity, steps=((100, 1.0), (200, 2.0)), begin=0):
    line = LiveLine(Console(file=io.StringIO()), lambda: activity)
    line.begin(begin, 1000)
    for step, seconds in steps:
        line.write(step, STEP | {"train/step_time_sec": seconds})
    return line.seconds_left(activity)


def test_time_left_uses_recent_rate():
    assert (
        left(Activity(200, "", 0.0)) == 800 * 2
    )  # the first interval is slower and does not count
    three = ((1, 60.0), (100, 1.0), (200, 2.0))
    assert left(Activity(200, "", 0.0), three) == pytest.approx(800 * (99 * 1 + 100 * 2) / 199)
    assert left(Activity(300, "", 1.5)) == 700 * 2 - 1.5
    assert left(Activity(300, "", 3600.0)) == 699 * 2  # a hanging step counts as one step
    assert left(Activity(1000, "", 0.0)) == 0
    assert left(Activity(1, "", 0.0), steps=()) is None


def test_resumed_run_counts_steps_since_start():
    assert left(Activity(510, "", 0.0), ((501, 30.0), (510, 2.0)), begin=500) == 490 * 2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0:00"), (6.1, "0:07"), (754, "12:34"), (3723, "1:02:03"), (2 * 86400 + 184, "2d 00:03")],
)
def test_clock_formats_duration(seconds, text):
    assert clock(seconds) == text


@pytest.fixture
def screen():
    terminal = Terminal()
    named = {"TERM": "xterm"}  # a dumb terminal would have no line
    return terminal, Console(file=terminal, force_terminal=True, width=80, _environ=named)


def test_live_line_moves_during_long_step(screen):
    terminal, console = screen
    began = time.monotonic()
    setup_logging(console)
    with LiveLine(console, lambda: Activity(1, "", time.monotonic() - began)) as line:
        line.begin(0, 10)
        line.write(1, STEP | {"train/step_time_sec": 1000.0})
        wait_until(lambda: len(set(re.findall(r"(\S+) left", terminal.getvalue()))) >= 2)
        logging.getLogger("jaxforge").info("said meanwhile")
        line.write(1, {"eval/loss": 4.5})
        line.write(1, {"other": 1.0})
        line.close(0)
    shown = terminal.on_screen()
    assert [line for line in shown if line][-3].endswith("said meanwhile")
    assert [line for line in shown if line][-2] == "[step 1] eval_loss=4.5000"
    assert [line for line in shown if line][-1].startswith("step 1/10  10%  loss 3.2145")
    assert "\x1b[2K" not in terminal.getvalue().rpartition("step 1/10")[2]  # not erased
    wait_until(
        lambda: "_RefreshThread" not in {type(item).__name__ for item in threading.enumerate()}
    )


def test_failed_start_leaves_no_line(screen):
    terminal, console = screen
    with pytest.raises(OSError, match="data"), LiveLine(console, lambda: STEPPING):
        raise OSError("data")
    assert terminal.on_screen()[-1] == ""
    assert terminal.getvalue().rstrip().endswith("\x1b[2K")  # erased


def test_terminal_shows_cursor(screen):
    terminal, console = screen
    with LiveLine(console, lambda: STEPPING):
        assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")


def test_sections_are_shown_by_name():
    watchdog = Watchdog(Limits(0, 0))

    def name():
        return watchdog.activity().name

    assert name() == "starting"
    with watchdog.section("data"):
        assert name() == "loading data"
    with watchdog.naming("compiling"):
        assert name() == "compiling"
        assert watchdog.activity().seconds < 1000
    assert name() == "starting"
    watchdog.tick(7)
    assert watchdog.activity()[:2] == (7, "")
    with watchdog.section("evaluation"):
        watchdog.tick()
        assert name() == "evaluating"
        with pytest.raises(ValueError, match="stop"), watchdog.naming("sampling"):
            raise ValueError("stop")
        assert name() == "evaluating"
    with watchdog.section("checkpoint"):
        assert name() == "saving"
    assert name() == ""


@pytest.mark.parametrize(
    ("terminal", "dumb", "log_format", "is_live"),
    [
        (True, False, "kempnerforge", True),
        (True, False, "json", False),
        (True, True, "kempnerforge", False),
        (False, False, "kempnerforge", False),
    ],
)
def test_live_line_requires_terminal(terminal, dumb, log_format, is_live, tmp_path):
    environment = {"TERM": "dumb"} if dumb else {"TERM": "xterm"}
    console = Console(file=io.StringIO(), force_terminal=terminal, _environ=environment)
    config = tiny_config(metrics={"log_format": log_format}, checkpoint={"dir": str(tmp_path)})
    live = open_live_line(console, config, Watchdog(Limits(0, 0)))
    assert isinstance(live, LiveLine) is is_live
    if is_live:
        *_, writer = open_writers(console, config, "id", 3, live=live)
        writer.write(4, STEP)
        assert live.text(Activity(4, "", 0.0), 40).startswith("step 4/20  20%  loss 3.2145")
