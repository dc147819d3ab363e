"""HTTP server in threads, with a limit on connections."""

import socketserver
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from jaxforge.cli.bounded_threads import IDLE_SEC, BoundedThreads


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
