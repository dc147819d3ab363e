"""Processes of a job, the peer of each, and the transfer of replicas between them over TCP.

    client                     server
    request (JSON)      ──>
                        <──    answer: error, or ""
    put: manifest       ──>
         data           ──>
                        <──    answer
    get:                <──    data

All processes of a job share a random token, which each frame proves (`cli.authenticated`); data
are bytes without a frame. A server knows two requests: `put` stores the two files of a sender, and
`get` returns a range of data. Paths are built from numbers, so no other file can be requested.
Connections without the token are few, and end within seconds.

A host is a directory of replicas: processes that see the same directory are on the same host. The
failure domain of a host (a rack, a slice, a power supply) is the environment variable
`JAXFORGE_FAILURE_DOMAIN`; by default each host is a domain of its own.
"""

import contextlib
import json
import logging
import os
import shutil
import socket
import socketserver
import threading
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from jaxforge.checkpoint.replica.store import BLOCK, Group, Manifest, Store
from jaxforge.cli.authenticated import Channel
from jaxforge.cli.servers import PATIENCE_SEC, BoundedThreads
from jaxforge.parallel import agreement, multihost
from jaxforge.storage.untrusted_json import load_object

log = logging.getLogger(__name__)

DOMAIN = "JAXFORGE_FAILURE_DOMAIN"
TIMEOUT_SEC = 60.0
"""Time without progress of a connection after which it fails."""

_CONNECT_SEC = 10.0  # an unreachable peer must not delay training for long
_POLL_SEC = 0.1  # delay of `Server.close`
_MAX_REQUEST, _MAX_MANIFEST = 1 << 20, 256 << 20  # bytes
_EXTERNAL = "192.0.2.1"  # reserved for documentation: takes the default route


class Address(NamedTuple):
    """Address of the server of a process."""

    host: str
    port: int


class Process(NamedTuple):
    """A process of the job.

    Attributes:
        host: its host (`Store.identity`).
        domain: the failure domain of the host.
        address: address of its server.
    """

    host: str
    domain: str
    address: Address


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
        # `TCPServer` is IPv4 unless its class says otherwise.
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
                self._put(group, sender)
                self._channel.send(b"")
            elif kind == "get":
                path = self.server.owner.store.data_path(group, sender)
                self._get(path, request["begin"], request["size"])
        except (ConnectionError, TimeoutError):
            raise  # nobody is left to answer
        except (OSError, ValueError) as error:
            log.warning("a request for replicas was refused (%s of process %d): %s",
                        kind, sender, error)  # fmt: skip
            self._channel.send(str(error).encode() or b"failed")

    def _get(self, path: Path, begin: int, size: int) -> None:
        with path.open("rb") as file:
            if not 0 <= begin <= begin + size <= path.stat().st_size:
                raise ValueError(f"{path.name} has no such range")
            self._channel.send(b"")
            if size:  # `sendfile` takes 0 as everything
                self.request.sendfile(file, begin, size)

    def _put(self, group: Group, sender: int) -> None:
        owner, channel = self.server.owner, self._channel
        if sender not in owner.accepted:
            raise ValueError(f"the files of process {sender} do not belong here")
        channel.send(b"")
        content = channel.receive(_MAX_MANIFEST)
        manifest = Manifest.decode(content)
        # Refused before the data are sent: a full tmpfs could end processes of this host.
        free = shutil.disk_usage(owner.store.directory).free
        if manifest.size > free:
            raise OSError(f"{owner.store.directory} has {free:,} bytes free of {manifest.size:,}")
        channel.send(b"")

        def blocks() -> Iterator[memoryview]:
            buffer = memoryview(bytearray(BLOCK))
            for shard in manifest.shards:
                crc = 0
                for begin in range(0, shard.nbytes, BLOCK):
                    block = buffer[: min(BLOCK, shard.nbytes - begin)]
                    channel.read_into(block)
                    crc = zlib.crc32(block, crc)
                    yield block
                # The sender summed what it copied from its devices, this host what has arrived.
                if crc != shard.crc:
                    raise ValueError("the data changed in transfer")

        owner.store.write(group, sender, blocks(), lambda: content)


