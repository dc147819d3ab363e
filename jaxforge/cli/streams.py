"""Standard output and error of a process, whose reader may go away and whose disk may be full.

For some commands the text is the result (`generate`, `inspect`): without a reader they end. For
others it only accompanies the work (`train`, `prepare`): they go on.
"""

import abc
import contextlib
import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from typing import IO, Any, NoReturn, TextIO, cast

from jaxforge.errors import StorageError

log = logging.getLogger(__name__)

_MAY_PASS = (errno.ENOSPC, errno.EDQUOT, errno.EAGAIN)


class _Guarded(abc.ABC):
    """A stream that decides what a failure of `write` or `flush` means.

    Args:
        stream: of text or bytes.
        name: for messages.
    """

    def __init__(self, stream: IO[Any], name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str | bytes) -> int:
        """Write, as the stream does."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush, as the stream does."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    @property
    def buffer(self) -> "_Guarded":
        """The stream of bytes under a stream of text."""
        return type(self)(cast(TextIO, self._stream).buffer, self._name)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @abc.abstractmethod
    def _fail(self, error: OSError) -> None: ...


class _Tolerant(_Guarded):
    """A stream whose failures are reported once and stop nothing."""

    _is_reported = False

    def _fail(self, error: OSError) -> None:
        if error.errno not in _MAY_PASS:
            silence(self._stream)
        if not self._is_reported:
            self._is_reported = True  # before the message, which may come to this very stream
            level = logging.INFO if isinstance(error, BrokenPipeError) else logging.WARNING
            log.log(
                level, "%s takes no more text (%s). The process goes on", self._name, _why(error)
            )


class _Result(_Guarded):
    """A stream that ends the process when it fails: with 0 where its reader has seen enough."""

    def _fail(self, error: OSError) -> NoReturn:
        silence(self._stream)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0) from None
        raise StorageError(f"{self._name} could not be written: {_why(error)}") from error


def tolerant(stream: TextIO, name: str = "standard output") -> TextIO:
    """Return a view of a stream whose failures stop nothing.

    Args:
        stream: standard output or error; may be such a view.
        name: for the message.
    """
    if isinstance(stream, _Tolerant):
        return stream
    return cast(TextIO, _Tolerant(_unguarded(stream), name))


@contextlib.contextmanager
def guarded(*, outlives_reader: bool) -> Iterator[None]:
    """Guard `sys.stdout` and `sys.stderr`, and leave nothing behind that cannot be flushed.

    The interpreter would end with 120 if it could not flush them.

    Args:
        outlives_reader: failures of standard output stop nothing; standard error's never do.
    """
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    out, err = (stream or _nowhere() for stream in before)
    sys.stderr = tolerant(err, "standard error")
    sys.stdout = tolerant(out)
    if not outlives_reader:
        sys.stdout = cast(TextIO, _Result(_unguarded(out), "standard output"))
    try:
        yield
        sys.stdout.flush()
    finally:
        for stream in (out, err):
            try:
                stream.flush()
            except (OSError, StorageError, SystemExit):  # reported, or on the way out
                silence(stream)
        sys.stdout, sys.stderr = before


def silence(stream: IO[Any]) -> None:
    """Let the rest of a stream's text disappear, what waits in its buffer included."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no descriptor
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def _nowhere() -> TextIO:
    return io.TextIOWrapper(io.FileIO(os.devnull, "w"))


def _unguarded(stream: IO[Any]) -> IO[Any]:
    return stream._stream if isinstance(stream, _Guarded) else stream


def _open_closed_descriptors() -> None:
    """Keep the numbers 0 to 2 from files of the run, into which libraries would print."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free


def _why(error: OSError) -> str:
    return error.strerror or str(error)
