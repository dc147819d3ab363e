"""When a run ends, and why: signals, and other reasons to stop (`jaxforge.exit_codes`).

A signal and a time limit are answered after the step, and between two batches of an evaluation. The
time counts from the start of the command (`process.began`). While the step is compiled and while
the loop waits for data, a signal is answered at once. Among several processes the
answer is agreed on: all of them stop at the same place. A second Ctrl-C ends the process at once; a
second SIGTERM does not, for schedulers tell every process of a tree, and some of them twice. If the
checkpoint takes longer than `train.shutdown_timeout_sec`, the process exits with code 1.

At a prompt and in a notebook the process is the user's: a second Ctrl-C, and a checkpoint that
takes too long, raise KeyboardInterrupt there. In a thread no signals are seen (Python hands them to
the main one), but all else works.
"""

import _thread
import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxforge.cli.process import end_now, is_interactive
from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit

log = logging.getLogger(__name__)

T = TypeVar("T")


class Interrupted(BaseException):
    """A signal came while nothing was under way that would have to be finished first."""


class Signals:
    """SIGTERM, SIGUSR1 and SIGINT turned into a decision that all processes take at one place.

    Attributes:
        has_background_thread: a thread is left in compiled code or in a read that may never end,
            and the interpreter would wait for it; leave by `os._exit`.
    """

    WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._received: signal.Signals | None = None
        self._timer: threading.Timer | None = None
        self._shared = jax.process_count() > 1
        self._previous: dict[signal.Signals, Any] = {}
        self._asked = 0
        self._agreed: Exit | None = None
        self._is_time_up = self._has_failed = False
        self._interruptible = self.has_background_thread = False

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self
        # Among several processes SIGTERM belongs to JAX's preemption service, which spreads it.
        for sig in self.WATCHED:
            if not (self._shared and sig is signal.SIGTERM):
                self._previous[sig] = signal.signal(sig, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._received is not None and number != signal.SIGINT:
            return
        self._received = signal.Signals(number)
        if number == signal.SIGINT:
            second = self._previous[self._received] if is_interactive() else signal.SIG_DFL
            signal.signal(number, second)
        log.warning("%s: saving a checkpoint, then exiting", self._received.name)
        if self._timer is None:
            self._timer = threading.Timer(self._timeout, _give_up, [self._timeout])
            self._timer.daemon = True
            self._timer.start()
        if self._shared:
            self.stop_everywhere()
        elif self._interruptible:
            raise Interrupted

    def time_is_up(self) -> None:
        """Has every process stop, for that reason."""
        self._is_time_up = True
        self.stop_everywhere()

    def stop_for_failed_save(self) -> bool:
        """Have every process stop because a save of this one failed.

        Returns:
            False if this process is alone: there is nothing to agree on.
        """
        if self._shared and not self._has_failed:
            self._has_failed = True
            self.stop_everywhere()
        return self._shared

    def stop_everywhere(self) -> None:
        """Has every process stop, at the same place."""
        os.kill(os.getpid(), signal.SIGTERM)  # to JAX's preemption service, or to ourselves

    def requested(self) -> Exit | None:
        """Return the reason to stop here, or None: the same answer on every process."""
        if not self._shared:
            return self._reason() if self._received else None
        self._asked += 1
        # The service says so but once, and who is asked again must give the same answer.
        if not self._agreed and multihost_utils.reached_preemption_sync_point(self._asked):
            self._agreed = self._agree()
        return self._agreed

    def _agree(self) -> Exit:
        """Signals that were received come before time; a SIGTERM only the service has seen."""
        # Programs that run at once on CPU would take one another's messages: first end the steps.
        jax.block_until_ready(jax.live_arrays())
        mine = np.array([self._received or 0, self._is_time_up, self._has_failed], np.int32)
        received, is_time_up, has_failed = multihost_utils.process_allgather(mine).T
        if received.any():
            self._received = signal.Signals(received[received > 0].min())  # SIGINT, if there is one
        self._is_time_up = bool(is_time_up.any())
        self._has_failed = bool(has_failed.any())
        return self._reason()

    def _reason(self) -> Exit:
        if self._has_failed:
            return Exit.STORAGE
        if self._received is None and self._is_time_up:
            return Exit.DURATION
        return Exit.INTERRUPT if self._received is signal.SIGINT else Exit.SIGNAL

    @property
    def name(self) -> str:
        """Name of the received signal, on any process once agreed."""
        return (self._received or signal.SIGTERM).name

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A single process leaves what is inside at once when a signal comes.

        Several would have to agree first, and do so at the next `requested`.

        Raises:
            Interrupted: a signal has come.
        """
        self._interruptible = not self._shared
        try:
            if self._interruptible and self._received:
                raise Interrupted
            yield
        except Interrupted:
            self.has_background_thread = True
            raise
        finally:
            self._interruptible = False

    def wait_for(self, function: Callable[[], T]) -> T:
        """Does `function` that may spend minutes in compiled code, where no signal would be seen.

        Raises:
            Interrupted: a signal has come; the work goes on in a thread that nobody waits for.
        """
        results: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        with self.interrupting():
            thread.start()
            thread.join()
        if failures:
            raise failures[0]
        return results[0]


def _give_up(seconds: float) -> None:
    log.error("no checkpoint within train.shutdown_timeout_sec = %g s: exiting", seconds)
    end_now(Exit.ERROR.code, flush=False)
    _thread.interrupt_main()


class Exits:
    """Reasons to stop after a step, in Megatron's order: signal, duration, interval.

    Args:
        config: the `[train]` section.
        signals: those of this process.
        since: when the command began, by `time.monotonic`; None: now.
    """

    def __init__(self, config: TrainConfig, signals: Signals, since: float | None = None) -> None:
        self._config, self._signals = config, signals
        self._began = time.monotonic() if since is None else since

    def requested(self, step: int) -> Exit | None:
        """Why to stop after `step`, said in the log; the same on every process."""
        stop = self._signals.requested()
        if stop is Exit.STORAGE:
            return stop  # whoever saves next says why
        if stop and stop is not Exit.DURATION:
            _say(f"exiting program after receiving {self._signals.name}.")
            return stop
        if stop or self._is_time_up():
            _say(f"exiting program after {self._minutes} minutes")
            return Exit.DURATION
        if self._config.exit_interval and step % self._config.exit_interval == 0:
            _say(f"exiting program at iteration {step}")
            return Exit.INTERVAL
        return None

    def requested_in_evaluation(self) -> Exit | None:
        """Return why to stop between two batches of an evaluation, which goes on after a restart.

        The same on every process. `requested` says it in the log.
        """
        stop = self._signals.requested()
        return stop or (Exit.DURATION if self._is_time_up() else None)

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def _is_time_up(self) -> bool:
        """Return whether to stop here, by the clock; among several processes, tell all of them."""
        limit = self._config.exit_duration_in_mins
        if limit is None or self._minutes <= limit:
            return False
        if jax.process_count() == 1:
            return True
        if jax.process_index() == 0:  # one clock decides for all
            self._signals.time_is_up()
        return False


def _say(message: str) -> None:
    log.info("[%s] datetime: %s ", message, time.strftime("%Y-%m-%d %H:%M:%S"))
