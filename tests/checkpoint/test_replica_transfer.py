"""Transfer of replicas between hosts: a store and a server for each, in one process."""

import os
import socket

import numpy as np
import pytest

from jaxforge.checkpoint.replica import complete_groups, transfer
from jaxforge.checkpoint.replica.peers import Process, choose_peers, own_address
from jaxforge.checkpoint.replica.reading import Copy, Reader
from jaxforge.checkpoint.replica.store import BLOCK, Group, Manifest, Shard, Store
from tests.machine import PATIENCE

TOKEN = b"t" * 32
GROUP = Group(7, "ab-0")
DATA = np.random.default_rng(0).integers(0, 256, 3 * BLOCK + 5, np.uint8)
SHARD = Shard("x", (0,), DATA.shape, 0)


def describe(size, sums):
    return Manifest(1, {"x": (DATA.shape, "uint8")}, [SHARD], size, sums, {}, {}).encode()


class Host:
    def __init__(self, path):
        self.store = Store(path / "user" / "run" / "origin")
        self.store.open()
        self.server = transfer.Server(self.store, "127.0.0.1", TOKEN)

    def write(self):
        self.store.write(GROUP, 0, [DATA.data[:100], DATA.data[100:]], describe)

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
    assert complete_groups.inventory(hosts[1].store) == [("step_7.ab-0", 1, [0])]


def test_put_of_changed_data_is_refused(hosts):
    hosts[0].flip_bit(BLOCK)
    with pytest.raises(transfer.RefusedError, match="the data changed in transfer"):
        put(hosts)
    assert not complete_groups.inventory(hosts[1].store)


def test_put_of_unexpected_sender_is_refused(hosts):
    with pytest.raises(transfer.RefusedError, match="process 0 do not belong here"):
        transfer.put(hosts[1].server.address, TOKEN, GROUP, 0, hosts[0].store)


def test_request_without_token_is_not_answered(hosts):
    with pytest.raises(ConnectionError):
        put(hosts, token=b"x" * 32)
    assert not complete_groups.inventory(hosts[1].store)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "../.."}, "the connection ended early"),
        ({"sender": "../x"}, "the connection ended early"),
        ({"kind": "remove"}, "the connection ended early"),
        ({"sender": 3}, "No such file"),
        ({"ranges": [[0, DATA.size + 1]]}, "has no such range"),
        ({"ranges": [[-1, 1]]}, "has no such range"),
    ],
    ids=str,
)
def test_other_requests_return_nothing(hosts, changes, message):
    sound = {"kind": "get", "group": GROUP.name, "sender": 0, "ranges": [[0, 1]]}
    transfer._request(hosts[0].server.address, TOKEN, **sound).close()
    with pytest.raises(OSError, match=message):
        transfer._request(hosts[0].server.address, TOKEN, **sound | changes)


def test_message_of_excessive_length_ends_the_connection(hosts):
    with socket.create_connection(hosts[0].server.address, timeout=PATIENCE) as connection:
        transfer.receive(connection, 32)
        connection.sendall(b"d" * 32 + (1 << 31).to_bytes(4, "big"))
        assert connection.recv(1) == b""


def test_reader_replaces_damaged_blocks_by_those_of_other_copies(hosts):
    put(hosts)
    hosts[0].flip_bit(5)
    hosts[1].flip_bit(2 * BLOCK)
    copies = {0: [Copy(0, None), Copy(1, hosts[1].server.address)]}
    reader = Reader(GROUP, hosts[0].store, TOKEN, copies)
    np.testing.assert_array_equal(
        reader.read(0, SHARD, (slice(3, DATA.size),), DATA.dtype), DATA[3:]
    )
    assert reader.damaged == {
        "files of process 0 on the host of process 0": "1 of 4 blocks are damaged"
    }
    assert (reader.local_bytes, reader.remote_bytes) == (DATA.size, BLOCK)


@pytest.mark.parametrize("removed", ["data_path", "manifest_path"])
def test_reader_uses_other_host_without_own_file(hosts, removed):
    put(hosts)
    copies = {0: [Copy(0, None), Copy(1, hosts[1].server.address)]}
    os.remove(getattr(hosts[0].store, removed)(GROUP, 0))
    reader = Reader(GROUP, hosts[0].store, TOKEN, copies)
    box = (slice(BLOCK, BLOCK + 2),)
    np.testing.assert_array_equal(reader.read(0, SHARD, box, DATA.dtype), DATA[box])


def test_reader_raises_when_all_copies_are_damaged(hosts):
    put(hosts)
    for host in hosts:
        host.flip_bit(5)
    reader = Reader(
        GROUP, hosts[0].store, TOKEN, {0: [Copy(0, None), Copy(1, hosts[1].server.address)]}
    )
    with pytest.raises(ValueError, match="no copy of the files of process 0 is intact"):
        reader.read(0, SHARD, (slice(0, 9),), DATA.dtype)


def test_reader_skips_lost_process(hosts):
    put(hosts)
    hosts[1].server.close()
    copies = {0: [Copy(1, hosts[1].server.address), Copy(0, None)]}
    reader = Reader(GROUP, hosts[0].store, TOKEN, copies)
    box = (slice(0, 9),)
    np.testing.assert_array_equal(reader.read(0, SHARD, box, DATA.dtype), DATA[box])


def test_group_is_complete_once_hosts_hold_all_senders():
    old, new = Group(3, "aa-0").name, Group(4, "aa-0").name
    inventories = [[(old, 2, [0]), (new, 2, [0])], [(old, 2, [1, 0]), (new, 2, [0])], []]
    assert complete_groups.complete(inventories) == [(Group(3, "aa-0"), 2, {0: [0, 1], 1: [1]})]


def test_own_address_is_that_of_the_route_to_process_0():
    job = {
        "JAX_COORDINATOR_ADDRESS": "127.0.0.1:9",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": "1",
    }
    assert own_address(job) == "127.0.0.1"
    with socket.socket() as listener:
        listener.bind((own_address({}), 0))  # an address of this machine


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
