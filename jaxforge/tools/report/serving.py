"""Server of `--watch`: a live page of running jobs, for this machine only."""

import errno
import json
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from jaxforge.cli.http_server import BoundedServer, QuietHandler
from jaxforge.errors import UserError
from jaxforge.tools.report.run_page import LivePage

ADDRESS = "127.0.0.1"
_NAMES = (ADDRESS, "localhost")


class Server(BoundedServer):
    """HTTP server for this machine only, by name or by address.

    Args:
        live: the page to serve.
        port: port to listen on; 0: any free port.

    Raises:
        UserError: the port is taken.
    """

    def __init__(self, live: LivePage, port: int) -> None:
        self.live = live
        try:
            super().__init__((ADDRESS, port), ReportHandler)
        except (OSError, OverflowError) as error:
            is_taken = getattr(error, "errno", None) == errno.EADDRINUSE
            why = "is taken" if is_taken else f"cannot be served ({error})"
            raise UserError(f"port {port} {why}; name another: --watch PORT") from error


class ReportHandler(QuietHandler):
    """Answer requests of browsers for the page of a report."""

    server: Server

    def do_GET(self) -> None:
        """Send the page, or its data if they are newer than the client's."""
        try:
            self._get()
        except ConnectionError:
            raise
        except Exception:  # a bug; the terminal shows the traceback
            self._answer(HTTPStatus.INTERNAL_SERVER_ERROR, "text/plain", "failed: see the terminal")
            raise

    def _get(self) -> None:
        if self.headers.get("Host") not in {f"{name}:{self.server.port}" for name in _NAMES}:
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", "this page is for this machine alone")
            return  # DNS rebinding: a foreign host name may resolve to this machine
        url = urlsplit(self.path)
        if url.path == "/":
            self._answer(HTTPStatus.OK, "text/html", self.server.live.page())
        elif url.path == "/data.json":
            self._data(parse_qs(url.query).get("since", [""])[0])
        else:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "there is only /")

    def _data(self, since: str) -> None:
        parts = self.server.live.parts()
        if parts["version"] == since:
            self._answer(HTTPStatus.NO_CONTENT, "application/json", "")
        else:
            self._answer(HTTPStatus.OK, "application/json", json.dumps(parts))

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        self.answer(status, f"{kind}; charset=utf-8", text.encode())


def serve(paths: Sequence[Path], axis: str, port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        UserError: the port is taken.
    """
    with Server(LivePage(paths, axis), port) as server:
        try:
            print(f"http://{ADDRESS}:{server.port}/ is the page; Ctrl-C ends it", flush=True)
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended")
