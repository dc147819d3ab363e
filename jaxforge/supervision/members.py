"""Exchange of statuses between the hosts of an elastic job, over TCP.

Every host connects to every other one each `BEAT_SEC`, sends its status as a frame and reads the
other's status. A host is alive while its status arrives. It is silent after a timeout, which also
means that it may be stopped, or cut off from this host. It is gone if its machine refuses
connections: then its supervisor, and with it all its processes, have ended.

Each frame proves that its sender knows the job's key, which is never sent (`cli.authenticated`): a
hash of a shared secret, so that jobs on the same machines cannot confuse each other's hosts. A
stranger at the port of a host, or at the address of one that has ended, learns and changes nothing.
Commands never travel: a host only runs its own command line.
"""

import dataclasses
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Sequence

from jaxforge.cli.authenticated import Channel
from jaxforge.cli.servers import PATIENCE_SEC, BoundedThreads
from jaxforge.errors import UserError
from jaxforge.supervision.rosters import Status, View

log = logging.getLogger("jaxforge.supervise")

BEAT_SEC = 1.0
"""Seconds between two messages to a host."""

_ANSWER_SEC = 5.0  # until an exchange of statuses counts as lost, however slowly bytes arrive
_REFUSALS = 3  # in a row until a host counts as gone: its supervisor may be restarting
_MESSAGE_BYTES = 1 << 16


@dataclasses.dataclass
class _Peer:
    """Another host.

    Attributes:
        address: host name and port of its supervisor.
        status: its latest status; None before the first one.
        heard: when that arrived, by `time.monotonic`.
        refusals: connections in a row that its machine refused.
    """

    address: tuple[str, int]
    status: Status | None = None
    heard: float = 0.0
    refusals: int = 0


class Members:
    """The hosts of a job, as far as this host hears them.

    Args:
        addresses: address of each host, as "name:port".
        key: secret of the job.
        timeout: seconds without a status after which a host is silent.
        status: returns the status of this host.

    Raises:
        UserError: an address is wrong, or the port of this host is in use.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        host: int,
        key: str,
        timeout: float,
        status: Callable[[], Status],
    ) -> None:
        self._key, self._timeout, self._status = key.encode(), timeout, status
        self._host, self._n_hosts = host, len(addresses)
        # All hosts have the same list, so that an index names the same host everywhere.
        parsed = [parse_address(address) for address in addresses]
        self.name = parsed[host][0]
        self._peers = {i: _Peer(address) for i, address in enumerate(parsed) if i != host}
        self._lock, self._ended = threading.Lock(), threading.Event()
        try:
            self._server = _Server(("", parsed[host][1]), self._serve)
        except OSError as error:
            raise UserError(
                f"cannot listen at port {parsed[host][1]} of host {host} ({error.strerror}): end "
                "the program that uses the port, or change --peers on all hosts"
            ) from error

    def __enter__(self) -> "Members":
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        # A thread per host: one that does not answer must not delay the statuses of others.
        for host in self._peers:
            threading.Thread(target=self._converse, args=(host,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._server.shutdown()
        self._server.server_close()

    def view(self) -> View:
        """Return the hosts as this one sees them."""
        now = time.monotonic()
        with self._lock:
            remote = {
                host: peer.status
                for host, peer in self._peers.items()
                # `heard` is this host's clock: clocks of two hosts are never compared.
                if peer.status and now - peer.heard < self._timeout and peer.refusals < _REFUSALS
            }
            gone = {host for host, peer in self._peers.items() if peer.refusals >= _REFUSALS}
            last = {host: peer.status for host, peer in self._peers.items() if peer.status}
        return View(self._status(), remote, gone, self._n_hosts, last)

    def publish(self, patience: float = 0.0) -> None:
        """Send the status of this host to all others now.

        Args:
            patience: seconds in which hosts that are alive but do not answer are tried again.
        """
        deadline = time.monotonic() + patience
        # Only a delivered status counts: the receiver acts on it before its next beat.
        left = list(self._peers)
        while left := [host for host in left if not self._exchange(host)]:
            alive = self.view().alive
            left = [host for host in left if host in alive]
            if not left or time.monotonic() >= deadline:
                return
            time.sleep(BEAT_SEC)

    def _converse(self, host: int) -> None:
        while not self._ended.wait(BEAT_SEC):
            self._exchange(host)

    def _exchange(self, host: int) -> bool:
        """Exchange statuses with a host; return False if it did not answer."""
        peer = self._peers[host]
        try:
            with socket.create_connection(peer.address, timeout=_ANSWER_SEC) as connection:
                # The key authenticates both ends: a stranger can neither send nor read a status.
                channel = Channel(connection, self._key, is_client=True, seconds=_ANSWER_SEC)
                channel.send(self._status().to_json().encode())
                return self._note(channel.receive(_MESSAGE_BYTES), host)
        except ConnectionRefusedError:
            with self._lock:  # the machine answers, but no supervisor listens there
                peer.refusals += 1
        except (OSError, UnicodeError) as error:  # UnicodeError: the name of the host is too long
            log.debug("host %d does not answer: %s", host, error)
        return False

    def _serve(self, connection: socket.socket) -> None:
        """Answer the status of another host with that of this host."""
        try:
            channel = Channel(connection, self._key, is_client=False, seconds=_ANSWER_SEC)
            # Only a host that proved to be of the job learns the state of this one.
            if self._note(channel.receive(_MESSAGE_BYTES)):
                channel.send(self._status().to_json().encode())
        except OSError as error:  # a stranger, or a host that is gone: its next message tells
            log.debug("a message was ignored: %s", error)

    def _note(self, message: bytes, sender: int | None = None) -> bool:
        """Note the status in a message of a host; return False if it is not valid.

        Args:
            message: the status as JSON.
            sender: the host that was asked; None if the host has opened the connection.
        """
        try:
            status = Status.from_json(message, self._n_hosts)
        except ValueError as error:
            log.warning("a message of a host of this job was ignored: %s", error)
            return False
        peer = self._peers.get(status.host)
        if peer is None or sender not in (None, status.host):
            log.warning("host %s answered as host %d: do all hosts have the same --peers?",
                        sender, status.host)  # fmt: skip
            return False
        with self._lock:
            # Any message proves that the supervisor runs, whoever opened the connection.
            peer.status, peer.heard, peer.refusals = status, time.monotonic(), 0
        return True


class _Server(BoundedThreads, socketserver.TCPServer):
    """Server that calls a function with each connection, in a thread."""

    allow_reuse_address = True
    patience_sec = PATIENCE_SEC

    def __init__(self, address: tuple[str, int], serve: Callable[[socket.socket], None]) -> None:
        self.serve = serve
        super().__init__(address, _Handler)


class _Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        self.server.serve(self.request)


def parse_address(text: str) -> tuple[str, int]:
    """Return host name and port of an address.

    Raises:
        UserError: the text is not an address.
    """
    name, _, port = text.strip().rpartition(":")
    if not name or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"--peers: {text!r} must be the name of a host and a port: name:port")
    return name.strip("[]"), int(port)
