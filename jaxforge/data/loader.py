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
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import grain
import jax
import numpy as np
from jax.sharding import Mesh

from jaxforge.config.data import DATASETS, DataConfig
from jaxforge.config.eval import EvalSource
from jaxforge.config.job import JobConfig
from jaxforge.data.huggingface import cached_shards, load_dataset
from jaxforge.data.order import GrainOrder, Order, TorchOrder
from jaxforge.data.packing import IGNORE, split_packed, split_window
from jaxforge.data.stream import StreamedTokens
from jaxforge.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_of
from jaxforge.data.tokens import SyntheticTokens, TokenShards
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import batch_sharding

if TYPE_CHECKING:
    from datasets import IterableDataset

Example = dict[str, np.ndarray]
"""`input_ids`, `labels`, optionally `doc_ids`: int32 [seq]."""

_ITEM_TOKENS = 1 << 15  # read at a time, if updates are smaller
_AHEAD = 2  # batches on the devices: the one in use and the next


class Windows(Protocol):
    """Windows of seq_len + 1 tokens in random access; read by several threads at once."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: int, /) -> np.ndarray:
        """One window, int32 [seq_len + 1]."""
        ...

    def batch(self, indices: Sequence[int], /) -> np.ndarray:
        """Windows, int32 [n, seq_len + 1]."""
        ...


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Sequences in random access.

    Attributes:
        source: windows of seq_len + 1 tokens.
        split: windows [..., seq + 1] -> example, each array [..., seq].
    """

    source: Windows
    split: Callable[[np.ndarray], Example]

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Example:
        return self.split(self.source[index])

    def batch(self, indices: Sequence[int]) -> Example:
        """The examples of `indices`, stacked."""
        return self.split(self.source.batch(indices))


@dataclasses.dataclass(frozen=True)
class Streaming:
    """Sequences of a dataset that streams.

    Attributes:
        source: the dataset.
        split: as of `Dataset`.
    """

    source: StreamedTokens
    split: Callable[[np.ndarray], Example]

    def start(self, first: int, layout: "_Layout") -> Dataset:
        """The sequences from position `first` on, by position."""
        return Dataset(self.source.start(first, layout.rows, layout.local_rows), self.split)


DatasetBuilder = Callable[[JobConfig], Dataset | Streaming]
"""config -> training set."""


def open_training_data(config: JobConfig) -> Dataset | Streaming:
    """The training set that `data.dataset_type` asks for.

    Raises:
        UserError: the data are missing, damaged or do not fit the model.
    """
    return DATASETS[config.data.dataset_type](config)


def register_dataset(name: str) -> Callable[[DatasetBuilder], DatasetBuilder]:
    """Decorates what opens the training set that `data.dataset_type` calls `name`."""
    return DATASETS.register(name)


@register_dataset("auto")
def _open_named(config: JobConfig) -> Dataset | Streaming:
    """Token shards, a Hugging Face dataset, or else synthetic tokens."""
    data = config.data
    if data.dataset_path or (data.hf_dataset_name and not data.hf_streaming):
        return _open_shards(config, data, "data")
    if data.hf_dataset_name:
        return _open_stream(config, data.hf_dataset_name)
    source = SyntheticTokens(config.model.vocab_size, config.train.seq_len, data_seed(config))
    return Dataset(source, split_window)


def open_eval_data(config: JobConfig) -> dict[str, Dataset]:
    """The evaluation sets by name, "" being the name of a single one.

    They are packed like the training set, so that losses compare.

    Raises:
        UserError: shards are missing, damaged or do not fit the model.
    """
    return {
        name: _open_shards(config, source, f"eval.datasets[{i}]" if name else "eval")
        for i, (name, source) in enumerate(config.eval.sources().items())
    }


def data_seed(config: JobConfig) -> int:
    """`train.data_seed`, by default `train.seed`."""
    return config.train.seed if config.train.data_seed is None else config.train.data_seed


def training_batches(
    config: JobConfig, mesh: Mesh, dataset: Dataset | Streaming, first: int, n_updates: int
) -> Iterator[dict[str, jax.Array]]:
    """Batches [accum, rows, seq] of `n_updates` updates from sample position `first` on.

    Each is on its devices before it is asked for.
    """
    rows = config.train.microbatch_size(data_parallel_size(mesh))
    accum = config.train.grad_accum_steps
    layout = _Layout(mesh, accum, rows, config.train.seq_len)
    order: Order | range
    if isinstance(dataset, Streaming):
        dataset = dataset.start(first, layout)
        order = range(len(dataset))
    else:
        order = training_order(config.data, len(dataset), data_seed(config), rows)
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
    return _to_devices((updates[i] for i in range(len(updates))), layout)


