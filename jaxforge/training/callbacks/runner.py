"""`Callbacks`: the callbacks of a run, in the order of `order.ORDER`."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.training.callbacks.callback import Callback, IntervalContext
from jaxforge.training.callbacks.order import position

CHECK_INTERVAL = 10
"""Steps between two checks of durations with several processes, which must agree on the clock."""

_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class Callbacks:
    """The callbacks of a run in order; decides which of them are due.

    Args:
        callbacks: callbacks in any order; callbacks of users keep their relative order.

    Raises:
        UserError: an interval is neither a number of steps nor a duration.
    """

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = sorted(callbacks, key=position)
        self._durations = {
            i: seconds_of(callback)
            for i, callback in enumerate(self._callbacks)
            if isinstance(callback.every, str)
        }
        self._previous = dict.fromkeys(self._durations, time.monotonic())
        self.collect = tuple(name for callback in callbacks for name in callback.collect)
        self.watches_steps = any(
            type(callback).on_step_end is not Callback.on_step_end for callback in callbacks
        )

    def due(self, step: int, paused: Callable[[], AbstractContextManager[None]]) -> list[Callback]:
        """Return the callbacks whose `on_interval` is due. Call this once per step.

        Args:
            step: steps attempted.
            paused: waits for launched steps and excludes the block from step times.
        """
        elapsed = self._elapsed(step, paused) if self._durations else set()
        return [
            callback
            for i, callback in enumerate(self._callbacks)
            if i in elapsed or callback.is_due(step)
        ]

    def due_on_resume(self, step: int) -> list[Callback]:
        """Return the callbacks that are due when a run resumes within an evaluation."""
        return [
            callback
            for callback in self._callbacks
            if callback.follows_evaluation and callback.is_due(step)
        ]

    def run(self, due: Sequence[Callback], context: IntervalContext) -> Exit | None:
        """Call `on_interval` of callbacks until the first reason to end the run.

        Args:
            due: result of `due` or `due_on_resume`.
            context: the run after the step.
        """
        for callback in due:
            pauses = callback.waits and not callback.follows_evaluation
            with context.tracker.paused() if pauses else contextlib.nullcontext():
                reason = callback.on_interval(context)
            if reason is not None:
                return reason
        return None

    def _elapsed(self, step: int, paused: Callable[[], AbstractContextManager[None]]) -> set[int]:
        """Return the indices of callbacks whose duration is over by the clock of process 0.

        With several processes the broadcast is a collective on the devices, so launched steps
        finish first (`paused`).
        """
        is_alone = jax.process_count() == 1
        if not is_alone and step % CHECK_INTERVAL:
            return set()
        now = time.monotonic()
        are_over = [now - self._previous[i] >= length for i, length in self._durations.items()]
        if not is_alone:
            with paused():
                verdicts = np.array(are_over, np.int32)
                are_over = multihost_utils.broadcast_one_to_all(verdicts).astype(bool).tolist()
        elapsed = {i for i, is_over in zip(self._durations, are_over, strict=True) if is_over}
        self._previous.update(dict.fromkeys(elapsed, now))
        return elapsed

    def start_clock(self) -> None:
        """Restart all durations, so that compilation does not count."""
        self._previous = dict.fromkeys(self._durations, time.monotonic())

    def __iter__(self) -> Iterator[Callback]:
        """Iterate over the callbacks in order."""
        return iter(self._callbacks)


def seconds_of(callback: Callback) -> float:
    """Return the seconds of an interval that is a duration.

    Raises:
        UserError: the text is not a duration.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?|\.\d+)\s*([smh])\s*", str(callback.every))
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not seconds:
        raise UserError(
            f'{type(callback).__name__}.every = "{callback.every}" is not a duration. Write a '
            'number and a unit, such as "90s", "10m" or "2h"; or a number of steps without quotes'
        )
    return seconds
