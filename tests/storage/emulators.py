"""Local S3 and GCS servers with throttling.

S3 is moto's. The emulator of GCS serves Orbax, which uses the JSON API. It lacks the range of a
listing and the generation of a download, which are added here, and most of the XML API, which
jaxforge uses (`Xml`).
"""

import contextlib
import email.utils
import http.server
import io
import re
import threading
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from typing import BinaryIO
from urllib.parse import parse_qs, unquote, urlparse
from wsgiref.types import StartResponse, WSGIEnvironment
from xml.sax.saxutils import escape

import pytest

BUCKET = "bucket"

# What differs between services is tested in test_buckets.py and test_requests.py.
ONE_SERVICE = pytest.mark.parametrize(
    "server", ["s3", pytest.param("gs", marks=pytest.mark.slow)], indirect=True
)


class Server:
    """Attributes: `scheme`; `env`, which leads clients here; `requests` that were answered."""

    def __init__(self, scheme: str, env: dict[str, str]) -> None:
        self.scheme, self.env, self.requests = scheme, env, 0
        self.refused = self._every = self._cut = self._stalled = 0
        self.delay = 0.0
        self._until: int | None = None
        self._faults: list[int | str] = []
        self._n_faults = 0
        self._released = threading.Event()

    def url(self, key: str) -> str:
        return f"{self.scheme}://{BUCKET}/{key}"

    def throttle(self, every: int) -> None:
        """From now on every n-th request is refused with 503; 0 ends it."""
        self._every, self._until, self._faults = every, None, []
        self._cut = self._stalled = 0
        self.delay = 0.0
        self._released.set()

    def fail(self, every: int, faults: Iterable[int | str] = (503, 429, 500, "cut")) -> None:
        """From now on every n-th request meets the next of the faults; 0 ends it.

        A fault is a status, or "cut": an answer whose body ends in its middle.
        """
        self._every, self._until, self._faults = every, None, list(faults)

    def cut(self, answers: int) -> None:
        """Break off the bodies of the next answers to GET in their middle."""
        self._cut = answers

    def stall(self, requests: int) -> None:
        """Answer the next requests only after `throttle`."""
        self._released.clear()
        self._stalled = requests

    def cuts(self) -> bool:
        """Return whether the body of this answer is to be broken off."""
        self._cut -= 1
        return self._cut >= 0

    def forbid_after(self, requests: int) -> None:
        """Answer this many requests, then refuse each with 403 until `throttle`."""
        self._until = self.requests + requests

    def refusal(self) -> int | str | None:
        """The status of an answer that is no answer, or "cut"; None lets the request pass."""
        self.requests += 1
        time.sleep(self.delay)
        if self._stalled > 0:
            self._stalled -= 1
            self._released.wait()
        if self._until is not None and self.requests > self._until:
            return 403
        refuse = bool(self._every) and self.requests % self._every == 0
        self.refused += refuse
        if refuse and self._faults:
            self._n_faults += 1
            return self._faults[self._n_faults % len(self._faults)]
        return 503 if refuse else None


