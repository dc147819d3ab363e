"""Standard output and error that tolerate a closed pipe, a full disk, and an ASCII terminal.

Commands whose output is the result (`generate`, `inspect`) end when the reader closes the pipe.
Commands whose output only reports progress (`train`, `prepare`) continue.
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
    """Base of streams that handle a failure of `write` or `flush`.

    Args:
        stream: a stream of text or bytes.
        name: name for messages.
    """

    def __init__(self, stream: IO[Any], name: str) -> None:
        self._stream, self._name = stream, name

    def write(self, text: str | bytes) -> int:
        """Write to the stream; escape characters that its encoding does not have."""
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:
            # The escapes are ASCII, so that the second attempt cannot fail in the same way.
            encoding = cast(TextIO, self._stream).encoding
            return self.write(str(text).encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._fail(error)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    @property
    def buffer(self) -> "_Guarded":
        """The byte stream of a text stream."""
        return type(self)(cast(TextIO, self._stream).buffer, self._name)

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @abc.abstractmethod
    def _fail(self, error: OSError) -> None: ...


class _Tolerant(_Guarded):
    """Stream whose failures are logged once and otherwise ignored."""

    _is_reported = False

    def _fail(self, error: OSError) -> None:
        # A full disk may get room again; a closed pipe never opens.
        if error.errno not in _MAY_PASS:
            silence(self._stream)
        if not self._is_reported:
            self._is_reported = True  # first, as the message may use this stream
            level = logging.INFO if isinstance(error, BrokenPipeError) else logging.WARNING
            log.log(
                level, "%s cannot be written (%s). The process continues", self._name, _why(error)
            )


class _Result(_Guarded):
    """Stream whose failure ends the process; with 0 if the reader has closed the pipe."""

    def _fail(self, error: OSError) -> NoReturn:
        silence(self._stream)
        if isinstance(error, BrokenPipeError):
            raise SystemExit(0) from None
        raise StorageError(f"{self._name} could not be written: {_why(error)}") from error


def tolerant(stream: TextIO, name: str = "standard output") -> TextIO:
    """Return a view of a stream that ignores failures.

    Args:
        stream: standard output or error, or such a view of it.
        name: name for the message.
    """
    if isinstance(stream, _Tolerant):
        return stream
    return cast(TextIO, _Tolerant(_unguarded(stream), name))


@contextlib.contextmanager
def guarded(*, outlives_reader: bool) -> Iterator[None]:
    """Guard `sys.stdout` and `sys.stderr`, and discard text that cannot be flushed.

    Otherwise the interpreter would exit with 120.

    Args:
        outlives_reader: ignore failures of standard output. Failures of standard error always are.
    """
    # First: the files below must not get the number of a standard stream.
    _open_closed_descriptors()
    before = sys.stdout, sys.stderr
    out, err = (stream or io.TextIOWrapper(io.FileIO(os.devnull, "w")) for stream in before)
    sys.stderr = tolerant(err, "standard error")
    sys.stdout = tolerant(out)
    if not outlives_reader:
        sys.stdout = cast(TextIO, _Result(_unguarded(out), "standard output"))
    try:
        yield
        # Within the guard: buffered text may fail only here.
        sys.stdout.flush()
    finally:
        for stream in (out, err):
            try:
                stream.flush()
            except (OSError, StorageError, SystemExit):  # already reported, or exiting
                silence(stream)
        sys.stdout, sys.stderr = before


def silence(stream: IO[Any]) -> None:
    """Discard further text of a stream, including its buffer."""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no descriptor
        descriptor = stream.fileno()
        # The descriptor itself: libraries in C print there, too.
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, descriptor)
        os.close(null)


def _unguarded(stream: IO[Any]) -> IO[Any]:
    return stream._stream if isinstance(stream, _Guarded) else stream


def _open_closed_descriptors() -> None:
    """Reserve descriptors 0 to 2, so that libraries do not print into files of the run."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def _why(error: OSError) -> str:
    return error.strerror or str(error)
