"""Transfer of replicas between the processes of a job over TCP.

    client                     server
    request (JSON)      ──>
                        <──    answer: error, or ""
    put: data           ──>
         manifest       ──>
                        <──    answer
    get:                <──    data
    manifest:           <──    manifest

All processes of a job share a random token, which each frame proves (`cli.authenticated`); data
are bytes without a frame. A server knows three requests: `put` stores the two files of a sender,
`get` returns ranges of data, `manifest` returns a manifest. Paths are built from numbers, so no
other file can be requested. Connections without the token are few, and end within seconds.
"""

import contextlib
import json
import logging
import shutil
import socket
import socketserver
import threading
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxforge.checkpoint.replica.store import BLOCK, Group, Manifest, Store
from jaxforge.cli.authenticated import Channel
from jaxforge.cli.servers import PATIENCE_SEC, BoundedThreads
from jaxforge.storage.untrusted_json import load_object

log = logging.getLogger(__name__)

TIMEOUT_SEC = 60.0
"""Time without progress of a connection after which it fails."""

_CONNECT_SEC = 10.0  # an unreachable peer must not delay training for long
_POLL_SEC = 0.1  # delay of `Server.close`
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


class _Listener(BoundedThreads, socketserver.TCPServer):
    request_queue_size = 512
    patience_sec = PATIENCE_SEC

    def __init__(self, address: tuple[str, int], owner: Server) -> None:
        super().__init__(address, _Connection)
        self.owner = owner


class _Connection(socketserver.BaseRequestHandler):
    server: _Listener

    def handle(self) -> None:
        """Answer a request."""
        try:
            self._channel = Channel(self.request, self.server.owner.token, is_client=False)
            request = load_object(self._channel.receive(_MAX_REQUEST), "a request")
            self.server.note_proof(self.request)
            self._channel.extend(TIMEOUT_SEC)
            self._answer(request)
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.debug("a transfer of a replica with %s failed: %s", self.client_address, error)

    def _answer(self, request: dict[str, Any]) -> None:
        group = Group.parse(str(request["group"]))
        if group is None:
            raise ValueError("the request names no group")
        sender, kind = int(request["sender"]), request["kind"]
        try:
            if kind == "put":
                self._put(group, sender, int(request["size"]))
                self._channel.send(b"")
            elif kind == "get":
                self._get(self.server.owner.store.data_path(group, sender), request["ranges"])
            elif kind == "manifest":
                content = self.server.owner.store.manifest_path(group, sender).read_bytes()
                self._channel.send(b"")
                self._channel.send(content)
        except (ConnectionError, TimeoutError):
            raise  # nobody is left to answer
        except (OSError, ValueError) as error:
            log.warning("a request for replicas was refused (%s of process %d): %s",
                        kind, sender, error)  # fmt: skip
            self._channel.send(str(error).encode() or b"failed")

    def _get(self, path: Path, ranges: Sequence[tuple[int, int]]) -> None:
        with path.open("rb") as file:
            size = path.stat().st_size
            if any(not 0 <= begin < end <= size for begin, end in ranges):
                raise ValueError(f"{path.name} has no such range")
            self._channel.send(b"")
            for begin, end in ranges:
                self.request.sendfile(file, begin, end - begin)

    def _put(self, group: Group, sender: int, size: int) -> None:
        owner, channel = self.server.owner, self._channel
        if sender not in owner.accepted:
            raise ValueError(f"the files of process {sender} do not belong here")
        # Refused before the data are sent: a full tmpfs could end processes of this host.
        free = shutil.disk_usage(owner.store.directory).free
        if not 0 <= size <= free:
            raise OSError(f"{owner.store.directory} has {free:,} bytes free of {size:,}")
        channel.send(b"")

        def blocks() -> Iterator[memoryview]:
            buffer = memoryview(bytearray(BLOCK))
            for begin in range(0, size, BLOCK):
                block = buffer[: min(BLOCK, size - begin)]
                channel.read_into(block)
                yield block

        def describe(size: int, sums: list[int]) -> bytes:
            content = channel.receive(_MAX_MANIFEST)
            manifest = Manifest.decode(content)
            # The sender summed what it copied from its devices, this host what has arrived.
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
            to.connection.sendfile(file)
        to.send(store.manifest_path(group, sender).read_bytes())
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
        ) as channel:
            for _, target in some:
                channel.read_into(target)


def get_manifest(address: Address, token: bytes, group: Group, sender: int) -> Manifest:
    """Read a manifest from another process.

    Raises:
        OSError: the server refused, or the connection failed.
        ValueError: the manifest is damaged.
    """
    with _request(address, token, kind="manifest", group=group.name, sender=sender) as channel:
        return Manifest.decode(channel.receive(_MAX_MANIFEST))


@contextlib.contextmanager
def _request(address: Address, token: bytes, **request: Any) -> Iterator[Channel]:  # noqa: ANN401
    """Send a request; yield the channel after a positive answer."""
    with socket.create_connection(address, timeout=_CONNECT_SEC) as connection:
        channel = Channel(connection, token, is_client=True, seconds=TIMEOUT_SEC)
        channel.send(json.dumps(request).encode())
        _check_answer(channel, address)
        channel.extend(TIMEOUT_SEC)
        yield channel


def _check_answer(channel: Channel, address: Address) -> None:
    error = channel.receive(_MAX_REQUEST)
    if error:
        raise RefusedError(f"{address.host}:{address.port}: {error.decode(errors='replace')}")
