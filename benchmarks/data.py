"""Tokens per second of the loader, against torch's DataLoader on the same shards.

    python benchmarks/data.py [--quick]

Both shuffle, read windows from memory maps and return inputs and labels on the device. They
alternate in one run with the same number of workers: threads in jaxforge, processes in torch.
"""

import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
import numpy as np
import results
import torch
from torch.utils.data import DataLoader

from jaxforge.config.job import JobConfig
from jaxforge.data import loader, sources
from jaxforge.data.corpus.manifest import VERSION, Manifest
from jaxforge.data.corpus.writer import ShardWriter
from jaxforge.parallel.mesh import make_mesh

QUICKSTART = 3500  # tokens per second that configs/quickstart.toml trains on two cores
SHAPES = {"quickstart: 8 x 256 tokens": (8, 256), "64 x 2048 tokens": (64, 2048)}
TOKENS = 100_000_000
VOCABULARY = 4096
SHARDS = 4
WORKERS = (0, 4)  # 4 is the default of data.num_workers


class TorchShards(torch.utils.data.Dataset):
    """Dataset of windows as torch users write it: memory maps, items of int64 tensors."""

    def __init__(self, directory: Path, seq: int) -> None:
        self._seq = seq
        self._shards = [np.load(path, mmap_mode="r") for path in sorted(directory.glob("*.npy"))]
        self._per_shard = [len(shard) // (seq + 1) for shard in self._shards]
        self._ends = np.cumsum(self._per_shard)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        shard = int(np.searchsorted(self._ends, index, side="right"))
        start = (index - (int(self._ends[shard]) - self._per_shard[shard])) * (self._seq + 1)
        window = torch.from_numpy(
            self._shards[shard][start : start + self._seq + 1].astype(np.int64)
        )
        return {"input_ids": window[:-1], "labels": window[1:]}


def write_shards(directory: Path, tokens: int) -> None:
    """Write shards of random tokens."""
    shard = tokens // SHARDS
    rng = np.random.default_rng(0)
    with ShardWriter(directory, dtype="uint16", shard_tokens=shard) as writer:
        for _ in range(SHARDS):
            writer.add(rng.integers(0, VOCABULARY, shard).astype(np.uint16))
        Manifest.of_shards(
            writer.complete(), version=VERSION, dtype="uint16", documents=0, eos_id=None,
            vocab_size=VOCABULARY, tokenizer="none", tokenizer_sha256="",
        ).write(directory)  # fmt: skip


def jaxforge_batches(directory: Path, shape: tuple[int, int], workers: int) -> Iterator[object]:
    """Yield batches of the training loader."""
    rows, seq = shape
    config = JobConfig.model_validate(
        {
            "model": {"vocab_size": VOCABULARY, "max_seq_len": seq},
            "train": {"batch_size": rows, "seq_len": seq},
            "data": {"dataset_path": str(directory), "num_workers": workers},
        }
    )
    mesh = make_mesh(config, jax.devices()[:1])
    dataset = sources.open_training_data(config)
    return loader.training_batches(config, mesh, dataset, 0, 10_000_000)


def torch_batches(directory: Path, shape: tuple[int, int], workers: int) -> Iterator[object]:
    """Yield batches of a DataLoader, epoch after epoch."""
    rows, seq = shape
    data = DataLoader(
        TorchShards(directory, seq),
        batch_size=rows,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        persistent_workers=workers > 0,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(data))
    if not torch.cuda.is_available():
        return batches
    return ({name: tokens.to("cuda") for name, tokens in batch.items()} for batch in batches)


def measure(
    makers: dict[str, Callable[[], Iterator[object]]], rounds: int, seconds: float
) -> dict[str, float]:
    """Return the median batches per second of each, alternating, after the first batches."""
    speeds: dict[str, list[float]] = {name: [] for name in makers}
    for _, (name, make) in itertools.product(range(rounds), makers.items()):
        batches = make()
        for _ in range(50):
            next(batches)
        started, n = time.perf_counter(), 0
        while time.perf_counter() - started < seconds:
            last = next(batches)
            n += 1
        jax.block_until_ready(last)
        speeds[name].append(n / (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in speeds.items()}


def main() -> None:
    """Print the table and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    results.leave_room()
    rounds, seconds = (1, 0.5) if quick else (7, 2.0)
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        shards = Path(directory) / "train"
        write_shards(shards, TOKENS // 10 if quick else TOKENS)
        for case, workers in itertools.product(SHAPES, WORKERS):
            shape = SHAPES[case]
            makers = {
                "ours": partial(jaxforge_batches, shards, shape, workers),
                "torch DataLoader": partial(torch_batches, shards, shape, workers),
            }
            speeds = measure(makers, rounds, seconds)
            tokens = {name: round(shape[0] * shape[1] * speed) for name, speed in speeds.items()}
            named = f"{case}, {workers} workers"
            if shape == SHAPES["quickstart: 8 x 256 tokens"]:
                need = ("quickstart's need", QUICKSTART)
                rows.append(results.Row(named, tokens["ours"], *need, "tokens/s"))
            peer = ("torch DataLoader", tokens["torch DataLoader"])
            rows.append(results.Row(named, tokens["ours"], *peer, "tokens/s"))
    note = "torch's workers are processes, and cost most where they are more than the cores"
    results.report("data", rows, ("jax", "grain", "torch"), notes=[note], write=not quick)


if __name__ == "__main__":
    main()
