"""Entry point of all commands: `jaxforge COMMAND ...` or `python -m jaxforge COMMAND ...`.

Modules are imported after `leave_working_directory`, except those that Python loads at its start.
"""

import os
import sys


def entry(command: str | None = None) -> int:
    """Run the command of this process; return its exit code.

    Args:
        command: name of the command; by default the first argument of the process.
    """
    leave_working_directory()
    from jaxforge.cli.process import end_at_signals

    end_at_signals()
    from jaxforge.commands import dispatch

    return dispatch.run_command(command) if command else dispatch.entry()


def leave_working_directory() -> None:
    """Remove the working directory from `sys.path`, where `python -m` puts it first.

    A command may run inside an untrusted run directory, in which any file could shadow a module of
    a library. The directory is not removed if this package is imported from it.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    is_first = not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()])
    if is_first and os.getcwd() != home:
        del sys.path[0]


if __name__ == "__main__":
    raise SystemExit(entry())
