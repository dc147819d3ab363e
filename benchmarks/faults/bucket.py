"""Local S3 server whose connections can be cut, for runs and data in a bucket.

Clients reach moto's server (`tests/storage/emulators.py`) through a relay. The relay refuses
connections while the bucket is gone; the server refuses, truncates and delays answers.
"""

import contextlib
import select
import shutil
import socket
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path

import boto3

from benchmarks.faults.case import Case
from jaxforge.storage import COMMITTED
from tests.storage import emulators

_PART = 1 << 16


class Relay:
    """TCP relay to a port of this machine.

    Attributes:
        port: port of the relay.
    """

    def __init__(self, target: int) -> None:
        self._target, self._lock = target, threading.Lock()
        self._connections: set[socket.socket] = set()
        self._server: socketserver.ThreadingTCPServer | None = None
        self.port = 0
        self.open()

    def open(self) -> None:
        """Accept connections."""
        if self._server:
            return
        relay = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    relay._pass_on(self.request)

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address, daemon_threads, request_queue_size = True, True, 128

        self._server = Server(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=[0.05], daemon=True).start()

    def close(self) -> None:
        """Break all connections and refuse new ones."""
        if self._server is None:
            return
        self._server.shutdown()
        self._server.block_on_close = False
        self._server.server_close()
        self._server = None
        with self._lock:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)

    def _pass_on(self, client: socket.socket) -> None:
        with socket.create_connection(("127.0.0.1", self._target)) as server:
            other = {client: server, server: client}
            with self._lock:
                self._connections |= other.keys()
            try:
                while True:
                    for source in select.select([client, server], [], [])[0]:
                        data = source.recv(_PART)
                        if not data:
                            return
                        other[source].sendall(data)
            finally:
                with self._lock:
                    self._connections -= other.keys()


class Bucket:
    """Bucket of a case.

    Args:
        case: the case.
        server: the server.

    Attributes:
        server: the server, whose answers may fail.
    """

    def __init__(self, case: Case, server: emulators.Server) -> None:
        endpoint = server.env["AWS_ENDPOINT_URL"]
        self.server, self._case = server, case
        self._relay = Relay(int(endpoint.rpartition(":")[2]))
        self._client = boto3.client(
            "s3", endpoint_url=endpoint, region_name="us-east-1", aws_access_key_id="id",
            aws_secret_access_key="secret",
        )  # fmt: skip
        address = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._relay.port}"}
        case.run.environment |= server.env | address
        self._prefix = "".join(c if c.isalnum() else "-" for c in case.name)

    def url(self, name: str) -> str:
        """Return the URL of a directory."""
        return self.server.url(f"{self._prefix}/{name}")

    def upload(self, directory: Path, name: str) -> None:
        """Copy a directory into the bucket."""
        for path in directory.rglob("*"):
            if path.is_file():
                key = f"{self._prefix}/{name}/{path.relative_to(directory).as_posix()}"
                self._client.put_object(Bucket=emulators.BUCKET, Key=key, Body=path.read_bytes())

    def hold_run(self) -> None:
        """Let the run of the case be in the bucket."""
        self._case.run.location = self.url("run")
        self._case.run.fetch = self._fetch

    def vanish(self) -> None:
        """Break all connections and refuse new ones."""
        self._relay.close()

    def mend(self) -> None:
        """End all faults."""
        self._relay.open()
        self.server.throttle(0)

    def close(self) -> None:
        """End the relay."""
        self._relay.close()

    def _fetch(self) -> None:
        """Mend the bucket, and copy the run into its local directory."""
        self.mend()
        shutil.rmtree(self._case.run.directory, ignore_errors=True)
        prefix = f"{self._prefix}/run/"
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=emulators.BUCKET, Prefix=prefix
        )
        for entry in (entry for page in pages for entry in page.get("Contents", ())):
            path = self._case.run.directory / entry["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            body = self._client.get_object(Bucket=emulators.BUCKET, Key=entry["Key"])["Body"]
            path.write_bytes(body.read())
        for step in self._case.run.checkpoints.glob("step_*"):
            if not (step / COMMITTED).exists():
                step.rename(step.with_name(f"{step.name}.orbax-checkpoint-tmp"))


@contextlib.contextmanager
def bucket_of(case: Case) -> Iterator[Bucket]:
    """Yield a bucket for a case."""
    with emulators.s3() as server, contextlib.closing(Bucket(case, server)) as bucket:
        yield bucket
        bucket.mend()
