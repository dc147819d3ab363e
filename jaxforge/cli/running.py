"""Common frame of all entry points around their `main`."""

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
from jaxforge.cli.redaction import redacted_message
from jaxforge.errors import PeerLostError, StorageError, UserError, printable

if TYPE_CHECKING:
    from rich.console import Console

STDOUT = Path("-")
"""What stands for standard output, where a file is asked for."""

_FLAGS_SEC = 60


def run_main(
    main: Callable[[], int], *, uses_devices: bool = False, outlives_reader: bool = False
) -> int:
    """Runs `main`; failures that are not our own mistakes become one message on stderr.

    Args:
        main: what to do.
        uses_devices: it will compile and run programs of JAX.
        outlives_reader: standard output is not the result. Without a reader the work goes on;
            other commands end, with 0, where a reader has seen enough, as `head` does.

    Returns:
        What `main` returns, else the error's exit code; 130 when interrupted from the keyboard.
    """
    try:
        with streams.guarded(outlives_reader=outlives_reader):
            if uses_devices:
                _check_xla_flags(os.environ.get("XLA_FLAGS", ""))
            return main()
    except (UserError, StorageError, PeerLostError) as error:
        said = redacted_message(printable(str(error)))
        print(f"error: {said}", file=streams.tolerant(sys.stderr))
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def raise_interrupts() -> None:
    """From here on Ctrl-C is raised: for a command that has something to put in order.

    Otherwise it just ends (`jaxforge.__init__`).
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def program(command: str) -> str:
    """Return how help names a command: as this process was called, by `jaxforge` or as a module."""
    if Path(sys.argv[0]).name == "jaxforge":
        return "jaxforge" if command == "torch_compat" else f"jaxforge {command}"
    return f"python -m {command if command == 'torch_compat' else f'jaxforge.{command}'}"


def wide_console(stream: TextIO | None = None) -> "Console":
    """A console on a stream, by default standard output.

    Files and pipes get lines of 120 columns: 80 would wrap.
    """
    from rich.console import Console  # here, for commands that do without

    stream = stream or sys.stdout
    return Console(file=stream, width=None if stream.isatty() else 120)


def check_place(option: str, path: Path | None) -> None:
    """Looks whether there is a directory for the file that an option asks for, before the work.

    Raises:
        UserError: there is none.
    """
    if path is not None and not path.parent.is_dir():
        raise UserError(f"{option} {path}: there is no directory {path.parent}")


def write_json(path: Path, document: object, *, indent: int | None = None) -> None:
    """Write a document for `--json` to a file, or to standard output (`STDOUT`).

    Raises:
        UserError: it cannot be written.
    """
    text = json.dumps(document, indent=indent, ensure_ascii=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
    else:
        write_text("--json", path, text)


def write_text(option: str, path: Path, text: str) -> None:
    """Write the text that an option asks for to a file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{option} {path}: {error.strerror}") from error


def _check_xla_flags(flags: str) -> None:
    """Lets a child read them first: XLA ends a process with code 1 where it cannot.

    Raises:
        UserError: they are wrong.
    """
    if not flags or not sys.platform.startswith("linux"):  # a fork is not safe elsewhere
        return
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(write, sys.__stderr__.fileno() if sys.__stderr__ else 2)
        signal.alarm(_FLAGS_SEC)
        _parse_xla_flags()
    os.close(write)
    with open(read, errors="replace") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status in (1, -signal.SIGABRT):
        raise UserError(f"XLA_FLAGS={flags}: {_gist(said)}; correct or unset it")


def _parse_xla_flags() -> NoReturn:
    try:
        import jax

        jax.config.update("jax_platforms", "cpu")  # quick to open, and knows the flags of all
        jax.devices()
    finally:
        os._exit(0)


def _gist(said: str) -> str:
    """Return the essence of XLA's message, without its list of all flags."""
    first = said.strip().partition("\n")[0]
    return first.partition("] ")[2].removesuffix(".") or first or "XLA cannot read it"


def leave(code: int, patience: float = 30.0) -> NoReturn:
    """Ends the process as `SystemExit` does, but does not wait for ever for threads.

    The interpreter joins them before anything else, and one may hang in a read from a file system
    that does not answer.

    Args:
        code: exit code.
        patience: seconds that threads have to come to their end.
    """
    timer = threading.Timer(patience, _leave_behind, [code])
    timer.daemon = True
    timer.start()
    atexit.register(timer.cancel)  # called when the threads have ended
    raise SystemExit(code)


def _leave_behind(code: int) -> None:
    others = set(threading.enumerate()) - {threading.main_thread()}
    names = ", ".join(sorted(thread.name for thread in others if not thread.daemon))
    said = streams.tolerant(sys.stderr)  # nothing may keep the process from its end
    print(f"exiting with {code}, although threads go on: {names}", file=said, flush=True)
    os._exit(code)
