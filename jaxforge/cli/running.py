"""Error handling, output files and exit of all entry points."""

import atexit
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from jaxforge.cli import streams
from jaxforge.cli.process import DEFAULT_ACTION
from jaxforge.cli.redaction import redacted_message
from jaxforge.errors import PeerLostError, UserError, exit_code_of, printable
from jaxforge.exit_codes import Exit

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = Path("-")
"""Path that selects standard output instead of a file."""

_FLAGS_SEC = 60


def run_main(
    main: Callable[[], int], *, uses_devices: bool = False, outlives_reader: bool = False
) -> int:
    """Run `main`, and print expected errors as one message on stderr.

    Args:
        main: the command.
        uses_devices: `main` compiles and runs JAX programs.
        outlives_reader: standard output is not the result, so the command continues when its reader
            closes the pipe. Other commands then end with 0, as with `head`.

    Returns:
        The result of `main`, or the exit code of the error; 130 after a keyboard interrupt.
    """
    try:
        with streams.guarded(outlives_reader=outlives_reader):
            if uses_devices:
                check_xla_flags()
            return main()
    except (UserError, PeerLostError, OSError) as error:
        code = exit_code_of(error)
        # An OSError that is not a known failure of storage is a bug: show its traceback.
        if code == Exit.ERROR.code:
            raise
        message = redacted_message(printable(str(error)))
        print(f"error: {message}", file=streams.tolerant(sys.stderr))
        return code
    except KeyboardInterrupt:
        return 130


def raise_interrupts() -> None:
    """Raise KeyboardInterrupt on Ctrl-C from now on, for commands that need to clean up.

    By default Ctrl-C ends the process at once (`cli.process.end_at_signals`).
    """
    if signal.getsignal(signal.SIGINT) is DEFAULT_ACTION:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def wide_console(stream: TextIO | None = None) -> "Console":
    """Return a console on a stream, by default standard output.

    Files and pipes have 120 columns, because tables would wrap at 80.
    """
    from rich.console import Console  # imported here for commands that do not use it

    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 120)


def check_parent_directory(option: str, path: Path | None) -> None:
    """Check that the directory of an option's output file exists, before the work starts.

    Raises:
        UserError: the directory does not exist.
    """
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option} {path}: directory {path.parent} does not exist")


def write_json(path: Path, document: object, *, indent: int | None = None) -> None:
    """Write a document for `--json` to a file, or to standard output (`STDOUT`).

    Raises:
        UserError: the file cannot be written.
    """
    # A terminal in another encoding could not show the characters.
    is_escaped = path == STDOUT and not sys.stdout.encoding.lower().startswith("utf")
    text = json.dumps(document, indent=indent, ensure_ascii=is_escaped) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text("--json", path, text)


def write_text(option: str, path: Path, text: str) -> None:
    """Write the text requested by an option to a file.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from error


def check_xla_flags() -> None:
    """Check XLA flags in a child process, because XLA ends a process with invalid flags.

    Raises:
        UserError: the flags are invalid.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if not flags or not sys.platform.startswith("linux"):  # fork is unsafe elsewhere
        return
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        # XLA prints from C to the descriptor, past `sys.stderr`.
        os.dup2(write, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        # Ends a child that hangs in the start of JAX. Its signal is not an error of the flags.
        signal.alarm(_FLAGS_SEC)
        _parse_xla_flags()
    # Otherwise the pipe would not end for the reader below.
    os.close(write)
    with open(read, errors="replace") as pipe:
        output = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    # XLA exits with 1 or aborts on invalid flags; any other end proves nothing about them.
    if status in (1, -signal.SIGABRT):
        raise UserError(f"XLA_FLAGS={flags}: {_xla_message(output)}; correct or unset it")


def _parse_xla_flags() -> NoReturn:
    try:
        import jax

        # The CPU platform starts quickly and knows the flags of all platforms.
        jax.config.update("jax_platforms", "cpu")
        jax.devices()
    finally:
        os._exit(0)


def _xla_message(output: str) -> str:
    """Return the first line of XLA's message, without its list of all flags."""
    first = output.strip().partition("\n")[0]
    return first.partition("] ")[2].removesuffix(".") or first or "XLA cannot read it"


def leave(code: int, patience: float = 30.0) -> NoReturn:
    """End the process like `SystemExit`, but limit the wait for threads.

    The interpreter joins all threads first, and a thread may hang in a read from an unresponsive
    file system.

    Args:
        code: exit code.
        patience: seconds to wait for threads.
    """
    timer = threading.Timer(patience, _leave_behind, [code])
    # The interpreter must not wait for the timer itself.
    timer.daemon = True
    timer.start()
    atexit.register(timer.cancel)  # runs after the threads have ended
    raise SystemExit(code)


def _leave_behind(code: int) -> None:
    remaining = set(threading.enumerate()) - {threading.main_thread()}
    names = ", ".join(sorted(thread.name for thread in remaining if not thread.daemon))
    stderr = streams.tolerant(sys.stderr)  # an error here must not prevent the exit
    print(f"exiting with {code} while threads are running: {names}", file=stderr, flush=True)
    os._exit(code)
