"""Distinction of storage that does not answer from damaged checkpoints."""

import errno
import re
from collections.abc import Iterator

from jaxforge.errors import FAILING_STORAGE

_ERRNOS = FAILING_STORAGE | {errno.ENOMEM, errno.EMFILE, errno.ENFILE}
_STATUSES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "ABORTED", "CANCELLED", "RESOURCE_EXHAUSTED")
_OS_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")  # in messages of tensorstore


def is_storage_failure(error: BaseException) -> bool:
    """Return whether a read failed because of the storage: its content may be sound."""
    return any(map(_is_failure, _causes(error)))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error:
        yield error
        error = error.__cause__ or error.__context__


def _is_failure(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _ERRNOS
    text = str(error)
    code = _OS_ERROR.search(text)
    return text.startswith(_STATUSES) or (code is not None and int(code[1]) in _ERRNOS)
