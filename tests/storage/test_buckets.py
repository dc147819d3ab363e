"""Path operations in buckets that Orbax and jaxforge use."""

import gc
import socket
import time
import zlib

import numpy as np
import pytest

from jaxforge.checkpoint.paths import is_durable
from jaxforge.data.corpus.manifest import BlockHashes
from jaxforge.data.remote_tokens import RemoteTokens
from jaxforge.errors import StorageError, UserError
from jaxforge.storage import COMMITTED, files, mirror, urls


@pytest.fixture
def root(bucket):
    return urls.path(bucket)


def test_bucket_directory_exists_while_not_empty(root):
    assert not root.exists()
    (root / "a" / "b.txt").write_text("ü")
    (root / "a" / "step_1" / "x").write_bytes(b"1234")
    assert (root / "a").is_dir()
    assert not (root / "a" / "b.txt").is_dir()
    assert [path.name for path in (root / "a").iterdir()] == ["b.txt", "step_1"]
    assert list(root.glob("a/step_*")) == [root / "a" / "step_1"]
    assert (root / "a" / "b.txt").read_text() == "ü"
    assert str(root.absolute()) == str(root.resolve()) == str(root)
    (root / "a" / "b.txt").replace(root / "c")
    assert (root / "c").read_text() == "ü"
    assert not (root / "a" / "b.txt").exists()
    root.rmtree()
    assert not root.exists()


def test_missing_object_raises_file_not_found(root):
    for look in (root.read_bytes, root.unlink, root.rmtree, lambda: list(root.iterdir())):
        with pytest.raises(FileNotFoundError, match="raises_file_not_found"):
            look()


@pytest.mark.parametrize(("mode", "half"), [("w", "half"), ("wb", b"half")])
def test_failed_write_leaves_no_object(root, mode, half):
    with pytest.raises(KeyError), (root / "a").open(mode) as file:  # noqa: PT012
        file.write(half)
        raise KeyError
    assert not (root / "a").exists()


@pytest.mark.parametrize(("mode", "old"), [("w", "old"), ("wb", b"old")])
def test_abandoned_upload_writes_nothing(server, root, mode, old):
    """The garbage collector must not overwrite newer objects."""
    server.forbid_after(0)
    refused = (root / "a").open(mode)
    refused.write(old)
    with pytest.raises((StorageError, UserError)):
        refused.close()
    server.throttle(0)
    forgotten = (root / "a").open(mode)
    forgotten.write(old)
    (root / "a").write_text("new")
    del refused, forgotten
    gc.collect()
    assert (root / "a").read_text() == "new"


def test_object_cannot_be_appended_to(root):
    with pytest.raises(OSError, match="appended"):
        (root / "a").open("ab")


def test_partially_removed_checkpoint_is_not_committed(server, root):
    for name in ("a", "b", COMMITTED):
        (root / name).write_text(name)
    assert is_durable(root)
    server.forbid_after(2)  # a listing and the first deletion
    with pytest.raises((StorageError, UserError)):
        root.rmtree()
    server.throttle(0)
    assert not is_durable(root)


def test_refusal_gives_one_message(server, root):
    server.forbid_after(0)
    with pytest.raises(StorageError, match=rf"^{root}/a: .*") as error:
        (root / "a").write_text("text")
    assert len(str(error.value)) < 300


def test_inaccessible_bucket_is_user_error(server, root):
    server.forbid_after(0)
    if server.scheme == "gs":  # the emulator requires these parameters for listings
        with pytest.raises(UserError, match=rf"^{root}/a: 403 Forbidden"):
            (root / "a").read_text()
        return
    with pytest.raises(UserError, match=rf"^{root}: 403 Forbidden"):
        root.is_dir()
    server.throttle(0)
    with pytest.raises(UserError, match="The specified bucket does not exist"):
        urls.path("s3://mistyped/run").is_dir()


