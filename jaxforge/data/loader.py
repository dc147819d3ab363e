"""Batches as a pure function of (config, seed, position), on any number of hosts and devices.

The index spaces:

    position    counts sequences over the whole run, epochs included: 0, 1, 2, ...
    index       a sequence of the source: `order[position]`
    update      one optimizer step; it covers `accum * rows` consecutive positions
    microbatch  `rows` consecutive positions of an update
    row         a sequence within its microbatch; rows are what the mesh splits

so that, from `first` on,  position = first + (update * accum + microbatch) * rows + row.
A process reads only the rows that its devices hold.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from jaxforge.config.data import DataConfig
from jaxforge.config.job import JobConfig
from jaxforge.data.order import GrainOrder, Order, TorchOrder
from jaxforge.data.packing import IGNORE, split_packed, split_window
from jaxforge.data.tokenizer import load_tokenizer
from jaxforge.data.tokens import SyntheticTokens, TokenShards
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import batch_sharding

Example = dict[str, np.ndarray]
"""`input_ids`, `labels`, optionally `doc_ids`: int32 [seq]."""

_AHEAD = 2  # batches on the devices: the one in use and the next


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Sequences in random access.

    Attributes:
        source: windows of seq_len + 1 tokens.
        split: window -> example.
    """

    source: TokenShards | SyntheticTokens
    split: Callable[[np.ndarray], Example]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Example:
        return self.split(self.source[index])


def open_training_data(config: JobConfig) -> Dataset:
    """The training set: token shards, or synthetic tokens where no source is named.

    Raises:
        UserError: shards are missing, damaged or do not fit the model.
    """
    if not config.data.dataset_path:
        seed = data_seed(config)
        source = SyntheticTokens(config.model.vocab_size, config.train.seq_len, seed)
        return Dataset(source, split_window)
    return _open_shards(config, "data")


def open_eval_data(config: JobConfig) -> Dataset:
    """The evaluation set. Packed like the training set, so that losses compare."""
    return _open_shards(config, "eval")


def data_seed(config: JobConfig) -> int:
    """`train.data_seed`, by default `train.seed`."""
    return config.train.seed if config.train.data_seed is None else config.train.data_seed


def training_batches(
    config: JobConfig, mesh: Mesh, dataset: Dataset, first: int, n_updates: int
) -> Iterator[dict[str, jax.Array]]:
    """Batches [accum, rows, seq] of `n_updates` updates from sample position `first` on.

    Each is on its devices before it is asked for.
    """
    rows = config.train.microbatch_size(data_parallel_size(mesh))
    order = training_order(config.data, len(dataset), data_seed(config), rows)
    accum = config.train.grad_accum_steps
    layout = _Layout(mesh, accum, rows, config.train.seq_len)
    updates = _Updates(dataset, order, layout, first, n_updates)
    threads = config.data.num_workers
    options = grain.ReadOptions(
        num_threads=threads, prefetch_buffer_size=threads * config.data.prefetch_factor
    )
    return _to_devices(iter(grain.MapDataset.source(updates).to_iter_dataset(options)), layout)


def training_order(config: DataConfig, n: int, seed: int, rows: int) -> Order:
    """Position -> index, as `data.order` and `data.shuffle` say."""
    if config.order == "torch":
        return TorchOrder(n, seed, config.shuffle, rows)
    return GrainOrder(n, seed, config.shuffle)


