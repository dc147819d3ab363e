"""Files by URL: listings, repeated requests, refusals, and the end of a process."""

import asyncio
import os
import subprocess
import sys

import fsspec
import pytest

from jaxforge.errors import StorageError, UserError
from jaxforge.storage import files, requests
from tests.machine import PATIENCE

_PENDING = """
import sys
from jaxforge.storage import files
futures = [files.fetch(sys.argv[1], 0, 4) for _ in range(40)]
print("pending", flush=True)
"""


def test_listing_continues_after_each_page(bucket, monkeypatch):
    for name in ("a", "b c/ü", "b/x", "d"):
        files.write(f"{bucket}/{name}", name.encode())
    whole = files.entries(bucket)
    assert [entry.name for entry in whole] == ["a", "b c/ü", "b/x", "d"]
    monkeypatch.setattr(files, "_PAGE", 1)
    assert files.entries(bucket) == whole
    assert files.names(bucket) == ["a", "b", "b c", "d"]
    assert files.entries(f"{bucket}/none") == files.names(f"{bucket}/none") == []


def test_versions_agree_between_requests(bucket):
    files.write(f"{bucket}/a", b"12345")
    (listed,) = files.entries(bucket)
    content = files.fetch(f"{bucket}/a", 1, 3).result()
    assert content == (b"23", listed.version)
    assert files.stat(f"{bucket}/a") == listed
    files.write(f"{bucket}/a", b"54321")
    assert files.stat(f"{bucket}/a").version != listed.version


def test_failed_requests_are_repeated(bucket, server):
    url = f"{bucket}/a"
    files.write(url, b"12345")
    server.fail(2)
    for _ in range(8):
        assert files.read(url, 1, 3) == b"23"
        assert len(files.entries(bucket)) == 1
        files.write(url, b"12345")
        files.remove(bucket, ["none"])


def test_persistent_failure_ends_with_patience(bucket, server, monkeypatch):
    monkeypatch.setattr(requests, "PATIENCE_SEC", 0.3)
    files.write(f"{bucket}/a", b"12345")
    server.throttle(1)
    with pytest.raises(StorageError, match=r"/a: the read failed, attempts: \d, .*503"):
        files.read(f"{bucket}/a")
    with pytest.raises(StorageError, match=r"/a: the upload failed, attempts: \d, .*503"):
        files.write(f"{bucket}/a", b"")


def test_first_request_without_answer_is_repeated(monkeypatch):
    monkeypatch.setattr(requests, "CONNECT_SEC", 0.05)
    monkeypatch.setattr(requests, "REQUEST_SEC", (0.3,))
    monkeypatch.setattr(requests, "_FIRST_PATIENCE_SEC", 0.3)
    monkeypatch.setattr(requests, "_answered", set())
    seconds = [PATIENCE, PATIENCE, 0.0]

    async def answer():
        await asyncio.sleep(seconds.pop(0))
        return 7

    assert requests.wait(requests.attempts("s3://bucket/a", answer, "the read")) == 7


def test_range_beyond_end_is_refused(bucket):
    files.write(f"{bucket}/a", b"12345")
    with pytest.raises(UserError, match="it has only 5 bytes"):
        files.read(f"{bucket}/a", 3, 6)
    assert files.head(f"{bucket}/a", 9) == b"12345"


def test_process_ends_while_requests_are_pending(bucket, server):
    files.write(f"{bucket}/a", b"12345")
    server.stall(100)
    arguments = [sys.executable, "-c", _PENDING, f"{bucket}/a"]
    done = subprocess.run(
        arguments, env=os.environ, capture_output=True, text=True, timeout=PATIENCE
    )
    server.throttle(0)
    assert (done.returncode, done.stdout, done.stderr) == (0, "pending\n", "")


def test_other_protocols_are_read_through_fsspec():
    fsspec.filesystem("memory").pipe("/files/n/a", b"12345")
    assert files.names("memory://files/n") == ["a"]
    assert [entry[:2] for entry in files.entries("memory://files")] == [("n/a", 5)]
    assert files.read("memory://files/n/a", 1, 3) == b"23"
    with pytest.raises(FileNotFoundError):
        files.stat("memory://files/n/b")
    with pytest.raises(UserError, match="Protocol not known"):
        files.read("unknown://files/a")
