"""Transfer of replicas between hosts: a store and a server for each, in one process."""

import contextlib
import os
import socket
import threading
import time
import zlib

import numpy as np
import pytest

from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.reading import Copy, Reader
from jaxforge.checkpoint.replica.store import BLOCK, Group, Manifest, Shard, Store, complete_groups
from jaxforge.checkpoint.replica.transfer import Process, address_in_job, choose_peers
from jaxforge.cli import authenticated
from jaxforge.cli.servers import CONNECTIONS
from tests.machine import PATIENCE

TOKEN = b"t" * 32
GROUP = Group(7, "ab-0")
DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 5, np.uint8)
SHARD = Shard("x", (0,), DATA.shape, 0, DATA.size, zlib.crc32(DATA))
MANIFEST = Manifest(1, {"x": (DATA.shape, "uint8")}, [SHARD], {})


class Host:
    def __init__(self, path):
        self.store = Store(path / "user" / "run" / "origin")
        self.store.open()
        self.server = transfer.Server(self.store, "127.0.0.1", TOKEN)

    def write(self):
        self.store.write(GROUP, 0, [DATA.data[:100], DATA.data[100:]], MANIFEST.encode)

    def flip_bit(self, position):
        path = self.store.data_path(GROUP, 0)
        content = bytearray(path.read_bytes())
        content[position] ^= 1
        path.write_bytes(content)


@pytest.fixture
def hosts(tmp_path):
    hosts = [Host(tmp_path / name) for name in "ab"]
    hosts[0].write()
    yield hosts
    for host in hosts:
        host.server.close()


def put(hosts, **changes):
    hosts[1].server.accept([0])
    transfer.put(hosts[1].server.address, changes.get("token", TOKEN), GROUP, 0, hosts[0].store)


def test_put_copies_both_files(hosts):
    put(hosts)
    for path in ("data_path", "manifest_path"):
        contents = [getattr(host.store, path)(GROUP, 0).read_bytes() for host in hosts]
        assert contents[0] == contents[1]
    assert hosts[1].store.inventory() == [("step_7.ab-0", 1, [0])]


def test_put_of_changed_data_is_refused(hosts):
    hosts[0].flip_bit(BLOCK)
    with pytest.raises(transfer.RefusedError, match="the data changed in transfer"):
        put(hosts)
    assert not hosts[1].store.inventory()


def test_put_of_unexpected_sender_is_refused(hosts):
    with pytest.raises(transfer.RefusedError, match="process 0 do not belong here"):
        transfer.put(hosts[1].server.address, TOKEN, GROUP, 0, hosts[0].store)


def test_request_without_token_is_not_answered(hosts):
    with pytest.raises(ConnectionError):
        put(hosts, token=b"x" * 32)
    assert not hosts[1].store.inventory()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "../.."}, "the connection ended early"),
        ({"sender": "../x"}, "the connection ended early"),
        ({"kind": "remove"}, "the connection ended early"),
        ({"sender": 3}, "No such file"),
        ({"size": DATA.size + 1}, "has no such range"),
        ({"begin": -1}, "has no such range"),
        ({"size": -1}, "has no such range"),
    ],
    ids=str,
)
def test_other_requests_return_nothing(hosts, changes, message):
    sound = {"kind": "get", "group": GROUP.name, "sender": 0, "begin": 0, "size": 1}
    with transfer._request(hosts[0].server.address, TOKEN, **sound):
        pass
    with (
        pytest.raises(OSError, match=message),
        transfer._request(hosts[0].server.address, TOKEN, **sound | changes),
    ):
        pass


def connect(address):
    return socket.create_connection(address, timeout=PATIENCE)


@pytest.mark.parametrize("length", [1, 1 << 31])
def test_message_without_token_is_not_read(hosts, length):
    with connect(hosts[0].server.address) as connection:
        connection.sendall(b"n" * 32 + length.to_bytes(4, "big") + b"d" * 64)
        assert len(connection.recv(33)) == 32
        assert connection.recv(1) == b""


