"""Reasons to stop a run: signals, time limits and intervals (`jaxforge.exit_codes`).

The run stops after the current step, or between two batches of an evaluation. Time counts from the
start of the command (`process.began`). While the step is compiled and while the loop waits for
data, a signal stops a single process at once.

Several processes agree on the step after which all of them stop:

    SIGTERM         -> JAX's preemption service (it owns the signal) -> same step on every process
    other signals   -> our handler -> SIGTERM to ourselves -> the service, as above
    time limit      -> process 0 decides -> SIGTERM to itself -> the service, as above
    failed save     -> the process that failed -> SIGTERM to itself -> the service, as above

A second Ctrl-C ends the process at once. A second SIGTERM does not: schedulers signal every process
of a tree, and some signal twice. If the checkpoint takes longer than `train.shutdown_timeout_sec`,
the process exits with code 1.

At a prompt and in a notebook, the process belongs to the user: a second Ctrl-C and a checkpoint
that takes too long raise KeyboardInterrupt. In a thread, signals are not handled (Python delivers
them to the main thread), but everything else works.
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

from jaxforge.cli.process import DEFAULT_ACTION, end_now, is_interactive, stop_message, stop_signals
from jaxforge.config.train import TrainConfig
from jaxforge.exit_codes import Exit

log = logging.getLogger(__name__)

T = TypeVar("T")

_MESSAGE_SEC = 1.0  # longest wait for a message


class Interrupted(BaseException):
    """A signal arrived while no step was running that has to be finished first."""


class Signals:
    """Turns signals (`cli.process.stop_signals`) into a stop of all processes after the same step.

    Attributes:
        has_background_thread: True if a thread still compiles or reads. The interpreter would wait
            for this thread, so the process must end by `os._exit`.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._received: signal.Signals | None = None
        self._timer: threading.Timer | None = None
        self._announcement: threading.Thread | None = None
        self._shared = jax.process_count() > 1
        self._previous: dict[signal.Signals, Any] = {}
        self._asked = 0
        self._agreed: Exit | None = None
        self._is_time_up = self._has_failed = False
        self._interruptible = self.has_background_thread = False

    def __enter__(self) -> "Signals":
        # Python delivers signals to the main thread only.
        if threading.current_thread() is not threading.main_thread():
            return self
        # With several processes, SIGTERM belongs to JAX's preemption service, which forwards it.
        for sig in stop_signals():
            if not (self._shared and sig is signal.SIGTERM):
                self._previous[sig] = signal.signal(sig, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for sig, handler in self._previous.items():
            signal.signal(sig, handler)
        if self._timer is not None:
            self._timer.cancel()

    def _receive(self, number: int, _: FrameType | None) -> None:
        """Set the flags and start the timer.

        The main thread may hold the lock of a stream, of the log or of the live line when a signal
        interrupts it. So the message comes from a thread: a handler that logs waits forever.
        """
        # Schedulers signal twice; only a second Ctrl-C is meant as one.
        if self._received is not None and number != signal.SIGINT:
            return
        self._received = signal.Signals(number)
        if number == signal.SIGINT:
            second = self._previous[self._received] if is_interactive() else DEFAULT_ACTION
            signal.signal(number, second)
        if self._timer is None:
            self._timer = threading.Timer(self._timeout, _give_up, [self._timeout])
            self._timer.daemon = True
            self._timer.start()
        message = stop_message(self._received, "saving a checkpoint, then exiting")
        self._announcement = _log_in_thread(logging.WARNING, message)
        if self._shared:
            self.stop_everywhere()
        elif self._interruptible:
            raise Interrupted

    def time_is_up(self) -> None:
        """Stop every process because the time limit is reached."""
        self._is_time_up = True
        self.stop_everywhere()

    def stop_for_failed_save(self) -> bool:
        """Stop every process because a save of this process failed.

        Returns:
            False for a single process, which has nothing to agree on.
        """
        if self._shared and not self._has_failed:
            self._has_failed = True
            self.stop_everywhere()
        return self._shared

    def stop_everywhere(self) -> None:
        """Stop every process after the same step."""
        os.kill(os.getpid(), signal.SIGTERM)  # to JAX's preemption service, or to our handler

    def requested(self) -> Exit | None:
        """Return the reason to stop here, or None; the same on every process.

        Every process must call this equally often, since it may be a collective.
        """
        if not self._shared:
            return self._reason() if self._received else None
        # The number of the call is the step by which processes agree.
        self._asked += 1
        # The service reports the agreed point only once; later calls must return the same.
        if not self._agreed and multihost_utils.reached_preemption_sync_point(self._asked):
            self._agreed = self._agree()
        return self._agreed

    def _agree(self) -> Exit:
        """Agree on a reason: a failed save, else a received signal, else the time limit.

        A SIGTERM is seen by the service alone, so without any other reason it was a SIGTERM.
        """
        # On CPU, programs that run at the same time mix up their messages: finish the steps first.
        jax.block_until_ready(jax.live_arrays())
        status = np.array([self._received or 0, self._is_time_up, self._has_failed], np.int32)
        received, is_time_up, has_failed = multihost_utils.process_allgather(status).T
        if received.any():
            self._received = signal.Signals(received[received > 0].min())  # SIGINT takes precedence
        self._is_time_up = bool(is_time_up.any())
        self._has_failed = bool(has_failed.any())
        return self._reason()

    def _reason(self) -> Exit:
        if self._announcement is not None:  # comes before the messages of the save
            self._announcement.join(_MESSAGE_SEC)
        # A failed save comes first: the stop is its consequence.
        if self._has_failed:
            return Exit.STORAGE
        if self._received is None and self._is_time_up:
            return Exit.DURATION
        return Exit.INTERRUPT if self._received is signal.SIGINT else Exit.SIGNAL

    @property
    def name(self) -> str:
        """Name of the received signal; on every process once it is agreed."""
        return (self._received or signal.SIGTERM).name

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Interrupt the block when a signal arrives, in a job of one process.

        Several processes have to agree first, and do so at the next `requested`.

        Raises:
            Interrupted: a signal has arrived.
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
        """Call `function` in a thread, so that signals interrupt the wait for it.

        Python handles no signals while the main thread is in compiled code for minutes.

        Raises:
            Interrupted: a signal has arrived; the thread continues in the background.
        """
        results: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                results.append(function())
            except BaseException as error:
                failures.append(error)

        # A daemon, because an interrupted compilation cannot be stopped.
        thread = threading.Thread(target=run, daemon=True)
        with self.interrupting():
            thread.start()
            thread.join()
        if failures:
            raise failures[0]
        return results[0]


def _log_in_thread(level: int, message: str) -> threading.Thread:
    """Log in a new thread, because another thread may hold the lock of the log forever."""
    thread = threading.Thread(target=log.log, args=(level, "%s", message), daemon=True)
    thread.start()
    return thread


def _give_up(seconds: float) -> None:
    message = f"no checkpoint was saved within train.shutdown_timeout_sec = {seconds:g} s: exiting"
    _log_in_thread(logging.ERROR, message).join(_MESSAGE_SEC)
    end_now(Exit.ERROR.code, flush=False)
    _thread.interrupt_main()


class Exits:
    """Reasons to stop after a step, in the order of Megatron: signal, duration, interval."""

    def __init__(self, config: TrainConfig, signals: Signals, since: float | None = None) -> None:
        self._config, self._signals = config, signals
        self._began = time.monotonic() if since is None else since

    def requested(self, step: int) -> Exit | None:
        """Return the reason to stop after `step`; the same on every process."""
        stop = self._signals.requested()
        if stop:
            return stop  # for a failed save, the next save raises and reports it
        if self._is_time_up():
            return Exit.DURATION
        if self._config.exit_interval and step % self._config.exit_interval == 0:
            return Exit.INTERVAL
        return None

    def log_reason(self, reason: Exit, step: int) -> None:
        """Log the message of Megatron for a requested stop, after the last save."""
        messages = {
            Exit.DURATION: f"exiting program after {self._minutes} minutes",
            Exit.INTERVAL: f"exiting program at iteration {step}",
        }
        received = f"exiting program after receiving {self._signals.name}."
        messages |= dict.fromkeys((Exit.SIGNAL, Exit.INTERRUPT), received)
        if reason in messages:
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            log.info("[%s] datetime: %s ", messages[reason], now)

    def log_total_time(self) -> None:
        """Log the time since the command began."""
        log.info("total time: %.2f s", 60 * self._minutes)

    def requested_in_evaluation(self) -> Exit | None:
        """Return the reason to stop between two batches of an evaluation.

        The reason is the same on every process. The evaluation continues after a restart.
        """
        stop = self._signals.requested()
        return stop or (Exit.DURATION if self._is_time_up() else None)

    @property
    def _minutes(self) -> float:
        return (time.monotonic() - self._began) / 60

    def _is_time_up(self) -> bool:
        """Return whether time is up. With several processes, stop all of them and return False."""
        limit = self._config.exit_duration_in_mins
        if limit is None or self._minutes <= limit:
            return False
        if jax.process_count() == 1:
            return True
        if jax.process_index() == 0:  # the clock of process 0 decides for all
            self._signals.time_is_up()
        return False