@contextlib.contextmanager
def s3() -> Iterator[Server]:
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    app = DomainDispatcherApplication(create_backend_app)

    def throttled(environ: WSGIEnvironment, start_response: StartResponse):
        status = server.refusal()
        if status == "cut":
            body = b"".join(app(environ, start_response))
            return [body[: len(body) // 2]]
        if status:
            start_response(f"{status} No", [("Content-Length", "0")])
            return [b""]
        answer = app(environ, start_response)
        if environ["REQUEST_METHOD"] == "GET" and server.cuts():
            body = b"".join(answer)
            return [body[: len(body) // 2]]
        return answer

    class Quiet(WSGIRequestHandler):
        def log_request(self, *args: object) -> None:
            pass

    httpd = make_server("127.0.0.1", 0, throttled, threaded=True, request_handler=Quiet)
    server = Server(
        "s3",
        {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{httpd.port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        },
    )
    with _serving(httpd):
        _request("PUT", f"{server.env['AWS_ENDPOINT_URL']}/{BUCKET}")
        yield server


@contextlib.contextmanager
def gcs() -> Iterator[Server]:
    from gcp_storage_emulator.server import RequestHandler, create_server

    storage = create_server("127.0.0.1", 0, in_memory=True, default_bucket=BUCKET)._storage
    listed, lock = storage.get_file_list, threading.Lock()

    class Handler(RequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(storage, *args)

        def parse_request(self) -> bool:
            if not super().parse_request():
                return False
            status = server.refusal()
            if status == "cut":
                self.wfile = _CutWriter(self.wfile)
                self.close_connection = True
                return True
            if status:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                self.send_error(status)
                return False
            return True

        def do_GET(self) -> None:
            if self.is_xml():
                Xml(self, storage).get(is_cut=server.cuts())
                return
            if self.is_beyond_end():
                self.send_error(416)
                return
            query = parse_qs(urlparse(self.path).query)
            first, last = query.get("startOffset", [""])[0], query.get("endOffset", [None])[0]

            def in_range(*args: object, **kwargs: object):
                files, prefixes = listed(*args, **kwargs)
                return [
                    file
                    for file in files
                    if file["name"] >= first and (last is None or file["name"] < last)
                ], prefixes

            whole = self.wfile
            if server.cuts():
                self.wfile, self.close_connection = io.BytesIO(), True
            with lock:
                storage.get_file_list = in_range
                super().do_GET()
            if self.wfile is not whole:
                head, _, body = self.wfile.getvalue().partition(b"\r\n\r\n")
                whole.write(head + b"\r\n\r\n" + body[: len(body) // 2])
                self.wfile = whole

        def is_beyond_end(self) -> bool:
            """Return whether the requested range begins after the object, as GCS checks."""
            name = unquote(urlparse(self.path).path.partition("/o/")[2])
            first = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
            if not name or not first:
                return False
            with lock, contextlib.suppress(Exception):  # there is no such object
                return int(first[1]) >= int(storage.get_file_obj(BUCKET, name)["size"])
            return False

        def do_POST(self) -> None:
            with lock:
                super().do_POST()

        def do_DELETE(self) -> None:
            if self.is_xml():
                Xml(self, storage).delete()
                return
            with lock:
                super().do_DELETE()

        def do_HEAD(self) -> None:
            Xml(self, storage).get()

        def do_PUT(self) -> None:
            if self.is_xml():
                Xml(self, storage).put()
                return
            with lock:
                super().do_PUT()

        def is_xml(self) -> bool:
            return urlparse(self.path).path.split("/")[1] == BUCKET

        def end_headers(self) -> None:
            name = unquote(urlparse(self.path).path.partition("/o/")[2])
            if self.command == "GET" and name:
                with contextlib.suppress(Exception):  # there is no such object
                    generation = storage.get_file_obj(BUCKET, name)["generation"]
                    self.send_header("x-goog-generation", generation)
            super().end_headers()

    class Listener(http.server.ThreadingHTTPServer):
        request_queue_size = 128  # clients open many connections at once

        def handle_error(self, *_: object) -> None:
            """Say nothing about clients that gave up."""

    httpd = Listener(("127.0.0.1", 0), Handler)
    port = httpd.server_address[1]
    server = Server("gs", {"TENSORSTORE_GCS_HTTP_URL": f"http://127.0.0.1:{port}"})
    with _serving(httpd):
        yield server


class Xml:
    """Requests of the XML API: `/bucket?list-type=2` and `/bucket/key`."""

    def __init__(self, handler: http.server.BaseHTTPRequestHandler, storage) -> None:
        self._handler, self._storage = handler, storage
        url = urlparse(handler.path)
        self._key = unquote(url.path.removeprefix(f"/{BUCKET}").lstrip("/"))
        self._query = {name: values[0] for name, values in parse_qs(url.query).items()}

    def get(self, *, is_cut: bool = False) -> None:
        if not self._key:
            self._answer(200, self._listing().encode(), {}, is_cut=is_cut)
            return
        try:
            about = self._storage.get_file_obj(BUCKET, self._key)
            data = self._storage.get_file(BUCKET, self._key)
        except Exception:  # there is no such object
            self._answer(404, b"", {})
            return
        updated = datetime.fromisoformat(about["updated"])
        headers = {
            "ETag": f'"{about["etag"]}"',
            "x-goog-generation": about["generation"],
            "Last-Modified": email.utils.format_datetime(updated, usegmt=True),
        }
        wanted = re.match(r"bytes=(\d+)-(\d*)", self._handler.headers.get("Range", ""))
        if not wanted:
            self._answer(200, data, headers, is_cut=is_cut)
            return
        first, end = int(wanted[1]), min(int(wanted[2] or len(data)) + 1, len(data))
        if first >= len(data):
            self._answer(416, b"", {})
            return
        headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
        self._answer(206, data[first:end], headers, is_cut=is_cut)

    def put(self) -> None:
        from gcp_storage_emulator.handlers.objects import _checksums, _make_object_resource

        data = self._handler.rfile.read(int(self._handler.headers["Content-Length"]))
        kind, size = "application/octet-stream", str(len(data))
        about = _checksums(data, _make_object_resource("", BUCKET, self._key, kind, size))
        self._storage.create_file(BUCKET, self._key, data, about)
        headers = {"ETag": f'"{about["etag"]}"', "x-goog-generation": about["generation"]}
        self._answer(200, b"", headers)

    def delete(self) -> None:
        try:
            self._storage.delete_file(BUCKET, self._key)
        except Exception:  # there is no such object
            self._answer(404, b"", {})
            return
        self._answer(204, b"", {})

    def _listing(self) -> str:
        files, prefixes = self._storage.get_file_list(
            BUCKET, self._query.get("prefix"), self._query.get("delimiter")
        )
        first = self._query.get("start-after", "")
        objects = "".join(
            f"<Contents><Key>{escape(file['name'])}</Key><Size>{file['size']}</Size>"
            f"<LastModified>{file['updated']}</LastModified>"
            f"<ETag>&quot;{file['etag']}&quot;</ETag></Contents>"
            for file in files
            if file["name"] > first
        )
        common = "".join(
            f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
            for prefix in prefixes
        )
        return f"<ListBucketResult>{objects}{common}</ListBucketResult>"

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str], *, is_cut: bool = False
    ) -> None:
        self._handler.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self._handler.send_header(name, value)
        http.server.BaseHTTPRequestHandler.end_headers(self._handler)
        if self._handler.command != "HEAD":
            self._handler.wfile.write(body[: len(body) // 2] if is_cut else body)
        if is_cut:
            self._handler.close_connection = True


class _CutWriter:
    """Connection that passes the headers of an answer and half of its body."""

    def __init__(self, wfile: BinaryIO) -> None:
        self._wfile, self._writes = wfile, 0

    def write(self, data: bytes) -> int:
        self._writes += 1
        self._wfile.write(data if self._writes == 1 else data[: len(data) // 2])
        return len(data)

    def __getattr__(self, name: str):
        return getattr(self._wfile, name)


@contextlib.contextmanager
def _serving(httpd: http.server.HTTPServer) -> Iterator[None]:
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        httpd.block_on_close = False  # clients keep connections that they do not use
        httpd.shutdown()
        httpd.server_close()


def _request(method: str, url: str) -> None:
    import urllib.request

    urllib.request.urlopen(urllib.request.Request(url, method=method)).close()
