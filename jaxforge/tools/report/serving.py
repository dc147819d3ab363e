"""`--watch`: the page of runs that go on, served to this machine alone."""

import contextlib
import errno
import hashlib
import json
import socket
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from jaxforge.errors import UserError
from jaxforge.runs.reading import NotYetError, readers
from jaxforge.tools.pages.parts import document, paragraphs
from jaxforge.tools.report import run_page
from jaxforge.tools.report.names import AXES

ADDRESS = "127.0.0.1"
_CONNECTIONS = 64  # at a time; each has a thread
_SECONDS = 10  # that a connection may say nothing


class LivePage:
    """Runs in their current state; only appended data are read again.

    Args:
        paths: run directories, which need not exist yet.
        axis: as of `run_page.page`.
    """

    def __init__(self, paths: Sequence[Path], axis: str) -> None:
        self._readers, self._axis, self._lock = readers(paths), axis, threading.Lock()

    def page(self) -> str:
        """The whole page."""
        parts = self.parts()
        data = {**parts["data"], "axis": self._axis, "watch": True, "version": parts["version"]}
        return document(parts["title"], data, parts["facts"], parts["below"], watch=True)

    def parts(self) -> dict[str, Any]:
        """`run_page.parts`, with its `title` and a `version`, which changes when anything does."""
        with self._lock:
            runs, said = [], []
            for reader in self._readers:
                try:
                    runs.append(reader.read())
                except NotYetError:
                    said.append(f"{reader.name}: waiting for its first step")
                except UserError as error:
                    said.append(f"{reader.name}: {error}")
        parts = run_page.parts(runs) if runs else _NOTHING
        facts = parts["facts"] + paragraphs(said)
        parts = {
            **parts,
            "facts": facts,
            "title": run_page.title_of([r.name for r in self._readers]),
        }
        return parts | {"version": hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]}


_NOTHING: dict[str, Any] = {
    "facts": "",
    "below": "",
    "data": {"axes": AXES, "runs": [], "charts": [], "maps": [], "bands": [], "columns": []},
}


class Server(ThreadingHTTPServer):
    """Answers this machine alone, by name as by address.

    Args:
        live: what it shows.
        port: 0 takes any.

    Raises:
        UserError: the port is taken.
    """

    daemon_threads = True
    request_queue_size = _CONNECTIONS

    def __init__(self, live: LivePage, port: int) -> None:
        self.live = live
        self._open: list[Any] = []  # connections, the oldest first
        self._slots = threading.BoundedSemaphore(_CONNECTIONS)
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            taken = getattr(error, "errno", None) == errno.EADDRINUSE
            why = "is taken" if taken else f"cannot be served ({error})"
            raise UserError(f"port {port} {why}; name another: --watch PORT") from error

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Answer in a thread. Where there are too many, the oldest connection is closed."""
        if not self._slots.acquire(blocking=False):
            with contextlib.suppress(OSError, IndexError):  # it may have ended by now
                self._open[0].shutdown(socket.SHUT_RDWR)
            if not self._slots.acquire(timeout=_SECONDS):
                super().shutdown_request(request)
                return
        self._open.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401
        """End a connection, and let another take its place."""
        super().shutdown_request(request)
        self._open.remove(request)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Print a traceback, but of a reader that went away nothing."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)

    @property
    def port(self) -> int:
        """Port of the server."""
        return int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = _SECONDS

    def do_GET(self) -> None:
        """Answer with the page, or with its data if they are newer than what the reader has."""
        try:
            self._get()
        except ConnectionError:
            raise
        except Exception:  # our own mistake: the terminal has its traceback
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", "failed: see the terminal")
            raise

    def _get(self) -> None:
        if self.headers.get("Host") not in {f"{name}:{self.server.port}" for name in _NAMES}:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine alone")
            return  # another site's name may have been made to point here
        where = urlsplit(self.path)
        if where.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.live.page())
        elif where.path == "/data.json":
            self._data(parse_qs(where.query).get("since", [""])[0])
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only /")

    def _data(self, since: str) -> None:
        parts = self.server.live.parts()
        if parts["version"] == since:
            self._answer(HTTPStatus.NO_CONTENT, "application/json", "")
        else:
            self._answer(HTTPStatus.OK, "application/json", json.dumps(parts))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing of each request."""


_NAMES = (ADDRESS, "localhost")


def serve(paths: Sequence[Path], axis: str, port: int) -> None:
    """Serves until Ctrl-C.

    Raises:
        UserError: the port is taken.
    """
    with Server(LivePage(paths, axis), port) as server:
        try:
            print(f"http://{ADDRESS}:{server.port}/ is the page; Ctrl-C ends it", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended")
