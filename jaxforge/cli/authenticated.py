"""TCP connections between processes that share a secret.

    client                                 server
    nonce (32 bytes)              ──>
                                  <──      nonce (32 bytes)
    frame                         ──>
                                  <──      frame
                                           ...
    frame:  length (4 bytes), SHA-256 of the content, HMAC-SHA256 of both, content

The key of an HMAC is the secret. It covers both nonces, the sender's role and the number of the
frame, so no frame can be replayed, reordered or reflected. The secret itself is never sent.
Nothing of a frame is read, and no memory allocated, before its HMAC has been verified. Data are
not encrypted.
"""

import hashlib
import hmac
import secrets
import socket
import struct
import time

PROOF_SEC = 10.0
"""Default time for a client to connect and prove that it knows the secret."""

_NONCE = 32
_HEADER = struct.Struct("!I32s")
_CLIENT, _SERVER = b"client", b"server"


class Channel:
    """A connection whose frames prove that their sender knows the secret.

    Args:
        connection: the connection; nothing has been sent through it.
        secret: the shared secret.
        is_client: whether this process has opened the connection.
        seconds: time for the exchange from now on, however slowly the other process sends;
            `extend` changes it. By default `PROOF_SEC`.

    Raises:
        OSError: the connection failed.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        *,
        is_client: bool,
        seconds: float | None = None,
    ) -> None:
        seconds = PROOF_SEC if seconds is None else seconds
        self.connection, self._secret = connection, secret
        self._deadline: float | None = time.monotonic() + seconds
        nonce = secrets.token_bytes(_NONCE)
        connection.settimeout(seconds)
        connection.sendall(nonce)
        received = self.read(_NONCE)
        # Both sides hash the nonces in one order: the client's comes first.
        self._nonces = nonce + received if is_client else received + nonce
        self._roles = (_CLIENT, _SERVER) if is_client else (_SERVER, _CLIENT)
        self._n_sent = self._n_received = 0

    def extend(self, idle_seconds: float) -> None:
        """Replace the limit on the whole exchange by one on the time without progress."""
        self._deadline = None
        self.connection.settimeout(idle_seconds)

    def send(self, content: bytes) -> None:
        """Send a frame.

        Raises:
            OSError: the connection failed.
        """
        header = _HEADER.pack(len(content), hashlib.sha256(content).digest())
        proof = self._proof(self._roles[0], self._n_sent, header)
        self._n_sent += 1
        self.connection.sendall(header + proof + content)

    def receive(self, most: int) -> bytes:
        """Return the content of a frame.

        Args:
            most: largest number of bytes.

        Raises:
            ConnectionError: the sender does not know the secret, or the frame is longer.
            OSError: the connection failed.
        """
        # Fixed sizes: a stranger cannot make this process allocate more.
        header, proof = self.read(_HEADER.size), self.read(hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, self._proof(self._roles[1], self._n_received, header)):
            raise ConnectionError("the sender does not know the secret of the job")
        # Only now: a rejected frame must not shift the numbers.
        self._n_received += 1
        length, digest = _HEADER.unpack(header)
        if length > most:
            raise ConnectionError(f"a message of {length:,} bytes is too long")
        content = self.read(length)
        if hashlib.sha256(content).digest() != digest:
            raise ConnectionError("a message was changed on its way")
        return content

    def read(self, size: int) -> bytes:
        """Return exactly `size` bytes, which prove nothing.

        Raises:
            ConnectionError: the connection ended before.
            TimeoutError: the time is over.
        """
        buffer = bytearray(size)
        self.read_into(memoryview(buffer))
        return bytes(buffer)

    def read_into(self, target: memoryview) -> None:
        """Fill a buffer; otherwise as `read`."""
        while target:
            if self._deadline is not None:
                # For the whole exchange: a sender of single bytes could renew a limit per read
                # forever.
                left = self._deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError("the other process sends too slowly")
                self.connection.settimeout(left)
            size = self.connection.recv_into(target)
            if not size:
                raise ConnectionError("the connection ended early")
            target = target[size:]

    def _proof(self, role: bytes, number: int, header: bytes) -> bytes:
        # Role, nonces, number and header have fixed lengths, so that no two texts are the same.
        text = role + self._nonces + number.to_bytes(8, "big") + header
        return hmac.digest(self._secret, text, "sha256")
