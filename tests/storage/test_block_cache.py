"""The cache of blocks: bounded, shared, and right whatever happens to its file."""

import errno
import logging
import os
import pickle
import random
import signal
import subprocess
import sys
import zlib

import pytest

from jaxforge.errors import UserError
from jaxforge.storage import block_cache
from jaxforge.storage.block_cache import BLOCK_BYTES, SMALLEST, BlockCache
from tests.machine import PATIENCE

SET = SMALLEST - 4096


def key(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"test key"


def content(number: int) -> bytes:
    """Return the bytes of a block: full, except every third."""
    return random.Random(number).randbytes(BLOCK_BYTES if number % 3 else 1000 + number)


@pytest.fixture
def cache(tmp_path):
    with_two_sets = BlockCache(tmp_path, SMALLEST + SET)
    yield with_two_sets
    with_two_sets.close()


def file_of(cache):
    return cache._directory / "blocks"


def test_stored_blocks_are_returned(cache):
    for number in range(20):
        assert cache.get(key(number)) is None
        cache.put(key(number), content(number))
    for number in range(20):
        assert cache.get(key(number), zlib.crc32(content(number))) == content(number)
    cache.put(key(3), content(4))
    assert cache.get(key(3)) == content(4)


def test_least_recently_used_block_of_set_is_evicted(cache):
    """Keys of one parity share one of two sets, which has 16 slots."""
    for number in range(0, 32, 2):
        cache.put(key(number), content(number))
    assert cache.get(key(0)) is not None
    cache.put(key(1), content(1))
    cache.put(key(32), content(32))
    present = [number for number in range(33) if cache.get(key(number)) is not None]
    assert present == [0, 1, *range(4, 33, 2)]


def test_size_stays_below_limit(tmp_path):
    limit = 5 * 10**6
    cache = BlockCache(tmp_path, limit)
    for number in range(300):
        cache.put(key(number), content(number))
    size = sum(path.stat().st_size for path in tmp_path.rglob("*"))
    assert limit - SET < size <= limit + 4096 * 2  # the directory itself has a block
    assert file_of(cache).stat().st_size <= cache.size <= limit


@pytest.mark.parametrize("field", ["content", "crc", "length"])
def test_damaged_block_is_dropped(cache, field):
    cache.put(key(2), content(2))
    cache.put(key(4), content(4))
    data = file_of(cache).read_bytes()
    record = data.index(key(2))
    at = {"content": data.index(content(2)) + 999, "crc": record + 16, "length": record + 20}[field]
    with file_of(cache).open("r+b") as file:
        file.seek(at)
        file.write(bytes([data[at] ^ 1]))
    assert cache.get(key(2)) is None
    assert cache.get(key(2)) is None
    assert cache.get(key(4)) == content(4)
    cache.put(key(2), content(2))
    assert cache.get(key(2)) == content(2)


def test_block_with_other_checksum_is_dropped(cache):
    cache.put(key(2), content(2))
    assert cache.get(key(2), zlib.crc32(content(5))) is None
    assert cache.get(key(2)) is None


@pytest.mark.parametrize("damage", [b"", b"something else", None])
def test_unreadable_file_is_replaced(tmp_path, damage):
    cache = BlockCache(tmp_path, SMALLEST)
    cache.put(key(1), content(1))
    path = file_of(cache)
    cache.close()
    path.write_bytes(damage) if damage is not None else path.unlink()
    again = BlockCache(tmp_path, SMALLEST)
    assert again.get(key(1)) is None
    again.put(key(1), content(1))
    assert again.get(key(1)) == content(1)


def test_truncated_file_loses_blocks_only(cache):
    for number in range(32):
        cache.put(key(number), content(number))
    os.truncate(file_of(cache), 4096 + SET // 2)
    read = [cache.get(key(number)) for number in range(32)]
    assert None in read
    assert all(data in (None, content(number)) for number, data in enumerate(read))


def test_blocks_survive_restart_and_other_size_empties(tmp_path, caplog):
    first = BlockCache(tmp_path, SMALLEST + SET)
    first.put(key(1), content(1))
    second = BlockCache(tmp_path, SMALLEST)  # another run, with less
    assert second.get(key(1)) == content(1)
    assert second.size == first.size
    assert "other processes use" in caplog.text
    first.close()
    second.close()
    third = BlockCache(tmp_path, SMALLEST + SET)
    assert third.get(key(1)) == content(1)
    third.close()
    fourth = BlockCache(tmp_path, SMALLEST)
    assert fourth.get(key(1)) is None
    assert file_of(fourth).stat().st_size == SMALLEST


def test_pickled_cache_is_the_process_s_own(tmp_path):
    cache = block_cache.shared_cache(str(tmp_path), SMALLEST + SET + 17)
    cache.put(key(1), content(1))
    assert pickle.loads(pickle.dumps(cache)).get(key(1)) == content(1)


def test_full_disk_stops_caching_with_one_warning(cache, monkeypatch, caplog):
    cache.put(key(1), content(1))

    def full(descriptor: int, data: bytes, at: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    for number in range(2, 9):
        cache.put(key(number), content(number))
    assert [cache.get(key(number)) is not None for number in range(1, 4)] == [True, False, False]
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "No space left on device" in warnings[0].getMessage()


def test_disk_without_room_for_cache_is_no_error(tmp_path, monkeypatch, caplog):
    def full(self, n_sets: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(BlockCache, "_create", full)
        cache = BlockCache(tmp_path, SMALLEST)
        cache.put(key(1), content(1))
        assert cache.get(key(1)) is None
        assert "No space left" in caplog.text
    other = BlockCache(tmp_path, SMALLEST)  # waits for no lock
    other.put(key(1), content(1))
    assert other.get(key(1)) == content(1)


def test_partial_write_counts_as_full_disk(cache, monkeypatch, caplog):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, data[:100], at))
    cache.put(key(1), content(1))
    assert cache.get(key(1)) is None
    assert "No space left" in caplog.text


def test_directory_that_cannot_be_used_is_user_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"data\.cache_dir: .*file"):
        BlockCache(tmp_path / "file", SMALLEST)
    with pytest.raises(UserError, match=r"data\.cache_gb = 0\.001: a cache has at least 0\.00105"):
        BlockCache(tmp_path, 10**6)


WRITER = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[4:]
from test_block_cache import content, key
from jaxforge.storage.block_cache import SMALLEST, BlockCache
cache = BlockCache(Path(sys.argv[1]), SMALLEST)
contents = {number: content(number) for number in range(40)}
print("ready", flush=True)
step, number = int(sys.argv[2]), 0
while number < int(sys.argv[3]):
    n = number * step % 40
    cache.put(key(n), contents[n])
    data = cache.get(key(n * 7 % 40))
    assert data in (None, contents[n * 7 % 40]), "a wrong block"
    number += 1
"""


def start_writer(directory, step, rounds):
    paths = [os.path.dirname(__file__), os.getcwd()]
    command = [sys.executable, "-c", WRITER, str(directory), str(step), str(rounds), *paths]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "ready\n"
    return process


def test_writers_of_same_slots_never_read_wrong_blocks(tmp_path):
    """40 blocks compete for 16 slots."""
    writers = [start_writer(tmp_path, step, 1500) for step in (1, 3)]
    assert [writer.wait(PATIENCE) for writer in writers] == [0, 0]


def test_killed_writer_leaves_no_wrong_block(tmp_path):
    writer = start_writer(tmp_path, 1, 10**9)
    cache = BlockCache(tmp_path, SMALLEST)
    for number in range(400):
        assert cache.get(key(number % 40)) in (None, content(number % 40))
    writer.send_signal(signal.SIGKILL)
    assert writer.wait(PATIENCE) == -signal.SIGKILL
    present = [cache.get(key(number)) for number in range(40)]
    assert all(data in (None, content(number)) for number, data in enumerate(present))
    assert any(present)
    cache.close()
    assert BlockCache(tmp_path, SMALLEST + SET).size == SMALLEST + SET, "no lock is left"
