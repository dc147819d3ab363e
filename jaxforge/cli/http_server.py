"""HTTP server in threads, with a limit on connections."""

import contextlib
import socket
import socketserver
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CONNECTIONS = 64
"""Concurrent connections; each has a thread."""
IDLE_SEC = 10
"""Timeout of an idle connection."""


class BoundedServer(ThreadingHTTPServer):
    """HTTP server that closes its oldest connection for a new one beyond the limit.

    Args:
        address: address and port to listen on; port 0: any free port.
        handler: class that answers requests.

    Raises:
        OSError: the port is taken.
        OverflowError: the port is not between 0 and 65535.
    """

    daemon_threads = True
    request_queue_size = CONNECTIONS

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: list[Any] = []  # connections, the oldest first
        self._slots = threading.BoundedSemaphore(CONNECTIONS)
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Bind without looking up the name of the host, which may wait for a DNS server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = "localhost", self.port

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Handle a request in a thread; beyond the limit, the oldest connection is closed."""
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError, IndexError):  # the connection may have ended
                self._open[0].shutdown(socket.SHUT_RDWR)
            if not self._slots.acquire(timeout=IDLE_SEC):
                super().shutdown_request(request)
                return
        self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        """Close a connection and release its slot."""
        super().shutdown_request(request)
        self._open.remove(request)
        self._slots.release()

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
