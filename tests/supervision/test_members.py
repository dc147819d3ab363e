"""Exchange of statuses between hosts over TCP, and strangers at both ends of a connection."""

import contextlib
import dataclasses
import json
import socket
import threading
import time

import pytest

from jaxforge.cli.authenticated import Channel
from jaxforge.supervision import members
from jaxforge.supervision.members import Members
from jaxforge.supervision.processes import free_port
from jaxforge.supervision.rosters import Roster, Status
from tests.machine import PATIENCE, wait_until

KEY = "the key of the job"


@pytest.fixture
def addresses(monkeypatch):
    monkeypatch.setattr(members, "BEAT_SEC", 0.05)
    return [f"127.0.0.1:{free_port('127.0.0.1')}" for _ in range(2)]


@pytest.fixture
def host(addresses):
    """Return host 0 of two."""
    with Members(addresses, 0, KEY, 30.0, lambda: Status(0, "zero")) as host:
        yield host


def connect(address):
    name, port = address.split(":")
    return socket.create_connection((name, int(port)), timeout=PATIENCE)


def tell(address, status, key=KEY):
    """Send a status to a host; return its answer."""
    with connect(address) as connection:
        channel = Channel(connection, key.encode(), is_client=True)
        channel.send(status if isinstance(status, bytes) else status.to_json().encode())
        return json.loads(channel.receive(1 << 16))


def status(**changes):
    return dataclasses.asdict(Status(1, "one", roster=Roster(2, (0, 1), "h:1"))) | changes


def test_hosts_hear_each_other(addresses, host):
    own = Status(1, "one", step=7)
    with Members(addresses, 1, KEY, 30.0, lambda: own):
        wait_until(lambda: host.view().remote == {1: own})


def test_status_with_another_key_is_ignored(addresses, host):
    with pytest.raises(ConnectionError):
        tell(addresses[0], Status(1, "one"), key="another key")
    assert not host.view().remote


@pytest.mark.parametrize(
    "roster",
    [
        {"number": 50, "hosts": [], "coordinator": "h:1"},
        {"number": float("inf"), "hosts": [1], "coordinator": "h:1"},
        {"number": 50, "hosts": [1], "coordinator": "x\0y:1"},
        {"number": 50, "hosts": [2], "coordinator": "h:1"},
        {"number": 50, "hosts": [1, 1], "coordinator": "h:1"},
    ],
    ids=str,
)
def test_invalid_roster_of_a_host_is_ignored(addresses, host, caplog, roster):
    with pytest.raises(ConnectionError):
        tell(addresses[0], json.dumps(status(roster=roster)).encode())
    assert "not a status of a host" in caplog.text
    assert not host.view().remote
    sound = Status(1, "one")
    assert tell(addresses[0], sound)["incarnation"] == "zero"
    assert host.view().remote == {1: sound}


@pytest.fixture
def stranger(addresses, monkeypatch):
    """Return the bytes that a process at the address of host 1 receives; it answers nothing."""
    monkeypatch.setattr(members, "_ANSWER_SEC", 0.2)
    received = []
    with socket.create_server(("127.0.0.1", int(addresses[1].split(":")[1]))) as server:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    connection.sendall(bytes(32))
                    received.append(connection.recv(1 << 16))
                    received.append(connection.recv(1 << 16))

        threading.Thread(target=serve, daemon=True).start()
        yield received
        server.shutdown(socket.SHUT_RDWR)


def test_stranger_at_the_address_of_a_host_does_not_learn_the_key(stranger, host):
    wait_until(lambda: len(stranger) >= 2)
    assert KEY.encode() not in b"".join(stranger)


def test_message_of_a_host_is_not_accepted_again(addresses, host):
    """A stranger records a message of host 1, and sends it to host 0 in another connection."""
    with connect(addresses[0]) as connection:
        channel = Channel(connection, KEY.encode(), is_client=True)
        recorded = []
        channel.connection = type("Tap", (), {"sendall": staticmethod(recorded.append)})
        channel.send(Status(1, "one").to_json().encode())
    with connect(addresses[0]) as connection:
        connection.sendall(bytes(32) + recorded[0])
        assert len(connection.recv(1 << 10)) == 32  # a new nonce, and no answer
        assert connection.recv(1 << 10) == b""
    assert not host.view().remote


def test_slow_answer_does_not_hold_up_the_supervisor(addresses, host, monkeypatch):
    monkeypatch.setattr(members, "_ANSWER_SEC", 0.5)
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", int(addresses[1].split(":")[1]))) as server:

        def trickle():
            with contextlib.suppress(OSError):
                while not ended.is_set():
                    server.settimeout(PATIENCE)
                    connection = server.accept()[0]
                    while not ended.is_set():
                        connection.sendall(b"x")
                        time.sleep(0.1)

        threading.Thread(target=trickle, daemon=True).start()
        done = threading.Thread(target=host.publish, daemon=True)
        done.start()
        done.join(20)
        ended.set()
        assert not done.is_alive()
