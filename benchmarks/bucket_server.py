"""S3 server of a local directory with latency and failures, for measurements.

    python benchmarks/bucket_server.py DIRECTORY --delay 0.05 --failures 0.01

Prints its port. The server answers GET (with ranges), HEAD and listings of any bucket. Each answer
is delayed, and a share of the answers to GET is 503. All answers together are limited to
`--bandwidth` megabytes per second.

Not in `make bench`: no benchmark.
"""

import argparse
import asyncio
import random
import re
import time
from datetime import UTC, datetime
from email.utils import format_datetime, formatdate
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

_REASONS = {200: "OK", 206: "Partial Content", 404: "Not Found", 416: "Range Not Satisfiable",
            503: "Slow Down"}  # fmt: skip
_PART = 1 << 20  # bytes
_MODIFIED = datetime(2026, 1, 1, tzinfo=UTC)


class BucketServer:
    """Server of the files of a directory.

    Args:
        directory: the files; names below it are keys.
        delay: seconds before each answer.
        failures: share of GET requests that are answered with 503.
        bandwidth: bytes per second of all answers together; 0 is unlimited.
    """

    def __init__(
        self, directory: Path, delay: float, failures: float, bandwidth: float = 0.0
    ) -> None:
        self._directory, self._delay, self._failures = directory, delay, failures
        self._bandwidth, self._free_at = bandwidth, 0.0
        self._random = random.Random(0)

    async def serve(self) -> None:
        """Serve on a free port and print it."""
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, backlog=512)
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                method, target, _ = head.split(" ", 2)
                span = re.search(r"(?im)^range: bytes=(\d+)-(\d*)", head)
                await asyncio.sleep(self._delay)
                answer = self._answer(method, target, span)
                if method == "HEAD":
                    answer = answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
                await self._send(writer, answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def _send(self, writer: asyncio.StreamWriter, answer: bytes) -> None:
        for start in range(0, len(answer), _PART):
            part = answer[start : start + _PART]
            if self._bandwidth:
                now = time.monotonic()
                self._free_at = max(self._free_at, now) + len(part) / self._bandwidth
                await asyncio.sleep(self._free_at - now)
            writer.write(part)
            await writer.drain()

    def _answer(self, method: str, target: str, span: re.Match[str] | None) -> bytes:
        parts = urlsplit(target)
        query = parse_qs(parts.query)
        if method == "GET" and self._random.random() < self._failures:
            return _response(503, b"")
        if "list-type" in query:
            return _response(200, self._listing(query.get("prefix", [""])[0]))
        key = unquote(parts.path).lstrip("/").partition("/")[2]
        path = self._directory / key
        if not key:
            return _response(200, b"", **{"x-amz-bucket-region": "us-east-1"})
        if not path.is_file():
            return _response(404, b"")
        size = path.stat().st_size
        if span is None:
            return _response(200, path.read_bytes())
        first, last = int(span[1]), min(int(span[2] or size), size - 1)
        if first >= size:
            return _response(416, b"")
        with path.open("rb") as file:
            file.seek(first)
            body = file.read(last - first + 1)
        return _response(206, body, **{"Content-Range": f"bytes {first}-{last}/{size}"})

    def _listing(self, prefix: str) -> bytes:
        keys = sorted(
            path.relative_to(self._directory).as_posix()
            for path in self._directory.rglob("*") if path.is_file()
        )  # fmt: skip
        listed = "".join(
            f"<Contents><Key>{escape(key)}</Key><ETag>1</ETag>"
            f"<Size>{(self._directory / key).stat().st_size}</Size>"
            f"<LastModified>{_MODIFIED.isoformat()}</LastModified></Contents>"
            for key in keys if key.startswith(prefix)
        )  # fmt: skip
        return (f"<ListBucketResult><IsTruncated>false</IsTruncated>{listed}"
                "</ListBucketResult>").encode()  # fmt: skip


def _response(status: int, body: bytes, **headers: str) -> bytes:
    headers = {"Content-Length": str(len(body)), "ETag": '"1"', "Date": formatdate(usegmt=True),
               "Last-Modified": format_datetime(_MODIFIED, usegmt=True), **headers}  # fmt: skip
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {status} {_REASONS[status]}\r\n{lines}\r\n".encode() + body


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    parser.add_argument("--failures", type=float, default=0.0, help="share of GETs with 503")
    parser.add_argument("--bandwidth", type=float, default=0.0, help="MB/s; 0: unlimited")
    args = parser.parse_args()
    server = BucketServer(args.directory, args.delay, args.failures, args.bandwidth * 1e6)
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()