def test_answer_without_token_is_not_accepted(hosts):
    """A stranger may listen at the address of a process that has ended."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def answer():
            connection = stranger.accept()[0]
            connection.sendall(b"n" * 32 + bytes(4) + b"d" * 64)
            connection.recv(1 << 16)

        threading.Thread(target=answer, daemon=True).start()
        address = transfer.Address(*stranger.getsockname())
        with pytest.raises(ConnectionError, match="does not know the secret"):
            transfer.get(address, TOKEN, GROUP, 0, 0, memoryview(bytearray(1)))


def test_strangers_cannot_exhaust_threads_and_do_not_keep_the_job_out(hosts, monkeypatch):
    monkeypatch.setattr(transfer._Listener, "patience_sec", 0.0)
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(hosts[1].server.address)) for _ in range(200)]
        for stranger in strangers:
            with contextlib.suppress(OSError):  # it has been closed
                stranger.sendall(b"n" * 36)
        put(hosts)
        assert threading.active_count() - before <= CONNECTIONS + 1
    assert hosts[1].store.inventory()


def test_transfer_is_not_closed_for_strangers(hosts):
    sound = {"kind": "get", "group": GROUP.name, "sender": 0, "begin": 0, "size": DATA.size}
    address = hosts[0].server.address
    hosts[0].server._listener.patience_sec = 0.0
    with transfer._request(address, TOKEN, **sound) as channel, contextlib.ExitStack() as stack:
        for _ in range(2 * CONNECTIONS):
            stack.enter_context(connect(address)).recv(32)
        assert channel.read(DATA.size) == DATA.tobytes()


def test_slow_stranger_is_closed(hosts, monkeypatch):
    monkeypatch.setattr(authenticated, "PROOF_SEC", 0.2)
    with connect(hosts[0].server.address) as connection:

        def trickle():
            for _ in range(400):
                connection.sendall(b"x")
                time.sleep(0.05)

        with pytest.raises(ConnectionError):
            trickle()


def reader(hosts, processes):
    """Return a reader on host 0 that tries the copies of some processes, in order."""
    addresses = [None, hosts[1].server.address]
    copies = {0: [Copy(process, addresses[process]) for process in processes]}
    return Reader(GROUP, hosts[0].store, TOKEN, copies)


def test_reader_replaces_damaged_part_by_other_copy(hosts):
    put(hosts)
    hosts[0].flip_bit(5)
    result = reader(hosts, [0, 1])
    np.testing.assert_array_equal(result.read(0, SHARD), DATA)
    assert result.damaged == {
        "files of process 0 on the host of process 0": "a part of x is damaged"
    }
    assert (result.local_bytes, result.remote_bytes) == (DATA.size, DATA.size)


def test_reader_returns_empty_part(hosts):
    put(hosts)
    empty = Shard("y", (0,), (0,), DATA.size, 0, 0)
    assert reader(hosts, [1]).read(0, empty).size == 0


def test_reader_uses_other_host_without_own_file(hosts):
    put(hosts)
    os.remove(hosts[0].store.data_path(GROUP, 0))
    np.testing.assert_array_equal(reader(hosts, [0, 1]).read(0, SHARD), DATA)


def test_reader_raises_when_all_copies_are_damaged(hosts):
    put(hosts)
    for host in hosts:
        host.flip_bit(5)
    with pytest.raises(ValueError, match="no copy of the files of process 0 is intact"):
        reader(hosts, [0, 1]).read(0, SHARD)


def test_reader_skips_lost_process(hosts):
    put(hosts)
    hosts[1].server.close()
    np.testing.assert_array_equal(reader(hosts, [1, 0]).read(0, SHARD), DATA)


def test_group_is_complete_once_hosts_hold_all_senders():
    old, new = Group(3, "aa-0").name, Group(4, "aa-0").name
    inventories = [[(old, 2, [0]), (new, 2, [0])], [(old, 2, [1, 0]), (new, 2, [0])], []]
    assert complete_groups(inventories) == [(Group(3, "aa-0"), 2, {0: [0, 1], 1: [1]})]


def test_own_address_is_that_of_the_route_to_process_0():
    job = {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:9",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    assert address_in_job(job) == "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((address_in_job({}), 0))  # an address of this machine


def job(hosts, domains):
    return [Process(host, domains[host], ("", 0)) for host in hosts]


@pytest.mark.parametrize(
    ("hosts", "domains", "expected"),
    [
        ("ab", "ab", [1, 0]),
        ("abcd", "abcd", [2, 3, 0, 1]),
        ("aabb", "ab", [2, 3, 0, 1]),  # two processes per host
        ("abcd", "xyxy", [1, 0, 3, 2]),
        ("abcd", "xxxy", [3, 3, 3, 1]),  # no balance is possible
        ("abc", "xxx", [None, None, None]),
        ("aab", "ab", [2, 2, 0]),
    ],
)
def test_peer_is_in_another_domain(hosts, domains, expected):
    names = dict(zip(dict.fromkeys(hosts), domains, strict=True))
    processes = job(hosts, names)
    peers = choose_peers(processes)
    assert peers == expected
    for process, peer in zip(processes, peers, strict=True):
        assert peer is None or processes[peer].domain != process.domain
