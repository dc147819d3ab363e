"""Tokens read from buckets: shared requests, the cache, and requests that fail or never end."""

import json
import logging
import zlib
from itertools import pairwise

import jax
import numpy as np
import pytest
from run_config import CONFIG

from jaxforge.commands import train
from jaxforge.data import loader, sources
from jaxforge.data.corpus.manifest import BlockHashes
from jaxforge.data.remote_tokens import GAP, LONGEST, RemoteTokens
from jaxforge.errors import StorageError, UserError
from jaxforge.parallel.mesh import make_mesh
from jaxforge.storage import files, requests, urls
from jaxforge.storage.block_cache import SMALLEST, BlockCache
from jaxforge.storage.requests import traffic
from tests.conftest import tiny_config
from tests.data.manifest_writer import ShardWriter
from tests.machine import PATIENCE

BLOCK = 32_768  # tokens of two bytes in 64 KiB
N = 6 * BLOCK - 1000


@pytest.fixture
def tokens():
    return np.random.default_rng(0).integers(0, 60_000, N).astype("<u2")


@pytest.fixture
def url(bucket, tokens):
    path = urls.path(bucket) / "t.bin"
    files.write(path, b"head" + tokens.tobytes())
    return path


@pytest.fixture
def cache(tmp_path):
    opened = BlockCache(tmp_path / "cache", 16 * SMALLEST)
    yield opened
    opened.close()


@pytest.fixture
def set_deadlines(monkeypatch):
    """Return a function that sets the deadlines of attempts and their sum."""

    def set_both(*seconds):
        monkeypatch.setattr(requests, "_DELAY_SEC", 0.01)
        monkeypatch.setattr(requests, "REQUEST_SEC", seconds)
        monkeypatch.setattr(files, "DATA_PATIENCE_SEC", sum(seconds))

    return set_both


def hashes_of(url, tokens):
    data = tokens.tobytes()
    hashes = [zlib.crc32(data[at : at + 65_536]) for at in range(0, len(data), 65_536)]
    return BlockHashes(url, 4, tokens.dtype, np.array(hashes, np.uint32))


def remote(url, tokens, cache=None, *, is_hashed=True):
    hashes = hashes_of(url, tokens) if is_hashed else None
    return RemoteTokens(url, tokens.dtype, 4, len(tokens), hashes, cache)


def requests_for(source, ranges):
    """Read ranges and return the number of requests."""
    before = traffic()
    parts = source.read(ranges)
    after = traffic()
    return [np.asarray(part) for part in parts], after.requests - before.requests


def expected_requests(blocks):
    """Count runs of sorted blocks, by the rule in the documentation."""
    blocks = sorted(set(blocks))
    count, first = 1, blocks[0]
    for before, block in pairwise(blocks):
        if block - before - 1 > GAP or block - first >= LONGEST:
            count, first = count + 1, block
    return count


