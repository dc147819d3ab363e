"""Recorded messages to the ports of supervisors and of replicas, to be damaged.

Files hold what a process sends: `KIND.jsonl` messages of a process with the secret, one a line, and
`KIND.bin` bytes of a stranger. Afterwards a sound exchange must work, and nothing must be stored.
"""

import contextlib
import functools
import json
import socket
import tempfile
import threading
import zlib
from pathlib import Path
from typing import Any

from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.store import Group, Manifest, Shard, Store
from jaxforge.cli import authenticated
from jaxforge.cli.authenticated import Channel
from jaxforge.supervision import members
from jaxforge.supervision.members import Members
from jaxforge.supervision.processes import free_port
from jaxforge.supervision.rosters import Roster, Status, View, is_running, next_hosts

SECRET = b"secret of the job"
GROUP = Group(7, "ab-0")
DATA = bytes(range(64))
SHARD = Shard("x", (0,), (64,), 0, 64, zlib.crc32(DATA))
SUPERVISOR, REPLICAS = "supervisor", "replicas"
STATUS = Status(1, "one", "running", Roster(2, (0, 1), "127.0.0.1:7"), 2, None, False, 0, 40)
_SEC = 0.3  # for a message
_ATTEMPTS = 20  # on a busy machine


def write_ports(directory: Path) -> None:
    """Write messages of both kinds."""
    directory = directory / "ports"
    directory.mkdir(parents=True)
    requests: list[dict[str, Any]] = [
        {"kind": "get", "group": GROUP.name, "sender": 0, "begin": 7, "size": 9},
        {"kind": "put", "group": GROUP.name, "sender": 1},
    ]
    lines = {SUPERVISOR: [json.loads(STATUS.to_json())] * 3, REPLICAS: requests}
    for kind, messages in lines.items():
        (directory / f"{kind}.jsonl").write_text("".join(json.dumps(m) + "\n" for m in messages))
        (directory / f"{kind}.bin").write_bytes(bytes(range(32)) + b"\0\0\1\0" + bytes(200))


class _Services:
    """Both servers, in this process."""

    def __init__(self) -> None:
        authenticated.PROOF_SEC = members._ANSWER_SEC = _SEC
        members.BEAT_SEC = 3600.0  # host 1 exists in messages alone
        self.directory = Path(tempfile.mkdtemp(prefix="ports"))
        self.store = Store(self.directory / "user" / "run" / "origin")
        self.store.open()
        manifest = Manifest(1, {"x": ((64,), "uint8")}, [SHARD], {})
        self.store.write(GROUP, 0, [memoryview(DATA)], manifest.encode)
        self.replicas = transfer.Server(self.store, "127.0.0.1", SECRET)
        self.replicas.accept([1])
        address = f"127.0.0.1:{free_port('127.0.0.1')}"
        status = Status(0, "zero", "idle", None)
        self.members = Members([address, "127.0.0.1:1"], 0, SECRET.decode(), 60.0, lambda: status)
        self.members.__enter__()
        host, port = members.parse_address(address)
        self.addresses = {SUPERVISOR: (host, port), REPLICAS: tuple(self.replicas.address)}
        self.failures: list[str] = []
        threading.excepthook = lambda hook: self.failures.append(repr(hook.exc_value))
        for server in (self.members._server, self.replicas._listener):
            server.handle_error = self._note  # type: ignore[method-assign]

    def _note(self, *_: object) -> None:
        import traceback

        self.failures.append(traceback.format_exc()[-1500:])


@functools.cache
def _services() -> _Services:
    return _Services()


def read_ports(directory: Path) -> dict[str, str]:
    """Send the messages, then sound ones; return what the servers hold afterwards."""
    services = _services()
    services.failures.clear()
    for path in sorted(directory.iterdir()):
        if not path.is_file() or path.is_symlink() or path.stat().st_size > 1 << 20:
            continue
        address, data = services.addresses[path.stem], path.read_bytes()
        if path.suffix == ".bin":
            _send(address, data, proven=False)
        else:
            for line in data.splitlines():
                _send(address, line, proven=True)
    view = services.members.view()
    _decide(view)
    for _ in range(_ATTEMPTS):
        _send(services.addresses[SUPERVISOR], STATUS.to_json().encode(), proven=True)
        known = services.members.view().remote.get(1)
        if known == STATUS:
            break
    target = bytearray(64)
    transfer.get(services.replicas.address, SECRET, GROUP, 0, 0, memoryview(target))
    held = sorted(p.name for p in services.directory.rglob("*.*") if p.is_file())
    if services.failures:
        raise RuntimeError("; ".join(services.failures))
    return {"services": f"{known} {target == DATA} {held}"}


def _decide(view: View) -> None:
    """Take the decisions of a supervisor about what it has heard."""
    next_hosts(view, 1, 1)
    is_running(view)
    assert view.newest_roster is None or view.newest_roster.hosts


def _send(address: tuple[Any, ...], data: bytes, *, proven: bool) -> None:
    """Send bytes, or a message; wait for the end of the exchange."""
    with contextlib.suppress(OSError), socket.create_connection(address, timeout=_SEC) as client:
        if not proven:
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            while client.recv(1 << 16):
                pass
            return
        channel = Channel(client, SECRET, is_client=True)
        channel.send(data)
        channel.receive(1 << 20)
