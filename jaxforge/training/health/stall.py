"""Time since the last progress of this process, including progress of its devices."""

import collections
from typing import Protocol


class Result(Protocol):
    """A result of a step, such as a `jax.Array`."""

    def is_ready(self) -> bool:
        """Return whether the devices have finished the step, without waiting for them."""

    def is_deleted(self) -> bool:
        """Return whether the result was deleted, for example by a callback."""


_HISTORY = 2  # finished steps after which the usual time between two of them is known
_PATIENCE = 3.0  # multiple of the longest stall so far that is unusual
_MAX_LAUNCHED = 64  # steps in flight whose end is awaited; runtimes allow about 32


class Stall:
    """Counts seconds without progress: launched or finished steps, and changes of the section.

    The host launches steps ahead of the devices and then waits, perhaps for many steps. The end of
    each step on the devices shows that the wait is no hang.

    The training thread calls `progress` and `launch`, and the watchdog's thread calls `count`.

    Attributes:
        seconds: time since the last progress.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._longest, self._finished = 0.0, 0
        self._launched: collections.deque[Result] = collections.deque(maxlen=_MAX_LAUNCHED)

    def progress(self) -> None:
        """Note progress that says nothing about the time between steps."""
        self.seconds = 0.0

    def launch(self, result: Result | None = None) -> None:
        """Note the launch of a step."""
        if self._finished >= _HISTORY:
            self._longest = max(self._longest, self.seconds)
        self.seconds = 0.0
        if result is not None:
            self._launched.append(result)

    def count(self, seconds: float) -> None:
        """Add seconds, unless the devices have finished a step since the last call."""
        self.seconds += seconds
        # With jaxlib 0.10, `is_ready` of a deleted array ends the process (SIGSEGV).
        while self._launched and (self._launched[0].is_deleted() or self._launched[0].is_ready()):
            self._launched.popleft()
            self._finished += 1
            self._longest, self.seconds = max(self._longest, self.seconds), 0.0

    def is_unusual(self) -> bool:
        """Return whether the current stall is much longer than all others of a running loop."""
        return self._finished >= _HISTORY and self.seconds >= _PATIENCE * self._longest
