"""Threads of a TCP server for clients that anyone may be, with a limit on their number."""

import contextlib
import socket
import socketserver
import threading
import time
from typing import Any, Final

CONNECTIONS = 64
"""Concurrent connections of clients that have proven nothing; each has a thread."""
IDLE_SEC: Final = 10
"""Timeout of an idle connection of such a client."""
PATIENCE_SEC: Final = 1.0
"""Time for a process of a job to prove that it knows the secret, while other connections wait."""


class BoundedThreads(socketserver.ThreadingMixIn):
    """Mixin of TCP servers that closes the oldest unproven connection for a new one beyond a limit.

    Strangers can therefore neither exhaust the memory and file descriptors of the process, nor
    keep clients of the job out for long.

    Attributes:
        patience_sec: time in which a connection is not closed for a new one, which waits.
    """

    daemon_threads = True
    block_on_close = False
    request_queue_size = CONNECTIONS
    patience_sec = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        self._unproven: dict[Any, float] = {}  # connection -> time of its start, the oldest first
        self._changed = threading.Condition()
        super().__init__(*args, **kwargs)

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Handle a connection in a thread, if there is room."""
        with self._changed:
            if not self._make_room():
                super().shutdown_request(request)  # type: ignore[misc]
                return
            self._unproven[request] = time.monotonic()
        super().process_request(request, client_address)

    def note_proof(self, request: Any) -> None:  # noqa: ANN401
        """Exempt a connection from the limit: its client belongs to the job."""
        with self._changed:
            self._unproven.pop(request, None)
            self._changed.notify_all()

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        """Close a connection."""
        super().shutdown_request(request)  # type: ignore[misc]
        self.note_proof(request)

    def _has_room(self) -> bool:
        return len(self._unproven) < CONNECTIONS

    def _make_room(self) -> bool:
        """Close the oldest connection, if necessary; return whether there is room."""
        if self._has_room():
            return True
        oldest, began = next(iter(self._unproven.items()))
        if self._changed.wait_for(self._has_room, began + self.patience_sec - time.monotonic()):
            return True
        with contextlib.suppress(OSError):  # the connection may have ended
            oldest.shutdown(socket.SHUT_RDWR)
        return self._changed.wait_for(self._has_room, IDLE_SEC)
