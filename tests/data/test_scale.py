"""Costs of large data, counted in executed lines and allocated bytes: no clock, no load."""

import base64
import io
import sys
import tracemalloc
import zlib
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxforge.config.job import JobConfig
from jaxforge.data import sources
from jaxforge.data.corpus.manifest import BLOCK_BYTES, EncodedHashes, Manifest, Shard
from jaxforge.data.dataset import Mixture
from jaxforge.data.fingerprint import fingerprints
from jaxforge.data.segments import block_counts
from jaxforge.data.tokens import TokenShards
from jaxforge.parallel.mesh import make_mesh
from jaxforge.state.progress import Progress
from jaxforge.training.training_data import Phases, batch_ramp, batches_from

SEQ = 127


def sparse_shards(directory, shards, tokens, dtype="<u2"):
    """Write token files of zeros that occupy no disk, and their manifest with hashes."""
    directory.mkdir()
    head = io.BytesIO()
    layout = {"descr": dtype, "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(head, layout)
    blocks, tail = divmod(np.dtype(dtype).itemsize * tokens, BLOCK_BYTES)
    assert not tail
    crc32 = zlib.crc32(bytes(BLOCK_BYTES)).to_bytes(4, "little") * blocks
    files = []
    for number in range(shards):
        with (directory / f"shard_{number:05}.npy").open("wb") as file:
            file.write(head.getvalue())
            file.truncate(len(head.getvalue()) + blocks * BLOCK_BYTES)
        name = f"shard_{number:05}.npy"
        files.append(Shard(name, tokens, 0, base64.b64encode(crc32).decode()))
    total = shards * tokens
    name = np.dtype(dtype).name
    Manifest(1, name, total, shards, 0, 0, 256, "byte", "0", tuple(files)).write(directory)


def config_of(**data):
    return JobConfig.model_validate(
        {
            "model": {"vocab_size": 256, "max_seq_len": SEQ},
            "train": {"seq_len": SEQ, "batch_size": 4, "max_steps": 10**8},
            "data": {"num_workers": 0, **data},
        }
    )


def executed_lines(run):
    """Return the number of lines of Python that a call executes, and its result."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        result = run()
    finally:
        sys.settrace(before)
    return count, result


def opened(config):
    dataset = sources.open_training_data(config)
    fingerprints(config.data, dataset, {})
    return dataset


def first_batch(config, dataset, step):
    mesh = make_mesh(config, jax.devices()[:1])
    progress = Progress(step=step, samples=step * 4)
    phases, ramp = Phases.of(config.data), batch_ramp(config, mesh)
    return jax.device_get(next(batches_from(progress, config, mesh, dataset, phases, ramp)))


def mixture_config(directory, datasets):
    tables = [
        {"name": f"{n:03}", "path": str(directory / f"{n:03}"), "weight": 1 + n % 5}
        for n in range(datasets)
    ]
    weights = {table["name"]: 1 + n % 3 for n, table in enumerate(tables)}
    return config_of(datasets=tables, phases=[{"start_step": 7000, "dataset_weights": weights}])


def test_opening_shards_executes_lines_in_proportion_to_files(tmp_path):
    counts = []
    for shards in (50, 400):
        sparse_shards(tmp_path / str(shards), shards, BLOCK_BYTES)
        config = config_of(dataset_path=str(tmp_path / str(shards)))
        opened(config)  # imports
        counts.append(executed_lines(lambda config=config: opened(config))[0])
    assert counts[1] < 8.5 * counts[0]


def test_memory_of_a_trillion_tokens_is_below_a_gigabyte(tmp_path):
    """A shard of ten million tokens has 305 hashes; a trillion tokens are 100,000 such shards."""
    peaks = []
    for shards in (100, 500):
        sparse_shards(tmp_path / str(shards), shards, 305 * BLOCK_BYTES // 2)
        config = config_of(dataset_path=str(tmp_path / str(shards)))
        opened(config)
        tracemalloc.start()
        opened(config)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    per_shard = (peaks[1] - peaks[0]) / 400
    assert 100_000 * per_shard < 700e6  # Python with JAX has 230 MiB


def test_opening_datasets_executes_lines_in_proportion_to_their_number(tmp_path):
    for number in range(160):
        sparse_shards(tmp_path / f"{number:03}", 1, BLOCK_BYTES)
    counts, batches = [], []
    for datasets in (20, 160):
        config = mixture_config(tmp_path, datasets)
        dataset = opened(config)
        first_batch(config, dataset, 0)
        counts.append(executed_lines(lambda config=config: opened(config))[0])
        indices = np.arange(4) * len(dataset) // 4
        dataset.batch(indices)
        batches.append(executed_lines(lambda d=dataset, i=indices: d.batch(i))[0])
        start = executed_lines(lambda c=config, d=dataset: first_batch(c, d, 10_000))[0]
        counts.append(start)
    assert counts[2] < 8.5 * counts[0]  # opening
    assert counts[3] < 8.5 * counts[1]  # the first batch
    assert batches[1] <= batches[0]


@pytest.mark.parametrize("order", ["grain", "torch"])
@pytest.mark.parametrize("mixes", [False, True])
def test_resume_at_step_ten_million_executes_as_many_lines_as_at_step_hundred(
    tmp_path, order, mixes
):
    for number in range(2):
        sparse_shards(tmp_path / f"{number:03}", 1, BLOCK_BYTES)
    config = mixture_config(tmp_path, 2) if mixes else config_of(dataset_path=str(tmp_path / "000"))
    data = config.data.model_copy(update={"order": order, "phases": ()})
    config = config.model_copy(update={"data": data})
    dataset = opened(config)
    first_batch(config, dataset, 0)
    early, late = (
        executed_lines(lambda step=step: first_batch(config, dataset, step))[0]
        for step in (100, 10**7)
    )
    assert late < 1.1 * early


def test_windows_of_a_trillion_tokens_are_where_they_belong(tmp_path):
    """Nearly 2^33 windows in 1,000 files of a billion tokens."""
    tokens = 10**9 // BLOCK_BYTES * BLOCK_BYTES
    sparse_shards(tmp_path / "d", 2, BLOCK_BYTES)
    (tmp_path / "d" / "manifest.json").unlink()
    head = io.BytesIO()
    layout = {"descr": "<u2", "fortran_order": False, "shape": (tokens,)}
    np.lib.format.write_array_header_1_0(head, layout)
    per_file = tokens // (SEQ + 1)
    marked = {0: (0, 0), 3 * per_file: (3, 0), 777 * per_file + 5: (777, 5),
              1000 * per_file - 1: (999, per_file - 1)}  # fmt: skip
    size = len(head.getvalue())
    files = []
    for number in range(1000):
        path = tmp_path / "d" / f"shard_{number:05}.npy"
        with path.open("wb") as file:
            file.write(head.getvalue())
            file.truncate(size + 2 * tokens)
            for file_number, window in marked.values():
                if file_number == number:
                    file.seek(size + 2 * window * (SEQ + 1))
                    file.write(np.arange(SEQ + 1, dtype="<u2").tobytes())
        files.append(Shard(path.name, tokens, 255))
    total = 1000 * tokens
    Manifest(1, "uint16", total, 1, 255, 0, 256, "byte", "0", tuple(files)).write(tmp_path / "d")
    shards = TokenShards(tmp_path / "d", "*.npy", SEQ, vocab_size=256)
    assert len(shards) == 1000 * per_file > 7.8e9
    windows = shards.batch([*marked, 1, 3 * per_file - 1])
    assert (windows[:4] == np.arange(SEQ + 1)).all()
    assert (windows[4:] == 0).all()


def test_maps_of_many_datasets_share_one_limit(tmp_path):
    """Each map has a file descriptor, and many systems allow 1,024 of them."""
    for number in range(300):
        sparse_shards(tmp_path / f"{number:03}", 1, BLOCK_BYTES)
    config = mixture_config(tmp_path, 300)
    dataset = sources.open_training_data(config)
    assert isinstance(dataset, Mixture)
    dataset.batch(range(0, len(dataset), len(dataset) // 300))
    descriptors = [name.resolve() for name in Path("/proc/self/fd").iterdir()]
    open_maps = [name for name in descriptors if tmp_path in name.parents]
    assert 0 < len(open_maps) <= 256


def test_encoded_hashes_are_those_of_the_manifest():
    for count in range(8):
        hashes = np.random.default_rng(count).integers(0, 2**32, count).astype("<u4")
        encoded = EncodedHashes(base64.b64encode(hashes.tobytes()).decode())
        assert len(encoded) == count
        assert [encoded[block] for block in range(count)] == hashes.tolist()


def test_block_counts_equal_a_search_at_every_step():
    rng = np.random.default_rng(0)
    for _ in range(200):
        weights = rng.choice([0, 1, 1, 2, rng.random(), rng.random() ** 8, 1e-9], 30)
        if weights.any():
            shares = (weights / weights.sum()).tolist()
            assert block_counts(shares, 40) == searched_block_counts(shares, 40)


def searched_block_counts(shares, block):
    """Change one count at a time, where the distance from the share is largest."""
    exact = np.array(shares) * block
    counts = np.maximum(np.floor(exact).astype(int), exact > 0)
    while left := block - counts.sum():
        sign = np.sign(left)
        can_change = (exact > 0) & (counts + sign > 0)
        counts[np.argmax(np.where(can_change, sign * (exact - counts), -np.inf))] += sign
    return counts.tolist()
