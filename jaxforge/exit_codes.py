"""Exit codes of a process, their meanings, and whether a restart may help.

This module imports neither JAX nor other modules of the project, so that `jaxforge.supervise`
starts quickly.
"""

import enum
import functools
import signal


class Exit(enum.Enum):
    """Reason for the end of a process.

    Attributes:
        code: the exit code; several reasons may share a code.
        meaning: the reason in one sentence.
        again: whether `jaxforge.supervise` runs the command again: a restart may help, and nobody
            requested the end.
    """

    code: int
    meaning: str
    again: bool

    def __new__(cls, code: int, meaning: str, again: bool) -> "Exit":
        """Create a member of the table below."""
        member = object.__new__(cls)
        member._value_ = meaning
        member.code, member.meaning, member.again = code, meaning, again
        return member

    @staticmethod
    @functools.cache
    def requested(code: int) -> "Exit":
        """Return the reason "a callback requested the end of the run" with an exit code."""
        member = object.__new__(Exit)
        member._name_, member._value_ = f"REQUESTED_{code}", "stopped by a callback"
        member.code, member.again = code, False
        member.meaning = f"stopped by a callback with exit code {code} after a checkpoint"
        return member

    @property
    def is_agreed(self) -> bool:
        """True if all processes of a job end for this reason at the same step."""
        return self in AGREED or self is Exit.requested(self.code)

    COMPLETED = 0, "finished: max_steps reached", False
    EARLY_STOPPED = 0, "finished: stopped early by [early_stop]", False
    ERROR = 1, "unexpected error, with a traceback", True
    USER_ERROR = (
        2,
        "a mistake in the config, the data or the command line: nothing was lost",
        False,
    )
    MACHINE = (
        16,
        "a step gave two results from the same state: the hardware is faulty",
        True,
    )
    NON_FINITE = (
        65,
        'gave up: nan_consecutive_max steps in a row were bad, or on_nonfinite = "stop" '
        "(EX_DATAERR)",
        False,
    )
    UNHEALTHY = (
        69,
        "the devices do not answer one another in time, or copies of a parameter differ: nothing "
        "was saved since (EX_UNAVAILABLE)",
        True,
    )
    HUNG = (
        70,
        "hung: no progress; the culprit and stacks are in logs/stacks_<i>.txt (EX_SOFTWARE)",
        True,
    )
    STRAGGLER = (
        71,
        "stopped by a slow host after a checkpoint; run again without it to resume (EX_OSERR)",
        False,
    )
    STORAGE = (
        74,
        "a checkpoint, data or lines of metrics could not be written or read (disk full, say); the "
        "checkpoints before are whole (EX_IOERR)",
        False,
    )
    SIGNAL = (
        75,
        "stopped by SIGTERM, SIGUSR1 or SIGHUP after a checkpoint; run again to resume "
        "(EX_TEMPFAIL)",
        False,
    )
    DURATION = 75, "stopped by train.exit_duration_in_mins after a checkpoint", False
    INTERVAL = 75, "stopped by train.exit_interval after a checkpoint", False
    INTERRUPT = 130, "stopped by Ctrl-C after a checkpoint; run again to resume", False
    ABORTED = (
        134,
        "another process of the job is gone, see its log; often the JAX runtime's end (SIGABRT)",
        True,
    )


AGREED = frozenset(
    {
        Exit.COMPLETED, Exit.EARLY_STOPPED, Exit.NON_FINITE, Exit.STRAGGLER, Exit.SIGNAL,
        Exit.DURATION, Exit.INTERVAL, Exit.INTERRUPT,
    }
)  # fmt: skip
"""Reasons that all processes of a job agree on at the same step."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
"""Signals that request a stop: the run saves first."""

_BY_CODE = {exit_.code: exit_ for exit_ in reversed(Exit)}  # the first reason of each code


def exit_code(returncode: int) -> int:
    """Convert a return code of `subprocess` to a shell's exit code: 128 + n for signal n."""
    return returncode if returncode >= 0 else 128 - returncode


def meaning(code: int) -> str:
    """Return the meaning of an exit code in one sentence."""
    if code in _BY_CODE:
        return _BY_CODE[code].meaning
    killer = _killer(code)
    return f"killed by {killer.name}" if killer else "not a code of jaxforge's"


def again(code: int) -> bool:
    """Return whether a restart may help, by the table or because a signal killed the process.

    Signals that request a stop, such as SIGTERM, are an exception: they may arrive before a process
    can handle them.
    """
    if code in _BY_CODE:
        return _BY_CODE[code].again
    killer = _killer(code)
    return killer is not None and killer not in STOP_SIGNALS


def as_stop(code: int) -> int:
    """Return the code of a stopped run if a signal that requests a stop killed the process.

    The signal may arrive before the process can handle it, and before one to its supervisor.
    """
    killer = _killer(code)
    return stop_code(killer) if killer in STOP_SIGNALS else code


def stop_code(received: signal.Signals | None) -> int:
    """Return the exit code of a run that was stopped by a signal."""
    return (Exit.INTERRUPT if received is signal.SIGINT else Exit.SIGNAL).code


def _killer(code: int) -> signal.Signals | None:
    try:
        return signal.Signals(code - 128)
    except ValueError:
        return None