def put(address: Address, token: bytes, group: Group, sender: int, store: Store) -> None:
    """Copy the two files of a sender to another host.

    Raises:
        OSError: the server refused, or the connection failed.
    """
    with _request(address, token, kind="put", group=group.name, sender=sender) as channel:
        channel.send(store.manifest_path(group, sender).read_bytes())
        _check_answer(channel, address)
        with store.data_path(group, sender).open("rb") as file:
            channel.connection.sendfile(file)
        _check_answer(channel, address)


def get(
    address: Address, token: bytes, group: Group, sender: int, begin: int, target: memoryview
) -> None:
    """Read a range of a sender's data from another process.

    Args:
        address: the process.
        token: secret of the job.
        group: the save.
        sender: the process that saved.
        begin: first byte of the range.
        target: memory for the bytes of the range.

    Raises:
        OSError: the server refused, or the connection failed.
    """
    request = {"group": group.name, "sender": sender, "begin": begin, "size": len(target)}
    with _request(address, token, kind="get", **request) as channel:
        channel.read_into(target)


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


def gather(value: Any) -> list[Any]:  # noqa: ANN401 (any JSON)
    """Return the JSON value of each process, in order. Every process must call this function."""
    text = json.dumps(value)
    texts = agreement.gather(text) if jax.process_count() > 1 else [text]
    return [json.loads(other) for other in texts]


def choose_peers(processes: Sequence[Process]) -> list[int | None]:
    """Return the process that holds the second copy of each process's files; None without one.

    The peer's host is half the ring of hosts away, where hosts of a domain are neighbours. So each
    host is the peer of one host, and in another domain, if no domain has more than half the hosts.
    """
    domains = list(dict.fromkeys(process.domain for process in processes))
    hosts = {process.host: process.domain for process in processes}
    ring = sorted(hosts, key=lambda host: domains.index(hosts[host]))
    members = {
        host: [i for i, process in enumerate(processes) if process.host == host] for host in ring
    }
    # Hosts are ordered by domain, so that neighbours in the ring share their domain.
    peers: list[int | None] = []
    for index, process in enumerate(processes):
        position = ring.index(process.host)
        # Half a ring away: the loss of neighbours (a rack) takes one of two copies at most.
        opposite = position + len(ring) // 2
        candidates = [ring[(opposite + i) % len(ring)] for i in range(len(ring))]
        host = next((host for host in candidates if hosts[host] != process.domain), None)
        # The processes of a host spread over those of the peer, so that each serves as many.
        rank = members[process.host].index(index)
        peers.append(None if host is None else members[host][rank % len(members[host])])
    return peers


def address_in_job(env: Mapping[str, str] = os.environ) -> str:
    """Return the address of this host in the network of the job. Every process must call this.

    It is the address from which process 0 is reached. If a scheduler has started the job, it is
    that of the default route, or else of the host's name.
    """
    arguments = multihost.distributed_arguments(env) or {}
    if "coordinator_address" in arguments:
        host = arguments["coordinator_address"].rpartition(":")[0].strip("[]")
    else:
        host = _EXTERNAL if _is_reachable(_EXTERNAL) else socket.gethostname()
    addresses = gather(_source_address(host))
    reachable = [address for address in addresses if not _is_loopback(address)]
    address = addresses[jax.process_index()]
    # The name of a host is often its loopback address on the host itself.
    return _source_address(reachable[0]) if reachable and _is_loopback(address) else address


def _source_address(host: str) -> str:
    """Return the address of this host from which another host is reached; nothing is sent."""
    family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as connection:
        # UDP: chooses a route and sends nothing.
        connection.connect(address)
        return connection.getsockname()[0]


def _is_reachable(host: str) -> bool:
    try:
        _source_address(host)
    except OSError:
        return False
    return True


def _is_loopback(address: str) -> bool:
    return address == "::1" or address.startswith("127.")
