"""Threads and batches of reading ahead.

Local files are read as `[data]` says. A request to a bucket takes 10 to 200 ms, and many must be in
flight. The threads that wait for them are limited only by the memory of their blocks.
"""

import grain

from jaxforge.config.data import DataConfig
from jaxforge.data.corpus.manifest import BLOCK_BYTES
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.tokens import TokenFiles

_THREADS = 16
"""Items that are requested from a bucket at a time, unless they are large."""
_BYTES = 256 << 20
"""Bytes of blocks that may be in memory for these items."""
_TOKEN_BYTES = 4  # at most


def read_options(
    config: DataConfig, dataset: "Dataset | Mixture", sequences: int, seq_len: int
) -> grain.ReadOptions:
    """Return the number of threads that read items, and of items that are read in advance.

    With `num_workers = 0`, nothing is read in advance.

    Args:
        config: `[data]`.
        dataset: the dataset.
        sequences: sequences of an item.
        seq_len: tokens of a sequence.
    """
    threads, ahead = config.num_workers, config.num_workers * config.prefetch_factor
    if threads and is_remote(dataset):
        blocks = sequences * (1 + -(-seq_len * _TOKEN_BYTES // BLOCK_BYTES))
        threads = max(threads, min(_THREADS, _BYTES // (blocks * BLOCK_BYTES)))
        ahead = max(ahead, 2 * threads)
    return grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)


def is_remote(dataset: Dataset | Mixture | Streaming) -> bool:
    """Return whether token files of a dataset are in a bucket."""
    if isinstance(dataset, Mixture):
        return any(is_remote(part) for part in dataset.datasets.values())
    source = getattr(dataset, "source", None)  # a registered dataset may have none
    return isinstance(source, TokenFiles) and source.is_remote