@pytest.mark.parametrize("is_hashed", [True, False])
def test_near_ranges_share_requests(server, is_hashed):
    rng = np.random.default_rng(1)
    n = 100 * BLOCK - 1000
    tokens = rng.integers(0, 60_000, n).astype("<u2")
    url = urls.path(server.url("long.bin"))
    if not url.exists():
        files.write(url, b"head" + tokens.tobytes())
    source = remote(url, tokens, is_hashed=is_hashed)
    for n_ranges in (1, 3, 10, 40):
        starts = rng.integers(0, n - 70_000, n_ranges)
        ranges = [(int(start), int(start + rng.integers(1, 70_000))) for start in starts]
        parts, n_requests = requests_for(source, ranges)
        for part, (start, end) in zip(parts, ranges, strict=True):
            np.testing.assert_array_equal(part, tokens[start:end])
        blocks = [b for start, end in ranges for b in range(start // BLOCK, (end - 1) // BLOCK + 1)]
        assert n_requests == expected_requests(blocks)
    _, n_requests = requests_for(source, [(0, 100), (3 * BLOCK, 3 * BLOCK + 1)])
    assert n_requests == 1
    _, n_requests = requests_for(source, [(0, 100), (4 * BLOCK, 4 * BLOCK + 1)])
    assert n_requests == 2
    (whole,), n_requests = requests_for(source, [(0, n)])
    assert n_requests == 2
    np.testing.assert_array_equal(whole, tokens)


def test_requests_in_flight_are_shared(url, tokens):
    first, second = remote(url, tokens), remote(url, tokens)
    before = traffic()
    pending = first[10:20], second[500:600]
    assert traffic().requests - before.requests == 1
    np.testing.assert_array_equal(pending[1], tokens[500:600])
    np.testing.assert_array_equal(pending[0], tokens[10:20])


@pytest.mark.parametrize("is_hashed", [True, False])
def test_cached_blocks_need_no_request(server, url, tokens, cache, is_hashed):
    ranges = [(0, 100), (BLOCK - 5, BLOCK + 5), (N - 10, N)]
    parts, n_requests = requests_for(remote(url, tokens, cache, is_hashed=is_hashed), ranges)
    before = traffic()
    asked = server.requests
    again, n_requests = requests_for(remote(url, tokens, cache, is_hashed=is_hashed), ranges)
    assert (n_requests, server.requests - asked) == (0, 0)
    assert (traffic().hits - before.hits, traffic().misses - before.misses) == (3, 0)
    for part, other, (start, end) in zip(parts, again, ranges, strict=True):
        np.testing.assert_array_equal(part, tokens[start:end])
        np.testing.assert_array_equal(other, tokens[start:end])
    assert traffic().since(before)["bucket/cache_hit_rate"] == 1


@pytest.mark.parametrize("is_hashed", [True, False])
def test_replaced_object_is_not_read_from_cache(url, tokens, cache, is_hashed):
    np.asarray(remote(url, tokens, cache, is_hashed=is_hashed)[0:10])
    other = tokens[::-1].copy()
    files.write(url, b"head" + other.tobytes())
    from jaxforge.data import remote_tokens

    remote_tokens._version.cache_clear()  # as in another process
    part = np.asarray(remote(url, other, cache, is_hashed=is_hashed)[0:10])
    np.testing.assert_array_equal(part, other[:10])


def test_object_replaced_during_run_is_not_cached(url, tokens, cache):
    """Its blocks would have the keys of the former object."""
    source = remote(url, tokens, cache, is_hashed=False)
    np.asarray(source[0:10])
    other = tokens[::-1].copy()
    files.write(url, b"head" + other.tobytes())
    np.testing.assert_array_equal(source[BLOCK : BLOCK + 10], other[BLOCK : BLOCK + 10])
    files.write(url, b"head" + tokens.tobytes())
    np.testing.assert_array_equal(source[BLOCK : BLOCK + 10], tokens[BLOCK : BLOCK + 10])


def test_damaged_cache_is_read_from_bucket_again(url, tokens, cache):
    np.asarray(remote(url, tokens, cache)[0 : 4 * BLOCK])
    path = cache._directory / "blocks"
    data = bytearray(path.read_bytes())
    data[data.index(tokens[BLOCK : BLOCK + 100].tobytes()) + 7] ^= 1
    path.write_bytes(data)
    (part,), n_requests = requests_for(remote(url, tokens, cache), [(0, 4 * BLOCK)])
    assert n_requests == 1
    np.testing.assert_array_equal(part, tokens[: 4 * BLOCK])
    _, n_requests = requests_for(remote(url, tokens, cache), [(0, 4 * BLOCK)])
    assert n_requests == 0


def test_broken_off_answers_are_repeated(server, url, tokens):
    before = traffic()
    server.cut(2)
    np.testing.assert_array_equal(remote(url, tokens)[0:100_000], tokens[:100_000])
    assert traffic().retries - before.retries == 2


def test_stalled_request_is_repeated(server, url, tokens, set_deadlines):
    server.stall(1)
    set_deadlines(0.2, PATIENCE)
    before = traffic()
    np.testing.assert_array_equal(remote(url, tokens)[0:10], tokens[:10])
    assert traffic().retries - before.retries == 1


def test_endless_stall_is_error_with_bucket_and_object(server, url, tokens, set_deadlines):
    server.stall(100)
    set_deadlines(0.1, 0.1, 0.1)
    source = remote(url, tokens)
    pending = source.read([(0, 10), (5, 8)])
    for part in pending:
        with pytest.raises(StorageError, match=rf"^{url}: the read of bytes 4 to 65,539 failed, "
                           r"attempts: 3, in \d+ s \(no answer within 0\.1 s\)"):  # fmt: skip
            np.asarray(part)


@pytest.mark.parametrize("server", ["gs"], indirect=True)
def test_loader_raises_error_of_stalled_bucket(server, corpus, set_deadlines):
    _, in_bucket = corpus
    config = config_of(in_bucket)
    dataset = sources.open_training_data(config)
    batches = loader.training_batches(config, make_mesh(config, jax.devices()[:1]), dataset, 0, 99)
    server.stall(1000)
    set_deadlines(0.05)
    with pytest.raises(StorageError, match=rf"^{in_bucket}/shard_0000\d\.npy: .* failed"):
        next(batches)


def test_forbidden_object_is_not_repeated(server, url, tokens):
    source = remote(url, tokens)
    before = traffic()
    server.forbid_after(0)
    with pytest.raises(StorageError, match=r"t\.bin: 403 Forbidden: it was readable"):
        np.asarray(source[0:10])
    assert traffic().requests - before.requests == 1


def test_damaged_object_is_fetched_again_and_refused(url, tokens, cache, set_deadlines):
    good = hashes_of(url, tokens)
    damaged = tokens.copy()
    damaged[7] ^= 1
    files.write(url, b"head" + damaged.tobytes())
    before = traffic()
    source = RemoteTokens(url, tokens.dtype, 4, N, good, cache)
    with pytest.raises(UserError, match=r"t\.bin is damaged: bytes 4 to 65,539"):
        np.asarray(source[0:10])
    assert traffic().requests - before.requests == 3
    files.write(url, b"head" + tokens.tobytes())
    np.testing.assert_array_equal(source[0:10], tokens[:10])


@pytest.fixture
def corpus(bucket, tmp_path):
    """Shards on disk, and a copy in a bucket."""
    rng = np.random.default_rng(3)
    with ShardWriter(
        tmp_path / "data", vocab_size=256, dtype="uint16", shard_tokens=9000
    ) as writer:
        writer.add(rng.integers(0, 256, 40_000))
        writer.finish(eos_id=0, tokenizer="byte", tokenizer_sha256="x")
    remote_directory = urls.path(f"{bucket}/data")
    for path in (tmp_path / "data").iterdir():
        (remote_directory / path.name).write_bytes(path.read_bytes())
    return str(tmp_path / "data"), str(remote_directory)


def config_of(path, **data):
    data = {"dataset_path": path, "num_workers": 2, **data}
    return tiny_config(data=data, train={"batch_size": 8})


def batches_of(config, n=20):
    mesh = make_mesh(config, jax.devices()[:1])
    dataset = sources.open_training_data(config)
    read = [next(loader.eval_batches(config, mesh, dataset))]
    read += list(loader.training_batches(config, mesh, dataset, 0, n))
    return [{name: np.asarray(array) for name, array in batch.items()} for batch in read]


def test_batches_equal_those_of_disk(server, corpus, tmp_path):
    """With failing, broken and slow answers, with and without a cache."""
    local, in_bucket = corpus
    expected = batches_of(config_of(local))
    for options in ({}, {"cache_dir": str(tmp_path / "c"), "cache_gb": 0.01}, {"num_workers": 0}):
        server.throttle(19)
        server.cut(1)
        read = batches_of(config_of(in_bucket, **options))
        server.throttle(0)
        for batch, other in zip(read, expected, strict=True):
            assert batch.keys() == other.keys()
            assert all((batch[name] == other[name]).all() for name in batch)


@pytest.mark.slow
@pytest.mark.parametrize("server", ["s3"], indirect=True)
def test_run_logs_requests_and_cache_hits(server, corpus, tmp_path):
    _, in_bucket = corpus
    (tmp_path / "run.toml").write_text(CONFIG)
    cached = f"--data.cache_dir={tmp_path}/cache"
    logged = {}
    for name in ("first", "second"):
        run = tmp_path / name
        settings = [f"--config={tmp_path}/run.toml", f"--checkpoint.dir={run}", cached]
        data = [f"--data.dataset_path={in_bucket}", "--data.tokenizer_path=byte"]
        assert train.main([*settings, *data]) == 0
        lines = (run / "metrics.jsonl").read_text().splitlines()
        logged[name] = [json.loads(line) for line in lines]
    sums = {
        (name, key): sum(line.get(f"bucket/{key}", 0) for line in lines)
        for name, lines in logged.items()
        for key in ("requests", "bytes_fetched", "cache_hit_rate")
    }
    # Each of the five shards is smaller than two blocks, so its tokens are fetched once, whole. A
    # second request is possible if a batch missed both the cache and the request in flight.
    assert 2 * 40_000 <= sums["first", "bytes_fetched"] < 4 * 40_000
    assert 5 <= sums["first", "requests"] < 10
    assert (sums["second", "requests"], sums["second", "bytes_fetched"]) == (0, 0)
    rates = {line["bucket/cache_hit_rate"] for line in logged["second"]
             if "bucket/cache_hit_rate" in line}  # fmt: skip
    assert rates == {1.0}
    losses = {name: [line.get("train/loss") for line in lines] for name, lines in logged.items()}
    assert losses["first"] == losses["second"]


def test_full_disk_of_cache_does_not_stop_reading(corpus, tmp_path, monkeypatch, caplog):
    local, in_bucket = corpus
    monkeypatch.setattr("os.pwrite", lambda file, data, at: 0)
    config = config_of(in_bucket, cache_dir=str(tmp_path / "full"), cache_gb=0.01)
    for batch, other in zip(batches_of(config), batches_of(config_of(local)), strict=True):
        assert all((batch[name] == other[name]).all() for name in batch)
    warnings = [each for each in caplog.records if each.levelno == logging.WARNING]
    assert ["No space left" in each.getMessage() for each in warnings].count(True) == 1


def test_buckets_are_read_further_ahead_than_disks(corpus):
    local, in_bucket = (sources.open_training_data(config_of(path)) for path in corpus)
    data = config_of("x").data
    options = sources.read_options(data, local, 8, 32)
    assert (options.num_threads, options.prefetch_buffer_size) == (2, 4)
    options = sources.read_options(data, in_bucket, 8, 32)
    assert (options.num_threads, options.prefetch_buffer_size) == (16, 32)
    options = sources.read_options(data, in_bucket, 256, 4096)  # 2 blocks x 256 = 32 MiB
    assert (options.num_threads, options.prefetch_buffer_size) == (8, 16)
    options = sources.read_options(data, in_bucket, 10**6, 4096)
    assert (options.num_threads, options.prefetch_buffer_size) == (2, 4)
    synchronous = data.model_copy(update={"num_workers": 0})
    assert sources.read_options(synchronous, in_bucket, 8, 32).num_threads == 0
