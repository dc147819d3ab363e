"""HTML page of runs: charts, with facts above them and tables below; `--watch` serves it."""

import errno
import hashlib
import json
import threading
from collections.abc import Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from jaxforge.cli.servers import BoundedServer, QuietHandler
from jaxforge.errors import UserError
from jaxforge.runs.metrics_file import NotYetError
from jaxforge.runs.reading import Run, readers
from jaxforge.tools.pages.parts import Pool, document, paragraphs
from jaxforge.tools.report import charts, goodput, tables
from jaxforge.tools.report.names import AXES


def page(runs: Sequence[Run], axis: str) -> str:
    """Return the page as a self-contained HTML document.

    Args:
        runs: the runs, whose curves are overlaid.
        axis: horizontal axis, a key of `AXES`.
    """
    facts, below, data = parts(runs)
    return document(title_of([run.name for run in runs]), facts, below, {**data, "axis": axis})


def title_of(names: Sequence[str]) -> str:
    """Return the title of a page of runs."""
    return ", ".join(names) if len(names) < 4 else f"{len(names)} runs"


def parts(runs: Sequence[Run]) -> tuple[str, str, dict[str, Any]]:
    """Return the parts of a page that change: HTML above and below the charts, and their data."""
    pool = Pool()
    with np.errstate(over="ignore", invalid="ignore"):  # values outside float32's range
        drawn, maps = charts.charts(runs, pool), charts.heat_maps(runs, pool)
        data = {
            "axes": AXES,
            "runs": [
                {"name": run.name, "along": charts.axis_values(run), "resumes": run.resumes,
                 "skips": charts.steps_with_skips(run)}
                for run in runs
            ],
            "charts": drawn,
            "maps": maps,
            "bands": charts.bands() if maps else [],
            "columns": pool.columns,
        }  # fmt: skip
        if not runs:
            return "", "", data
        above, below = tables.facts(runs) + goodput.bars(runs), tables.below(runs)
    messages = [message for run in runs for message in run.omissions]
    return above + paragraphs(messages), below, data


class LivePage:
    """Page of runs in their current state; updates read appended data only.

    Args:
        paths: run directories, which need not exist yet.
        axis: horizontal axis, a key of `AXES`.
    """

    def __init__(self, paths: Sequence[Path], axis: str) -> None:
        self._readers, self._axis, self._lock = readers(paths), axis, threading.Lock()

    def page(self) -> str:
        """Return the complete page."""
        parts = self.parts()
        data = {**parts["data"], "axis": self._axis, "watch": True, "version": parts["version"]}
        return document(parts["title"], parts["facts"], parts["below"], data, watch=True)

    def parts(self) -> dict[str, Any]:
        """Return title, facts, below and data of the page, and `version`, a hash of them."""
        with self._lock:
            runs, messages = [], []
            for reader in self._readers:
                try:
                    runs.append(reader.read())
                except NotYetError:
                    messages.append(f"{reader.name}: waiting for its first step")
                except UserError as error:
                    messages.append(f"{reader.name}: {error}")
        facts, below, data = parts(runs)
        title = title_of([reader.name for reader in self._readers])
        content = {
            "title": title, "facts": facts + paragraphs(messages), "below": below, "data": data,
        }  # fmt: skip
        version = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
        return content | {"version": version}


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
