"""Transfer of replicas between the processes of a job over TCP.

    client                                     server
                                       <──     nonce (32 bytes)
    HMAC-SHA256(token, nonce + request),
    request (JSON with its length)     ──>
                                       <──     answer (JSON with its length): error, or ""
    put: data, manifest                ──>
                                       <──     answer
    get: nothing                       <──     the requested bytes, without a length

All processes of a job share a random token. A server knows three requests: `put` stores the two
files of a sender, `get` returns ranges of data, `manifest` returns a manifest. Paths are built from
numbers, so no other file can be requested.
"""

import hmac
import json
import logging
import secrets
import shutil
import socket
import socketserver
import struct
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.checkpoint.replica.store import BLOCK, Group, Manifest, Store

log = logging.getLogger(__name__)

TIMEOUT_SEC = 60.0
"""Time without progress of a connection after which it fails."""

_CONNECT_SEC = 10.0  # an unreachable peer must not delay training for long
_POLL_SEC = 0.1  # delay of `Server.close`
_NONCE = 32
_LENGTH = struct.Struct("!I")
_MAX_REQUEST, _MAX_MANIFEST = 1 << 20, 256 << 20  # bytes
_MAX_RANGES = 10_000  # per request


class Address(NamedTuple):
    """Address of the server of a process."""

    host: str
    port: int


class RefusedError(OSError):
    """An answer of the server with an error."""


class Server:
    """Server of the replicas that this host holds.

    Args:
        store: the replicas.
        host: address of this host in the network of the job.
        token: secret of the job.
    """

    def __init__(self, store: Store, host: str, token: bytes) -> None:
        self.store, self.token = store, token
        self.accepted: Collection[int] = ()
        family = socket.getaddrinfo(host, None)[0][0]
        listener = type("Listener", (_Listener,), {"address_family": family})
        self._listener = listener((host, 0), self)
        self.address = Address(host, self._listener.server_address[1])
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=[_POLL_SEC], name="replicas", daemon=True
        )
        self._thread.start()

    def accept(self, senders: Collection[int]) -> None:
        """Store files of these senders from now on; by default of none."""
        self.accepted = frozenset(senders)

    def close(self) -> None:
        """Stop to listen. Connections end on their own."""
        self._listener.shutdown()
        self._listener.server_close()


