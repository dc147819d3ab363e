"""Restarts of a supervised command: policy, progress, and the log in the run directory."""

import dataclasses
import json
import logging
import random
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxforge import exit_codes
from jaxforge.checkpoint.paths import is_durable
from jaxforge.cli.process import began_env, new_command_env
from jaxforge.exit_codes import Exit
from jaxforge.storage import safe_files, urls

log = logging.getLogger("jaxforge.supervise")

_LOG_FILE = "supervise.jsonl"
_HEALTHY_SEC = 3600.0


@dataclasses.dataclass(frozen=True)
class Policy:
    """Restart policy: exit codes that lead to a restart, and waiting times.

    Attributes:
        max_restarts: consecutive restarts without progress.
        backoff: seconds before the first restart, doubled before each further restart.
        backoff_cap: maximum of these seconds.
        grace: seconds between a forwarded signal and SIGKILL.
        peer_grace: seconds until the other processes are killed after one has failed.
        again: further exit codes that lead to a restart, in addition to those of `exit_codes`.
    """

    max_restarts: int
    backoff: float
    backoff_cap: float
    grace: float
    peer_grace: float
    again: frozenset[int] = frozenset()

    def runs_again(self, code: int) -> bool:
        """Return whether a restart may help after an exit code."""
        return code in self.again or exit_codes.again(code)

    def delay(self, failures: int) -> float:
        """Return the pause in seconds after this many failures in a row, before jitter."""
        return min(self.backoff_cap, self.backoff * 2 ** (failures - 1))

    def next_delay(self, code: int, failures: int) -> float | None:
        """Return the pause before the next start, and log it; None for no restart.

        Args:
            code: exit code of the latest start.
            failures: consecutive starts without progress, including the latest one.
        """
        if not self.runs_again(code):
            log.info("done: exit code %d", code)
            return None
        if failures > self.max_restarts:
            log.error("%d consecutive starts without progress, --max-restarts %d: exit code %d",
                      failures, self.max_restarts, code)  # fmt: skip
            return None
        # Jitter, so that many supervisors do not restart at the same time.
        delay = self.delay(failures) * random.uniform(0.5, 1.0)
        log.info("restarting in %.1f s (restart %d of %d without progress)",
                 delay, failures, self.max_restarts)  # fmt: skip
        return delay


def command_env(policy: Policy) -> dict[str, str]:
    """Return the environment of a command under a restart policy.

    The time limit of a job covers all starts, unless reaching it leads to a restart.
    """
    has_limit = Exit.DURATION.code not in policy.again
    return {**new_command_env(), **(began_env() if has_limit else {})}


def newest_step(run: Path | None) -> int:
    """Return the step of the newest complete checkpoint of a run, or -1."""
    names = filter(is_durable, (run / "checkpoints").glob("step_*")) if run else ()
    steps = [int(number) for p in names if (number := p.name.partition("_")[2]).isdigit()]
    return max(steps, default=-1)


def progressed(run: Path | None, step_before: int, seconds: float) -> bool:
    """Return whether a start wrote a newer checkpoint; for other commands, ran for an hour."""
    if run is None:
        return seconds >= _HEALTHY_SEC
    return newest_step(run) > step_before


def record(run: Path | None, values: Mapping[str, Any]) -> None:
    """Append a line to the log in the run directory, if that exists and is local.

    Args:
        run: run directory; None if unknown.
        values: content of the line; "code" is the exit code of a start.
    """
    if run is None or urls.in_bucket(run) or not run.is_dir():
        return
    meaning = exit_codes.meaning(values["code"])
    line = {"host": socket.gethostname(), **values, "meaning": meaning}
    try:
        with safe_files.open_to_append(run / _LOG_FILE) as file:
            file.write(f"{json.dumps(line)}\n".encode())
    except OSError as error:  # a full disk does not prevent a restart
        log.warning("cannot write %s: %s", run / _LOG_FILE, error.strerror)


def stop_code(received: signal.Signals | None) -> int:
    """Return the exit code of a supervisor that was stopped by a signal."""
    return (Exit.INTERRUPT if received is signal.SIGINT else Exit.SIGNAL).code
