"""Goodput: the share of a run's time that trained it, and the account of all other time.

One clock per process attributes each moment to exactly one category. Blocks nest, and the innermost
block counts:

    start | restore | start | compile | step  wait  step | save | step | evaluation | step ... other
                                              ^^^^ ActivityClock.during("data_wait")

`step` is the remainder: time in the loop that no other category names. The host launches steps
ahead of the devices, and it waits for them within `step`. A run consists of attempts: starts of its
process (`runs.attempts`). The time between two of them is `down`.
"""

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, get_args

Category = Literal[
    "step", "rework", "data_wait", "evaluation", "save", "rollback", "start", "restore", "compile",
    "other", "down", "idle",
]  # fmt: skip
CATEGORIES: tuple[Category, ...] = get_args(Category)

DESCRIPTIONS: Mapping[Category, str] = {
    "step": "steps that took place for the first time",
    "rework": "steps that were repeated after a fault or a rollback",
    "data_wait": "waiting for batches",
    "evaluation": "evaluations, samples and other looks at the model",
    "save": "training held up by saves",
    "rollback": "returns to an earlier checkpoint",
    "start": "process start, imports, devices, data",
    "restore": "restoring checkpoints at starts",
    "compile": "compiling the step",
    "other": "checks between steps, and the end of the process",
    "down": "between two attempts",
    "idle": "between the completion of the run and its continuation; not part of the ratio",
}

_PAUSES = frozenset({"evaluation", "save", "rollback", "other"})
"""Categories within the loop that are not part of a step's time."""

Seconds = dict[Category, float]


class ActivityClock:
    """State machine that attributes the time of this process to categories.

    The thread that trains changes the category; any thread may read the seconds.

    Args:
        since: start of the first category, "start", by `time.perf_counter`; None means now.

    Attributes:
        step: the step that was launched last; None before the first.
    """

    def __init__(self, since: float | None = None) -> None:
        self._lock = threading.Lock()
        self._since = time.perf_counter() if since is None else since
        self._stack: list[Category] = ["start"]
        self._seconds: Seconds = dict.fromkeys(CATEGORIES, 0.0)
        self._unpaused = 0.0
        self._earlier: Mapping[Category, float] = {}
        self._furthest = 0
        self.step: int | None = None

    def continue_from(self, seconds: Mapping[Category, float], furthest: int) -> None:
        """Add the account of earlier attempts.

        Args:
            seconds: seconds of each category until this attempt.
            furthest: the last step that an earlier attempt has launched.
        """
        self._earlier, self._furthest = seconds, max(self._furthest, furthest)

    @contextlib.contextmanager
    def during(self, category: Category) -> Iterator[None]:
        """Attribute the block to a category, except for blocks within it."""
        with self._lock:
            # The time until here belongs to the outer category.
            self._note_time()
            self._stack.append(category)
        try:
            yield
        finally:
            with self._lock:
                self._note_time()
                self._stack.pop()

    def begin_steps(self, step: int) -> None:
        """Attribute the time from here on, outside of blocks, to the steps after `step`."""
        self._begin("rework" if step < self._furthest else "step")

    def launched(self, step: int) -> None:
        """Record that a step was launched: the following time belongs to the next step."""
        self.step = step
        # Steps up to `furthest` were launched before a fault: repeating them is not progress.
        if step >= self._furthest:
            self._furthest = step
            if self._stack[0] == "rework":
                self._begin("step")

    def end_steps(self) -> None:
        """Attribute the time from here on, outside of blocks, to the end of the process."""
        self._begin("other")

    def attempt(self) -> Seconds:
        """Return the seconds of this attempt by category."""
        with self._lock:
            self._note_time()
            return dict(self._seconds)

    def run(self) -> Seconds:
        """Return the seconds of the run by category, with earlier attempts."""
        attempt = self.attempt()
        return {name: attempt[name] + self._earlier.get(name, 0.0) for name in CATEGORIES}

    def waited(self) -> float:
        """Return the seconds in which this process has waited for data."""
        with self._lock:
            self._note_time()
            return self._seconds["data_wait"]

    def unpaused(self) -> float:
        """Return the seconds of this process without pauses of the steps."""
        with self._lock:
            self._note_time()
            return self._unpaused

    @property
    def current(self) -> Category:
        """Current category."""
        return self._stack[-1]

    @property
    def is_stepping(self) -> bool:
        """True from the first launch of this process until its steps end."""
        return self.step is not None and self._stack[0] in ("step", "rework")

    @property
    def furthest(self) -> int:
        """Last step that any attempt has launched."""
        return self._furthest

    def _begin(self, category: Category) -> None:
        with self._lock:
            self._note_time()
            # The outermost category: blocks that are open keep theirs.
            self._stack[0] = category

    def _note_time(self) -> None:
        now, category = time.perf_counter(), self._stack[-1]
        # Every second is added to exactly one category, so the account always sums to the wall
        # time.
        elapsed, self._since = now - self._since, now
        self._seconds[category] += elapsed
        if category not in _PAUSES:
            self._unpaused += elapsed


class Attempt(NamedTuple):
    """One start of the process of a run.

    Attributes:
        began: Unix time of the start of the process.
        seen: Unix time of the last evidence that the process was alive.
        step: last step that was launched; 0 before the first.
        seconds: seconds from `began` to `seen`, by category.
        code: exit code; None if the process was killed or is running.
    """

    began: float
    seen: float
    step: int
    seconds: Mapping[Category, float]
    code: int | None = None


def account(attempts: Sequence[Attempt], until: float | None = None) -> Seconds:
    """Return the seconds of a run by category, from its first start on.

    Args:
        attempts: all attempts, in order.
        until: Unix time up to which the time after the last attempt counts too; by default the
            account ends with the last attempt.
    """
    total: Seconds = dict.fromkeys(CATEGORIES, 0.0)
    for attempt in attempts:
        for name, seconds in attempt.seconds.items():
            total[name] += seconds
    starts = [attempt.began for attempt in attempts[1:]] + ([] if until is None else [until])
    for attempt, next_start in zip(attempts, starts, strict=False):
        # After exit code 0 nobody expected the run to go on.
        gap: Category = "idle" if attempt.code == 0 else "down"
        total[gap] += max(0.0, next_start - attempt.seen)
    return total


def ratio(seconds: Mapping[Category, float]) -> float:
    """Return goodput: the seconds of new steps / all seconds except `idle`; 0 before the first."""
    total = sum(seconds.values()) - seconds.get("idle", 0.0)
    return seconds.get("step", 0.0) / total if total > 0 else 0.0


def goodput_metrics(seconds: Mapping[Category, float]) -> dict[str, float]:
    """Return the metrics of an account: the ratio, the total, and categories that are not 0."""
    total = {"goodput/total_sec": round(sum(seconds.values()), 3)}
    parts = {f"goodput/{name}_sec": round(value, 3) for name, value in seconds.items() if value}
    return {"goodput/ratio": round(ratio(seconds), 6)} | total | parts