def eval_batches(config: JobConfig, mesh: Mesh, dataset: Dataset) -> Iterator[dict[str, jax.Array]]:
    """Batches [1, rows, seq] over the whole set in file order, once.

    The last batch is filled up with rows whose labels are all ignored.
    """
    rows = config.train.microbatch_size(data_parallel_size(mesh))
    layout = _Layout(mesh, 1, rows, config.train.seq_len)
    n_batches = -(-len(dataset) // rows)
    updates = _Updates(_Padded(dataset), range(n_batches * rows), layout, 0, n_batches)
    return _to_devices((updates[i] for i in range(n_batches)), layout)


def _open_shards(config: JobConfig, section: Literal["data", "eval"]) -> Dataset:
    source = config.data if section == "data" else config.eval
    shards = TokenShards(
        source.dataset_path,
        source.file_pattern,
        config.train.seq_len,
        vocab_size=config.model.vocab_size,
        token_dtype=config.data.token_dtype,
        section=section,
    )
    if not config.data.pack_sequences:
        return Dataset(shards, split_window)
    eos = _eos_id(config.data, shards)
    return Dataset(shards, lambda window: split_packed(window, eos))


def _eos_id(config: DataConfig, shards: TokenShards) -> int:
    """What separates documents: the config's word first, then the manifest's, the tokenizer's."""
    if config.eos_token_id is not None:
        return config.eos_token_id
    if shards.manifest is not None and shards.manifest.eos_id is not None:
        return shards.manifest.eos_id
    eos = load_tokenizer(config.tokenizer_path).eos_id if config.tokenizer_path else None
    if eos is None:
        raise UserError(
            "data.pack_sequences needs the id of the token that ends a document: set "
            "data.eos_token_id, or data.tokenizer_path to a tokenizer that has one"
        )
    return eos


class _Padded:
    """A dataset that goes on after its end with examples that count for nothing."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(self, index: int) -> Example:
        if index < len(self._dataset):
            return self._dataset[index]
        example = dict(self._dataset[0])
        example["labels"] = np.full_like(example["labels"], IGNORE)
        return example


class _Layout:
    """Shape and sharding of a batch, and which of its rows this process reads."""

    def __init__(self, mesh: Mesh, accum: int, rows: int, seq_len: int) -> None:
        self.accum, self.rows = accum, rows
        self.shape = (accum, rows, seq_len)
        self.sharding = batch_sharding(mesh)
        slices = self.sharding.addressable_devices_indices_map(self.shape).values()
        parts = {index[1].indices(rows) for index in slices if index is not None}
        self.local_rows = sorted({row for part in parts for row in range(*part)})
        self._offsets = {row: offset for offset, row in enumerate(self.local_rows)}

    def put(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global arrays from this process's rows [accum, local rows, seq]."""
        return {name: self._put(array) for name, array in local.items()}

    def _put(self, local: np.ndarray) -> jax.Array:
        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[1].indices(self.rows)
            offset = self._offsets[start]
            return local[:, offset : offset + stop - start]

        return jax.make_array_from_callback(self.shape, self.sharding, of_device)


class _Updates:
    """This process's rows of each update, in random access: what Grain reads and prefetches."""

    def __init__(
        self,
        dataset: "Dataset | _Padded",
        order: Order | range,
        layout: _Layout,
        first: int,
        n_updates: int,
    ) -> None:
        self._dataset, self._order, self._layout = dataset, order, layout
        self._first, self._n_updates = first, n_updates

    def __len__(self) -> int:
        return self._n_updates

    def __getitem__(self, update: int) -> dict[str, np.ndarray]:
        accum, rows = self._layout.accum, self._layout.rows
        start = self._first + int(update) * accum * rows
        examples = [
            self._dataset[self._order[start + microbatch * rows + row]]
            for microbatch in range(accum)
            for row in self._layout.local_rows
        ]
        shape = (accum, len(self._layout.local_rows), -1)
        return {
            name: np.stack([example[name] for example in examples]).reshape(shape)
            for name in examples[0]
        }


def _to_devices(
    batches: Iterator[dict[str, np.ndarray]], layout: _Layout
) -> Iterator[dict[str, jax.Array]]:
    """Starts the transfer of the next batch before the current one is used."""
    ahead: collections.deque[dict[str, jax.Array]] = collections.deque()
    for batch in batches:
        ahead.append(layout.put(batch))
        if len(ahead) == _AHEAD:
            yield ahead.popleft()
    yield from ahead
