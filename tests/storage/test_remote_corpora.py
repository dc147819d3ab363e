"""Preparation from and to buckets and the Hub, with requests that fail."""

import gzip
import hashlib
import http.server
import io
import json
import random
import threading
import time
from urllib.parse import parse_qs, unquote, urlparse

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from emulators import ONE_SERVICE

from jaxforge.commands import prepare
from jaxforge.data.corpus import ingest, remote_input
from jaxforge.data.corpus.documents import text_parts
from jaxforge.data.corpus.inputs import find_inputs
from jaxforge.data.tokens import TokenShards
from jaxforge.errors import InputChangedError, StorageError, UserError
from jaxforge.storage import buckets, files, run_lock, urls
from jaxforge.storage.atomic_directory import read_json
from tests.data.corpus.interruptions import Interrupted, snapshot


def lines(name, n):
    return "".join(json.dumps({"text": f"{name} {i} " + "é" * (i % 9)}) + "\n" for i in range(n))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Return a directory with an input of each kind."""
    directory = tmp_path_factory.mktemp("corpus")
    (directory / "below").mkdir()
    (directory / "a.jsonl").write_text(lines("a", 200))
    (directory / "b.jsonl.gz").write_bytes(gzip.compress(lines("b", 30).encode()))
    packed = pa.compress(lines("c", 30).encode(), codec="zstd", asbytes=True)
    (directory / "below" / "c.jsonl.zst").write_bytes(packed)
    (directory / "d.csv").write_text("text\n" + "".join(f"row {i}\n" for i in range(40)))
    table = pa.table({"text": [f"parquet {i}" for i in range(90)]})
    pa.parquet.write_table(table, directory / "e.parquet", row_group_size=10)
    with pa.ipc.new_file(directory / "f.arrow", table.schema) as file:
        file.write_table(table, max_chunksize=10)
    (directory / "g.txt").write_text("a text\n" * 30)
    (directory / "h.md").write_bytes("a text\n".encode("utf-16"))
    (directory / "empty.txt").touch()
    return directory


OPTIONS = ("--unit-bytes", "2500", "--validation-fraction", "0.2", "--shard-tokens", "800")


def run(source, output, *args):
    return prepare.main([str(source), "--output", str(output), *OPTIONS, *args])


@pytest.fixture(scope="module")
def reference(corpus, tmp_path_factory):
    output = tmp_path_factory.mktemp("reference") / "out"
    run(corpus, output, "--workers", "1")
    return snapshot(output)


@pytest.fixture
def uploaded(corpus, bucket):
    for path in corpus.rglob("*"):
        if path.is_file() and path.stat().st_size:  # the emulator of GCS stores nothing empty
            name = path.relative_to(corpus).as_posix()
            files.write(f"{bucket}/in/{name}", path.read_bytes())
    return bucket


def objects(url):
    names = [name for name in buckets.keys(url) if name != "train.toml"]
    return {name: files.read(f"{url}/{name}") for name in names}


@pytest.mark.parametrize(
    "server", ["gs", pytest.param("s3", marks=pytest.mark.slow)], indirect=True
)
def test_bucket_to_bucket_matches_local_disks(uploaded, reference, server):
    server.fail(5)
    run(f"{uploaded}/in", f"{uploaded}/out", "--workers", "2")
    assert server.refused > 10
    server.throttle(0)
    assert objects(f"{uploaded}/out") == reference
    shards = TokenShards(f"{uploaded}/out/train", "*.npy", 16, vocab_size=257)
    assert shards.tokens == sum(
        len(np.load(io.BytesIO(data)))
        for name, data in reference.items()
        if name.startswith("train/shard")
    )


@ONE_SERVICE
def test_bucket_to_local_disk_matches(uploaded, reference, tmp_path, server):
    server.fail(3, ("cut", 503))
    run(f"{uploaded}/in/", tmp_path / "out", "--workers", "1")
    assert snapshot(tmp_path / "out") == reference


def test_single_unit_keeps_its_names_in_a_bucket(corpus, bucket, tmp_path):
    path = corpus / "a.jsonl"
    for output in (tmp_path / "out", f"{bucket}/out"):
        prepare.main([str(path), "--output", str(output), "--tokenizer", "bpe", "--workers", "1"])
    assert objects(f"{bucket}/out") == snapshot(tmp_path / "out")
    assert "train/shard_00000.npy" in objects(f"{bucket}/out")


@ONE_SERVICE
def test_interrupted_run_is_refused_by_readers_and_resumes(
    uploaded, reference, monkeypatch, capsys
):
    encode, encoded = ingest.encode, []

    def limited(*args):
        if len(encoded) == 4:
            raise Interrupted
        encoded.append(args)
        return encode(*args)

    monkeypatch.setattr(ingest, "encode", limited)
    output = f"{uploaded}/out"
    with pytest.raises(Interrupted):
        run(f"{uploaded}/in", output, "--workers", "1")
    assert f"finished parts stay in {output}" in capsys.readouterr().err
    with pytest.raises(UserError, match=rf"{output} is incomplete: `jaxforge prepare` is writing"):
        TokenShards(f"{output}/train", "*.npy", 16, vocab_size=257)
    encoded.clear()
    monkeypatch.setattr(ingest, "encode", encode)
    before = {name: version for name, _, version in files.entries(output)}
    finished = {name for name in before if name.startswith(".prepare/parts/00")}
    assert finished
    run(f"{uploaded}/in", output, "--workers", "1")
    assert f"resuming from {output}" in capsys.readouterr().err
    after = {name: version for name, _, version in files.entries(output)}
    shards = [name for name in before if "/shard_" in name and f"{name[-15:-10]}" < "00004"]
    assert shards
    assert all(before[name] == after[name] for name in shards)
    assert objects(output) == reference


@ONE_SERVICE
def test_existing_output_needs_overwrite(uploaded, reference):
    output = f"{uploaded}/out"
    files.write(f"{output}/train/mine.txt", b"mine")
    with pytest.raises(UserError, match=f"{output} exists; choose another --output"):
        run(f"{uploaded}/in", output)
    with pytest.raises(UserError, match=r"was not made by this command; remove it yourself"):
        run(f"{uploaded}/in", output, "--overwrite")
    files.write(f"{output}/train/manifest.json", b"{}")
    run(f"{uploaded}/in", output, "--overwrite", "--workers", "1")
    assert objects(output) == reference


def test_failure_before_anything_is_finished_leaves_nothing(bucket):
    files.write(f"{bucket}/in/a.jsonl", b"bad\n")
    with pytest.raises(UserError, match=r"in/a\.jsonl:1: not JSON"):
        run(f"{bucket}/in", f"{bucket}/out", "--tokenizer", "bpe")
    assert buckets.keys(f"{bucket}/out") == []


def test_bucket_has_one_writer(uploaded):
    with run_lock.RunLock(remote_path(f"{uploaded}/out/.prepare")) as lock:
        lock.take()
        with pytest.raises(UserError, match=r"another process is writing .*/out; wait for it"):
            run(f"{uploaded}/in", f"{uploaded}/out")


def remote_path(url):
    from jaxforge.storage import urls

    return urls.path(url)


@ONE_SERVICE
def test_other_options_start_over(uploaded, monkeypatch, capsys):
    encode = ingest.encode
    monkeypatch.setattr(ingest, "encode", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(f"{uploaded}/in", f"{uploaded}/out", "--workers", "1")
    assert read_json(remote_path(f"{uploaded}/out/.prepare/journal.json"))
    monkeypatch.setattr(ingest, "encode", encode)
    run(f"{uploaded}/in", f"{uploaded}/out", "--workers", "1", "--format", "bin")
    assert "starting over: --format was npy, and is bin" in capsys.readouterr().err
    assert not [name for name in buckets.keys(f"{uploaded}/out") if name.endswith(".npy")]


def test_missing_and_binary_inputs_are_named(bucket, tmp_path):
    with pytest.raises(UserError, match=rf"INPUT {bucket}/none does not exist, or is empty"):
        run(f"{bucket}/none", tmp_path / "out")
    files.write(f"{bucket}/in/a.txt", b"a\0b")
    with pytest.raises(UserError, match=r"1 file\(s\) hold NUL bytes, .*in/a\.txt"):
        run(f"{bucket}/in", tmp_path / "out")


def test_object_that_never_arrives_is_an_error_with_its_name(bucket, server, monkeypatch):
    files.write(f"{bucket}/a.txt", b"a" * 1000)
    (file,) = remote_input.list_files(f"{bucket}/a.txt")
    monkeypatch.setattr(files, "DATA_PATIENCE_SEC", 0.5)
    server.throttle(1)
    with pytest.raises(StorageError, match=r"/a\.txt: .* bytes 0 to 999 failed, attempts: \d"):
        remote_input.open_input(file.path).read()
    server.forbid_after(0)
    with pytest.raises(UserError, match=r"/a\.txt: 403 Forbidden"):
        remote_input.open_input(file.path).read()


def test_ranged_file_reads_like_a_file(bucket, monkeypatch):
    data = random.Random(1).randbytes(5000)
    files.write(f"{bucket}/a", data)
    monkeypatch.setattr(remote_input, "_FIRST_BLOCK", 64)
    monkeypatch.setattr(remote_input, "_BLOCK", 500)
    file = remote_input.open_input(remote_input.RemotePath(f"{bucket}/a", len(data)))
    assert file.read() == data
    expected, choice = io.BytesIO(data), random.Random(2)
    for _ in range(60):
        position, n = choice.randrange(5200), choice.randrange(900)
        assert file.seek(position) == expected.seek(position)
        assert file.read(n) == expected.read(n)
    assert file.seek(-10, 2) == expected.seek(-10, 2)
    assert file.read() == expected.read()


@pytest.mark.parametrize(
    ("server", "moment", "large"),
    [
        ("s3", "before", 500), ("s3", "while", 5000), ("gs", "before", 5000), ("gs", "while", 500),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (
            ("s3", "before", 5000), ("s3", "while", 500),
            ("gs", "before", 500), ("gs", "while", 5000),
        )),
    ],
    indirect=["server"],
)  # fmt: skip
def test_changed_object_raises(bucket, large, moment, monkeypatch):
    """The new object has as many bytes as the old one, and another second of modification."""
    monkeypatch.setattr("jaxforge.data.corpus.files.LARGE", large)
    url, data = f"{bucket}/in/a.jsonl", b'{"text": "line"}\n' * 100
    files.write(url, data)
    [source] = find_inputs([url])
    parts = text_parts([source], skip_bad=True)
    if moment == "while":
        next(parts)
    time.sleep(1.1)
    files.write(url, data.replace(b"line", b"LINE"))
    with pytest.raises(InputChangedError, match=r"a\.jsonl changed since it was planned: "):
        list(parts)
    files.write(url, data[:100])
    with pytest.raises(InputChangedError, match=r"it had .* bytes, and has"):
        source.check_unchanged()
    (urls.path(url)).unlink()
    with pytest.raises(InputChangedError, match="it does not exist any more"):
        source.check_unchanged()


class Hub(http.server.BaseHTTPRequestHandler):
    """The requests of the Hub that listing and reading a dataset makes."""

    files: dict  # by path in the repository
    requests = bodies = 0

    def do_GET(self):
        path = unquote(urlparse(self.path).path)
        tree, resolve = "/api/datasets/me/data/tree/main", "/datasets/me/data/resolve/main/"
        if self.is_refused():
            return
        if path.startswith(tree):
            below = path.removeprefix(tree).strip("/")
            self.answer_json([self.info(name) for name in self.files if name.startswith(below)])
        elif path.startswith(resolve):
            data = self.files[path.removeprefix(resolve)]
            first, last = self.headers["range"].removeprefix("bytes=").split("-")
            part = data[int(first) : int(last) + 1]
            type(self).bodies += 1
            is_cut = self.bodies in (2, 5)
            self.send_response(206)
            self.send_header("Content-Length", str(len(part)))
            self.end_headers()
            self.wfile.write(part[: len(part) // 2] if is_cut else part)
        else:
            self.answer_json({"id": "me/data", "sha": "0" * 40})

    def do_POST(self):
        query = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        if not query:
            query = {"paths": []}
        known = [self.info(name) for name in query["paths"] if name in self.files]
        folders = [
            {"type": "directory", "path": name, "oid": "0"}
            for name in query["paths"]
            if any(file.startswith(name + "/") for file in self.files)
        ]
        if not self.is_refused():
            self.answer_json([*known, *folders])

    def is_refused(self):
        type(self).requests += 1
        refuse = self.requests in (5, 10, 15)
        if refuse:
            self.send_error({5: 503, 10: 429, 15: 500}[self.requests])
        return refuse

    def info(self, name):
        data = self.files[name]
        return {"type": "file", "path": name, "size": len(data),
                "oid": hashlib.sha1(data).hexdigest()}  # fmt: skip

    def answer_json(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(corpus, monkeypatch):
    from huggingface_hub import HfFileSystem

    files = {
        f"data/{path.relative_to(corpus).as_posix()}": path.read_bytes()
        for path in corpus.rglob("*")
        if path.is_file()
    }
    Handler = type("Handler", (Hub,), {"files": files})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        system = HfFileSystem(endpoint=url, token=False, skip_instance_cache=True)
        key = len("hf://")
        monkeypatch.setattr("fsspec.core.url_to_fs", lambda url: (system, url[key:]))
        yield Handler
        server.shutdown()


@pytest.mark.parametrize("path", ["data", "data/a.jsonl"])
def test_changed_file_of_the_hub_raises(hub, path):
    source = next(iter(find_inputs([f"hf://datasets/me/data/{path}"])))
    parts = text_parts([source])
    next(parts)
    hub.files["data/a.jsonl"] = hub.files["data/a.jsonl"].replace(b"1", b"2")
    with pytest.raises(InputChangedError, match=r"a\.jsonl changed .*: its version"):
        list(parts)


@pytest.mark.slow
def test_hub_to_local_disk_matches(hub, reference, tmp_path):
    run("hf://datasets/me/data/data", tmp_path / "out", "--workers", "1")
    assert hub.requests > 15
    assert hub.bodies > 5
    assert snapshot(tmp_path / "out") == reference


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("hf://models/a/b", "write hf://datasets/OWNER/NAME"),
        ("hf://datasets/a", "write hf://datasets/OWNER/NAME"),
        ("ftp://a/b", "ftp:// is not supported"),
        ("gs://bucket", "has no directory in the bucket"),
    ],
)
def test_wrong_locations_are_usage_errors(location, message, tmp_path):
    with pytest.raises(UserError, match=message):
        run(location, tmp_path / "out")
