"""How a run ends: signals, and `Exit` with its codes (`jaxforge.exit_codes`).

A second signal of the same kind ends the process at once, as without this module. If the checkpoint
takes longer than `train.shutdown_timeout_sec`, the process exits with code 1.
"""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from jaxforge.exit_codes import Exit

log = logging.getLogger(__name__)


class Signals:
    """SIGTERM, SIGUSR1 and SIGINT turned into a decision that all processes take at one step."""

    WATCHED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)

    def __init__(self, timeout_seconds: float) -> None:
        self._timeout = timeout_seconds
        self._received: signal.Signals | None = None
        self._timer: threading.Timer | None = None
        self._shared = jax.process_count() > 1
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> "Signals":
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
        self._received = signal.Signals(number)
        signal.signal(number, signal.SIG_DFL)
        log.warning("%s: saving a checkpoint after this step, then exiting", self._received.name)
        self._timer = threading.Timer(self._timeout, _give_up, [self._timeout])
        self._timer.daemon = True
        self._timer.start()
        if self._shared:
            os.kill(os.getpid(), signal.SIGTERM)  # to the preemption service: every process stops

    def requested(self, step: int) -> Exit | None:
        """Whether to stop after `step`: the same answer on every process."""
        if self._shared:
            if not multihost_utils.reached_preemption_sync_point(step):
                return None
            return Exit.INTERRUPT if self._received is signal.SIGINT else Exit.SIGNAL
        if self._received is None:
            return None
        return Exit.INTERRUPT if self._received is signal.SIGINT else Exit.SIGNAL


def _give_up(seconds: float) -> None:
    log.error("no checkpoint within train.shutdown_timeout_sec = %g s: exiting", seconds)
    os._exit(1)