def _open_shards(config: JobConfig, source: DataConfig | EvalSource, section: str) -> Dataset:
    directory, pattern = source.dataset_path, source.file_pattern
    if not directory:
        directory, pattern = str(_tokenized(config, source)), "*.npy"
    shards = TokenShards(
        directory,
        pattern,
        config.train.seq_len,
        vocab_size=config.model.vocab_size,
        token_dtype=config.data.token_dtype,
        section=section,
    )
    manifest_eos = shards.manifest.eos_id if shards.manifest else None
    return Dataset(shards, _splitter(config.data, manifest_eos))


def _tokenized(config: JobConfig, source: DataConfig | EvalSource) -> Path:
    """Shards of the Hugging Face dataset that `source` names."""
    assert source.hf_dataset_name
    return cached_shards(
        source.hf_dataset_name,
        source.hf_dataset_config,
        source.hf_dataset_split,
        config.data.hf_dataset_text_field,
        _tokenizer(config.data),
    )


def _open_stream(config: JobConfig, name: str) -> Streaming:
    data, tokenizer = config.data, _tokenizer(config.data)
    dataset = load_dataset(name, data.hf_dataset_config, data.hf_dataset_split, streaming=True)
    source = StreamedTokens(
        name=":".join(filter(None, [name, data.hf_dataset_config, data.hf_dataset_split])),
        dataset=cast("IterableDataset", dataset),
        field=data.hf_dataset_text_field,
        tokenizer=tokenizer,
        window=config.train.seq_len + 1,
        vocab_size=config.model.vocab_size,
        seed=data_seed(config),
        shuffle=data.shuffle,
        directory=Path(config.checkpoint.dir) / "stream",
    )
    return Streaming(source, _splitter(data, tokenizer.eos_id))


def _tokenizer(config: DataConfig) -> Tokenizer:
    """What encodes text."""
    spec = tokenizer_of(config)
    tokenizer = load_tokenizer(spec) if spec else None
    if tokenizer is None or tokenizer.eos_id is None:
        raise UserError(
            "reading a Hugging Face dataset needs a tokenizer with an end-of-text token: set "
            "data.tokenizer_path"
        )
    return tokenizer


def _splitter(config: DataConfig, eos_id: int | None) -> Callable[[np.ndarray], Example]:
    """Window -> example, as `data.pack_sequences` says; `eos_id` is that of the data."""
    if not config.pack_sequences:
        return split_window
    eos = _eos_id(config, eos_id)
    return lambda window: split_packed(window, eos)


def _eos_id(config: DataConfig, of_data: int | None) -> int:
    """What separates documents: the config's word first, then the data's, the tokenizer's."""
    if config.eos_token_id is not None:
        return config.eos_token_id
    if of_data is not None:
        return of_data
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

    def batch(self, indices: Sequence[int]) -> Example:
        beyond = np.array(indices) >= len(self._dataset)
        example = self._dataset.batch(np.where(beyond, 0, indices).tolist())
        return {**example, "labels": np.where(beyond[:, None], IGNORE, example["labels"])}


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
    """This process's rows of runs of updates, in random access: what Grain reads and prefetches.

    Small updates are read several at a time, as each item costs Grain as much as a few sequences.
    """

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
        self._per_item = max(1, _ITEM_TOKENS // math.prod(layout.shape))

    def __len__(self) -> int:
        return -(-self._n_updates // self._per_item)

    def __getitem__(self, item: int) -> list[Example]:
        """The next updates, each [accum, local rows, seq]."""
        accum, rows, local = self._layout.accum, self._layout.rows, self._layout.local_rows
        begin = int(item) * self._per_item
        n_updates = min(self._per_item, self._n_updates - begin)
        start = self._first + begin * accum * rows
        microbatches = range(start, start + n_updates * accum * rows, rows)
        indices = [self._order[first + row] for first in microbatches for row in local]
        shape = (n_updates, accum, len(local), -1)
        examples = self._dataset.batch(indices).items()
        arrays = {name: array.reshape(shape) for name, array in examples}
        return [{name: array[i] for name, array in arrays.items()} for i in range(n_updates)]


def _to_devices(items: Iterator[list[Example]], layout: _Layout) -> Iterator[dict[str, jax.Array]]:
    """Starts the transfer of the next batch before the current one is used."""
    ahead: collections.deque[dict[str, jax.Array]] = collections.deque()
    for batch in chain.from_iterable(items):
        ahead.append(layout.put(batch))
        if len(ahead) == _AHEAD:
            yield ahead.popleft()
    yield from ahead
