"""Tokens per second of the loader from a bucket, against the same shards on a local disk.

    python benchmarks/bucket_data.py [--quick]

Another process of this machine serves the bucket. It answers after 50 ms and refuses 1 % of the
requests (`bucket_server.py`). Two questions are measured:

- Speed: batches are read as fast as they come, in rotation from disk, bucket and cache.
- Waiting: a step takes 100 ms, in which the loader reads ahead. After the tenth, the batch of each
  step must have been read when the step asks for it.
"""

import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import results
from data import VOCABULARY, write_shards

from jaxforge.config.job import JobConfig
from jaxforge.data import loader, sources
from jaxforge.parallel.mesh import make_mesh
from jaxforge.storage.requests import traffic

ROWS, SEQ = 16, 4096
TOKENS = 100_000_000
DELAY, FAILURES = 0.05, 0.01
STEP = 0.1  # seconds of a step; 655,360 tokens/s
FIRST = 10  # steps that may wait


@contextlib.contextmanager
def bucket(directory: Path) -> Iterator[str]:
    """Serve a directory, and yield its URL."""
    script = Path(__file__).with_name("bucket_server.py")
    options = [f"--delay={DELAY}", f"--failures={FAILURES}"]
    command = [sys.executable, str(script), str(directory), *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout
        os.environ |= {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.stdout.readline().strip()}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        yield "s3://bucket"
        server.terminate()


def open_batches(path: str, cache: Path | None = None, seed: int = 0) -> Iterator[object]:
    """Return batches of the training loader with default settings."""
    config = JobConfig.model_validate(
        {
            "model": {"vocab_size": VOCABULARY, "max_seq_len": SEQ},
            "train": {"batch_size": ROWS, "seq_len": SEQ, "seed": seed},
            "data": {"dataset_path": path, "cache_dir": str(cache or ""), "cache_gb": 1.0},
        }
    )
    mesh = make_mesh(config, jax.devices()[:1])
    dataset = sources.open_training_data(config)
    return iter(loader.training_batches(config, mesh, dataset, 0, 10_000_000))


def tokens_per_second(batches: Iterator[object], seconds: float) -> float:
    """Return the speed of reading after the first batches."""
    for _ in range(FIRST):
        next(batches)
    started, n = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        last = next(batches)
        n += 1
    jax.block_until_ready(last)
    return n * ROWS * SEQ / (time.perf_counter() - started)


@contextlib.contextmanager
def recorded() -> Iterator[set[int]]:
    """Yield the numbers of the batches that the loader has read, while it reads."""
    complete: set[int] = set()
    read = loader.UpdateBatches.__getitem__

    def read_and_record(self: loader.UpdateBatches, item: int) -> list[dict[str, Any]]:
        batches = read(self, item)
        assert len(batches) == 1, "small batches share an item"
        complete.add(item)
        return batches

    with mock.patch.object(loader.UpdateBatches, "__getitem__", read_and_record):
        yield complete


def wait_in_steps(path: str, cache: Path | None, steps: int) -> tuple[list[bool], list[float]]:
    """Return whether the batch of each step was read in time, and the seconds of its transfer."""
    was_read, waited = [], []
    with recorded() as complete:
        batches = open_batches(path, cache)
        for step in range(steps):
            was_read.append(step + 1 in complete)  # the transfer to devices is one batch ahead
            started = time.perf_counter()
            next(batches)
            waited.append(time.perf_counter() - started)
            time.sleep(STEP)
    return was_read[FIRST:], waited[FIRST:]


def measure_waits(
    paths: Mapping[str, tuple[str, Path | None]], steps: int
) -> tuple[list[str], int]:
    """Return a note on each store, and the number of steps that waited for reading."""
    notes, late = [], 0
    for store, (path, cache) in paths.items():
        before = traffic()
        was_read, waited = wait_in_steps(path, cache, steps)
        late += was_read.count(False)
        counts = traffic().since(before).items()
        requests = ", ".join(f"{name.partition('/')[2]} {value:,.3g}" for name, value in counts)
        notes.append(
            f"{store}: the batch of {was_read.count(False)} of {len(was_read)} steps after the "
            f"first {FIRST} was not read in time; the transfer took "
            f"{1000 * statistics.median(waited):.2f} ms, at most {1000 * max(waited):.2f} ms "
            f"({requests})"
        )
    return notes, late


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    rounds, seconds, steps = (1, 2.0, 30) if quick else (5, 5.0, 300)
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        write_shards(directory / "served" / "train", TOKENS // 10 if quick else TOKENS)
        with bucket(directory / "served") as url:
            cache = directory / "cache"
            stores = {
                "local disk": (str(directory / "served" / "train"), None),
                "bucket": (f"{url}/train", None),
                "bucket, with an empty cache": (f"{url}/train", cache),
                "bucket, with a full cache": (f"{url}/train", cache),
            }
            notes, late = measure_waits(stores, steps)
            del stores["bucket, with an empty cache"]
            speeds: dict[str, list[float]] = {store: [] for store in stores}
            for _ in range(rounds):
                for store, (path, where) in stores.items():
                    speeds[store].append(tokens_per_second(open_batches(path, where), seconds))
    medians = {store: statistics.median(each) for store, each in speeds.items()}
    rows = [
        results.Row(f"{store}, {ROWS} x {SEQ} tokens", round(medians[store]), *peer, "tokens/s")
        for store in list(stores)[1:]
        for peer in (
            ("need of steps of 100 ms", round(ROWS * SEQ / STEP)),
            ("local disk", round(medians["local disk"])),
        )
    ]
    priority = f"nice {os.nice(0)} for server and loader, on a machine that others use"
    settings = f"answers after {1000 * DELAY:g} ms, {FAILURES:.0%} of the requests refused"
    write = not (quick or late)
    results.report("bucket_data", rows, ("jax", "grain", "tensorstore"),
                   notes=[settings, priority, *notes], write=write)  # fmt: skip
    if not (write or quick):
        raise SystemExit(f"not published: {late} steps waited for reading")


if __name__ == "__main__":
    main()
