"""TCP and HTTP servers in threads, with a limit on connections of unknown clients."""

import contextlib
import socket
import socketserver
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
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

    # A hanging client must not delay the end of the process.
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
        # Dicts keep the order of insertion: the first is the oldest.
        oldest, began = next(iter(self._unproven.items()))
        if self._changed.wait_for(self._has_room, began + self.patience_sec - time.monotonic()):
            return True
        with contextlib.suppress(OSError):  # the connection may have ended
            oldest.shutdown(socket.SHUT_RDWR)
        return self._changed.wait_for(self._has_room, IDLE_SEC)


class BoundedServer(BoundedThreads, HTTPServer):
    """HTTP server that closes its oldest connection for a new one beyond the limit.

    Args:
        address: address and port to listen on; port 0: any free port.
        handler: class that answers requests.

    Raises:
        OSError: the port is taken.
        OverflowError: the port is not between 0 and 65535.
    """

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which may wait for a DNS server."""
        socketserver.TCPServer.server_bind(self)
        # `HTTPServer.server_bind` sets both, and handlers may read them.
        self.server_name, self.server_port = "localhost", self.port

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Print a traceback, except for clients that have disconnected."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """Port of the server."""
        return int(self.server_address[1])


class QuietHandler(BaseHTTPRequestHandler):
    """Base class of handlers that log no requests and close idle connections."""

    timeout = IDLE_SEC

    def answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        """Send a response.

        Args:
            status: status of the response.
            kind: value of Content-Type.
            body: content.
        """
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Suppress the log line of each request."""