class _Listener(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 512

    def __init__(self, address: tuple[str, int], owner: Server) -> None:
        super().__init__(address, _Connection)
        self.owner = owner


class _Connection(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        """Answer a request."""
        self.request.settimeout(TIMEOUT_SEC)
        try:
            request = self._authenticated_request()
            if request is not None:
                self._answer(request)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("a transfer of a replica with %s failed: %s", self.client_address, error)

    def _authenticated_request(self) -> dict[str, Any] | None:
        nonce = secrets.token_bytes(_NONCE)
        self.request.sendall(nonce)
        digest = receive(self.request, _NONCE)
        content = _receive_message(self.request, _MAX_REQUEST)
        if not hmac.compare_digest(digest, _digest(self.server.owner.token, nonce, content)):
            return None
        return json.loads(content)

    def _answer(self, request: dict[str, Any]) -> None:
        group = Group.parse(str(request["group"]))
        if group is None:
            raise ValueError("the request names no group")
        sender, kind = int(request["sender"]), request["kind"]
        try:
            if kind == "put":
                self._put(group, sender, int(request["size"]))
                _send_message(self.request, b"")
            elif kind == "get":
                self._get(self.server.owner.store.data_path(group, sender), request["ranges"])
            elif kind == "manifest":
                path = self.server.owner.store.manifest_path(group, sender)
                self._get(path, [(0, path.stat().st_size)])
        except (ConnectionError, TimeoutError):
            raise
        except (OSError, ValueError) as error:
            log.warning("a request for replicas was refused (%s of process %d): %s",
                        kind, sender, error)  # fmt: skip
            _send_message(self.request, str(error).encode() or b"failed")

    def _get(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            if any(not 0 <= begin < end <= size for begin, end in ranges):
                raise ValueError(f"{path.name} has no such range")
            _send_message(self.request, b"")
            for begin, end in ranges:
                self.request.sendfile(file, begin, end - begin)

    def _put(self, group: Group, sender: int, size: int) -> None:
        owner, connection = self.server.owner, self.request
        if sender not in owner.accepted:
            raise ValueError(f"the files of process {sender} do not belong here")
        free = shutil.disk_usage(owner.store.directory).free
        if not 0 <= size <= free:
            raise OSError(f"{owner.store.directory} has {free:,} bytes free of {size:,}")
        _send_message(connection, b"")

        def blocks() -> Iterator[memoryview]:
            buffer = memoryview(bytearray(BLOCK))
            for begin in range(0, size, BLOCK):
                block = buffer[: min(BLOCK, size - begin)]
                receive_into(connection, block)
                yield block

        def describe(size: int, sums: list[int]) -> bytes:
            content = _receive_message(connection, _MAX_MANIFEST)
            manifest = Manifest.decode(content)
            if (manifest.size, manifest.block_crcs) != (size, sums):
                raise ValueError("the data changed in transfer")
            return content

        owner.store.write(group, sender, blocks(), describe)


def put(address: Address, token: bytes, group: Group, sender: int, store: Store) -> None:
    """Copy the two files of a sender to another host.

    Raises:
        OSError: the server refused, or the connection failed.
    """
    path = store.data_path(group, sender)
    size = path.stat().st_size
    with _request(address, token, kind="put", group=group.name, sender=sender, size=size) as to:
        with path.open("rb") as file:
            to.sendfile(file)
        _send_message(to, store.manifest_path(group, sender).read_bytes())
        _check_answer(to, address)


def get(
    address: Address,
    token: bytes,
    group: Group,
    sender: int,
    parts: Sequence[tuple[int, memoryview]],
) -> None:
    """Read ranges of a sender's data from another process.

    Args:
        address: the process.
        token: secret of the job.
        group: the save.
        sender: the process that saved.
        parts: first byte and target of each range.

    Raises:
        OSError: the server refused, or the connection failed.
    """
    for i in range(0, len(parts), _MAX_RANGES):
        some = parts[i : i + _MAX_RANGES]
        ranges = [(begin, begin + len(target)) for begin, target in some]
        with _request(
            address, token, kind="get", group=group.name, sender=sender, ranges=ranges
        ) as connection:
            for _, target in some:
                receive_into(connection, target)


def get_manifest(address: Address, token: bytes, group: Group, sender: int) -> Manifest:
    """Read a manifest from another process.

    Raises:
        OSError: the server refused, or the connection failed.
        ValueError: the manifest is damaged.
    """
    with _request(
        address, token, kind="manifest", group=group.name, sender=sender
    ) as connection, connection.makefile("rb") as file:  # fmt: skip
        return Manifest.decode(file.read(_MAX_MANIFEST))


def _request(address: Address, token: bytes, **request: Any) -> socket.socket:  # noqa: ANN401
    """Send a request; return the connection after a positive answer."""
    connection = socket.create_connection(address, timeout=_CONNECT_SEC)
    connection.settimeout(TIMEOUT_SEC)
    try:
        nonce, content = receive(connection, _NONCE), json.dumps(request).encode()
        connection.sendall(_digest(token, nonce, content))
        _send_message(connection, content)
        _check_answer(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


def _check_answer(connection: socket.socket, address: Address) -> None:
    error = _receive_message(connection, _MAX_REQUEST)
    if error:
        raise RefusedError(f"{address.host}:{address.port}: {error.decode(errors='replace')}")


def _digest(token: bytes, nonce: bytes, content: bytes) -> bytes:
    return hmac.digest(token, nonce + content, "sha256")


def _send_message(connection: socket.socket, content: bytes) -> None:
    connection.sendall(_LENGTH.pack(len(content)) + content)


def _receive_message(connection: socket.socket, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(receive(connection, _LENGTH.size))
    if length > limit:
        raise ValueError(f"a message of {length:,} bytes is too long")
    return receive(connection, length)


def receive(connection: socket.socket, size: int) -> bytes:
    """Return exactly `size` bytes of a connection.

    Raises:
        ConnectionError: the connection ended before.
    """
    buffer = bytearray(size)
    receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def receive_into(connection: socket.socket, target: memoryview) -> None:
    """Fill a buffer from a connection.

    Raises:
        ConnectionError: the connection ended before.
    """
    while target:
        size = connection.recv_into(target)
        if not size:
            raise ConnectionError("the connection ended early")
        target = target[size:]