def test_unreachable_service_is_reported_within_seconds(monkeypatch, capfd):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    begun = time.monotonic()
    with pytest.raises(
        StorageError, match=rf"^s3://bucket/run: http://127.0.0.1:{port} cannot be reached: Conn"
    ):
        urls.path("s3://bucket/run").is_dir()
    assert time.monotonic() - begun < 30  # 90 s of retries for a service that has answered
    assert capfd.readouterr().err == ""


def test_remote_tokens_are_read_in_place(server, root):
    tokens = np.arange(1000, dtype="<u2")
    files.write(root / "t.bin", b"head" + tokens.tobytes())
    remote = RemoteTokens(root / "t.bin", tokens.dtype, 4, 1000)
    server.throttle(3)
    chunks = [remote[start : start + 10] for start in range(0, 1000, 50)]
    for start, chunk in zip(range(0, 1000, 50), chunks, strict=True):
        np.testing.assert_array_equal(chunk, tokens[start : start + 10])
    server.throttle(0)
    del chunks, chunk  # their block is shared as long as they exist
    longer = RemoteTokens(root / "t.bin", tokens.dtype, 4, 1001)
    with pytest.raises(
        StorageError, match=r"t\.bin: it has only 2,004 bytes: it was readable when"
    ):
        np.asarray(longer[995:1001])
    (root / "t.bin").unlink()
    with pytest.raises(StorageError, match=r"t\.bin is gone since"):
        np.asarray(remote[0:10])


def test_remote_tokens_are_compared_with_their_hashes(server, root):
    tokens = np.random.default_rng(0).integers(0, 999, 100_000).astype("<u2")
    data = tokens.tobytes()
    blocks = [data[at : at + 65_536] for at in range(0, len(data), 65_536)]
    hashes = np.array([zlib.crc32(block) for block in blocks], np.uint32)
    known = BlockHashes(root / "t.bin", 4, tokens.dtype, hashes)
    remote = RemoteTokens(root / "t.bin", tokens.dtype, 4, len(tokens), known)
    files.write(root / "t.bin", b"head" + data)
    for start, end in ((0, 10), (32_760, 32_770), (40_000, 99_999), (99_990, 100_000)):
        np.testing.assert_array_equal(remote[start:end], tokens[start:end])
    damaged = bytearray(data)
    damaged[2 * 40_000] ^= 1
    files.write(root / "t.bin", b"head" + damaged)
    np.testing.assert_array_equal(remote[10:20], tokens[10:20])
    with pytest.raises(
        UserError, match=r"t\.bin is damaged: bytes 65,540 to 131,075 \(tokens 32,7"
    ):
        np.asarray(remote[65_000:65_010])


def test_mirror_publishes_and_fetches_changed_files(server, root):
    first = mirror.Mirror(root, 0, ["metrics.jsonl", "logs"])
    local = mirror.directory(root, 0)
    (local / "logs").mkdir()
    (local / "metrics.jsonl").write_text("1\n")
    (local / "logs" / "a.log").write_text("a\n")
    (local / "page.partial").write_text("half")
    (local / ".step_2.partial").mkdir()
    (local / ".step_2.partial" / "residual.npy").write_text("half")
    assert first.publish()
    asked = server.requests
    assert first.publish()
    assert server.requests == asked, "nothing has changed"
    server.forbid_after(0)
    (local / "metrics.jsonl").write_text("1\n2\n")
    with pytest.raises(StorageError, match=rf"newest files of the run are in {local}, not in"):
        first.close()
    server.throttle(0)
    first.close()
    assert (root / "metrics.jsonl").read_text() == "1\n2\n"
    assert not (root / "page.partial").exists()
    assert not (root / ".step_2.partial").exists()
    local.mkdir()
    (local / "torn").write_text("of another time")
    second = mirror.Mirror(root, 0, ["metrics.jsonl", "logs", "none"])
    assert {path.name for path in local.rglob("*")} == {"metrics.jsonl", "logs", "a.log"}
    assert (local / "logs" / "a.log").read_text() == "a\n"
    second.close()
