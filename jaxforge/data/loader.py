"""Batches as a pure function of (config, seed, position), on any number of hosts and devices.

The index spaces:

    position    counts sequences over the whole run, epochs included: 0, 1, 2, ...
    index       a sequence of the source: `order[position]`
    update      one optimizer step; it covers `size` consecutive positions
    microbatch  `rows` consecutive positions of an update
    row         a sequence within its microbatch; rows are what the mesh splits

so that, from `first` on,  position = first + update * size + microbatch * rows + row.
Usually size = accum * rows. It is smaller if the ranks do not divide it: then the last rows of an
update are padding. Each process reads only the rows of its own devices.
"""

import collections
import itertools
from collections.abc import Iterator, Sequence

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset, Example, Mixture, Streaming
from jaxforge.data.mixture import GrainMixture, TorchMixture
from jaxforge.data.order import GrainOrder, Order, TorchOrder, data_seed
from jaxforge.data.packing import IGNORE
from jaxforge.data.segments import Segment
from jaxforge.data.sources import is_remote, read_options
from jaxforge.parallel.mesh import data_parallel_size
from jaxforge.parallel.sharding import SEQUENCES, batch_shardings, partition_spec

ITEM_TOKENS = 1 << 15  # per item, if updates are smaller
_AHEAD = 2  # batches on devices: the current and the next


def training_batches(
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset | Mixture | Streaming,
    first: int,
    n_updates: int,
    segments: Sequence[Segment] = (),
    accum: int | None = None,
) -> Iterator[dict[str, jax.Array]]:
    """Return the batches [accum, rows, seq] of `n_updates` updates from position `first` on.

    The transfer to devices runs one batch ahead. Batches of a mixture have `dataset_idx`
    [accum, rows] too.

    Args:
        config: the validated config.
        mesh: mesh of the batches.
        dataset: result of `open_training_data`.
        first: first position; begins a microbatch.
        n_updates: number of batches.
        segments: all segments of a mixture (`training.training_data.Phases.segments`).
        accum: microbatches of an update; by default as the config.
    """
    rows = config.train.microbatch_size(data_parallel_size(mesh))
    accum = accum or config.train.grad_accum_steps
    size = config.train.update_sequences(accum * rows)
    layout = _Layout(mesh, accum, rows, config.train.seq_len, size)
    order: Order | range
    if isinstance(dataset, Streaming):
        # A stream shuffles by itself: its indices are the positions.
        dataset = dataset.start(first, layout.rows, layout.local_rows)
        order = range(len(dataset))
    else:
        end = first + n_updates * size
        order = _order(config, mesh, dataset, segments, range(first, end))
    filled = _Padded(dataset, marks_padding=True) if layout.is_padded else dataset
    updates = UpdateBatches(filled, order, layout, first, n_updates)
    options = read_options(config.data, dataset, updates.sequences_per_item, config.train.seq_len)
    return _to_devices(iter(grain.MapDataset.source(updates).to_iter_dataset(options)), layout)


def describe_sample(
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset | Mixture | Streaming,
    segments: Sequence[Segment],
    position: int,
) -> str:
    """Describe the sequence at a position; arguments as for `training_batches`."""
    if isinstance(dataset, Streaming):
        return f"position {position}"
    positions = range(position, position + 1)
    index = _order(config, mesh, dataset, segments, positions)[position]
    if not isinstance(dataset, Mixture):
        return f"sequence {index}"
    for name, size in dataset.sizes.items():
        if index < size:
            return f"sequence {index} of {name}"
        index -= size
    raise AssertionError("an order goes by these sizes")


def _order(
    config: JobConfig,
    mesh: Mesh,
    dataset: Dataset | Mixture,
    segments: Sequence[Segment],
    positions: range,
) -> Order:
    """Return the map of some positions to indices."""
    data, ranks, seed = config.data, data_parallel_size(mesh), data_seed(config)
    rows, is_torch = config.train.microbatch_size(ranks), data.order == "torch"
    if not isinstance(dataset, Mixture):
        n = len(dataset)
        if is_torch:
            return TorchOrder(n, seed, data.shuffle, rows)
        return GrainOrder(n, seed, data.shuffle)
    assert segments, "a mixture is read in segments"
    assert segments[0].start <= positions.start, "these positions belong to no segment"
    if is_torch:
        return TorchMixture(dataset.sizes, segments, seed, rows, data.torch_ranks or ranks)
    return GrainMixture(dataset.sizes, segments, seed, data.shuffle, end=positions.stop)


def eval_batches(
    config: JobConfig, mesh: Mesh, dataset: Dataset, sequences: Sequence[int] | None = None
) -> Iterator[dict[str, jax.Array]]:
    """Return batches [1, rows, seq] of an evaluation set in file order, or of some sequences.

    The last batch is padded with rows whose labels are all ignored, and so is each batch whose size
    the ranks do not divide. Batches for models with experts have `is_padding`, so that no expert
    receives these rows.

    Args:
        config: the validated config.
        mesh: mesh of the batches.
        dataset: the evaluation set.
        sequences: numbers of the sequences; None: all.
    """
    dp = data_parallel_size(mesh)
    size = config.eval_batch_size(dp)
    layout = _Layout(mesh, 1, -(-size // dp) * dp, config.train.seq_len, size)
    n_batches = -(-len(dataset if sequences is None else sequences) // size)
    order: Sequence[int] = range(n_batches * size)
    if sequences is not None:
        # The index after the last sequence stands for padding, as in `_Padded`.
        order = [*sequences, *[len(dataset)] * (n_batches * size - len(sequences))]
    filled = _Padded(dataset, marks_padding=config.model.is_moe)
    updates = UpdateBatches(filled, order, layout, 0, n_batches)
    # Requests to a bucket must overlap; memory maps are read in this thread.
    if not is_remote(dataset):
        return _to_devices((updates[i] for i in range(len(updates))), layout)
    options = read_options(config.data, dataset, updates.sequences_per_item, config.train.seq_len)
    return _to_devices(iter(grain.MapDataset.source(updates).to_iter_dataset(options)), layout)


class _Padded:
    """Dataset with padding examples after its end, whose labels are ignored.

    Args:
        dataset: the dataset.
        marks_padding: whether each example has `is_padding`.
    """

    def __init__(self, dataset: Dataset | Mixture, *, marks_padding: bool = False) -> None:
        self._dataset, self._marks_padding = dataset, marks_padding

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: Sequence[int]) -> Example:
        beyond = np.array(indices) >= len(self._dataset)
        # Any sequence can stand in for padding, as all of its labels are ignored.
        example = self._dataset.batch(np.where(beyond, 0, indices).tolist())
        labels = np.where(beyond[:, None], IGNORE, example["labels"])
        example = {**example, "labels": labels}
        if self._marks_padding:
            is_padding = example.get("is_padding", np.zeros_like(labels))
            example["is_padding"] = np.where(beyond[:, None], 1, is_padding)
        return example


class _Layout:
    """Shape and sharding of a batch, and the rows that this process reads.

    Args:
        mesh: mesh of the batch.
        accum: microbatches of an update.
        rows: rows of a microbatch.
        seq_len: tokens of a sequence.
        size: sequences of an update; further rows are padding.
    """

    def __init__(self, mesh: Mesh, accum: int, rows: int, seq_len: int, size: int) -> None:
        self.accum, self.rows, self.size = accum, rows, size
        self.is_padded = size < accum * rows
        self.tokens = accum * rows * seq_len
        self._mesh = mesh
        self._shardings: dict[str, NamedSharding] = {}
        by_rows = NamedSharding(mesh, partition_spec(SEQUENCES))
        slices = by_rows.addressable_devices_indices_map((accum, rows)).values()
        # A set: devices along the other axes hold the same rows.
        parts = {index[1].indices(rows) for index in slices if index is not None}
        self.local_rows = sorted({row for part in parts for row in range(*part)})
        self._offsets = {row: offset for offset, row in enumerate(self.local_rows)}

    def put(self, local: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Return global arrays of the rows of this process [accum, local rows, ...]."""
        # Made once: new ones would be hashed for every batch.
        if self._shardings.keys() != local.keys():
            self._shardings = batch_shardings(self._mesh, local)
        return {name: self._put(array, self._shardings[name]) for name, array in local.items()}

    def _put(self, local: np.ndarray, sharding: NamedSharding) -> jax.Array:
        def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
            assert index is not None
            start, stop, _ = index[1].indices(self.rows)
            # The rows of a device are consecutive, and so are their offsets among the local rows.
            offset = self._offsets[start]
            return local[:, offset : offset + stop - start, *index[2:]]

        shape = (self.accum, self.rows, *local.shape[2:])
        return jax.make_array_from_callback(shape, sharding, of_device)


class UpdateBatches:
    """Random-access source for Grain: an item holds this process's rows of consecutive updates.

    Several small updates make one item, as Grain's overhead per item equals a few sequences.
    """

    def __init__(
        self,
        dataset: "Dataset | Mixture | _Padded",
        order: Order | Sequence[int],
        layout: _Layout,
        first: int,
        n_updates: int,
    ) -> None:
        self._dataset, self._order, self._layout = dataset, order, layout
        self._first, self._n_updates = first, n_updates
        self._per_item = max(1, ITEM_TOKENS // layout.tokens)

    def __len__(self) -> int:
        return -(-self._n_updates // self._per_item)

    @property
    def sequences_per_item(self) -> int:
        """Sequences that this process reads for an item."""
        return self._per_item * self._layout.accum * len(self._layout.local_rows)

    def __getitem__(self, item: int) -> list[Example]:
        """Return the updates of an item, each [accum, local rows, ...]."""
        layout, local = self._layout, self._layout.local_rows
        begin = int(item) * self._per_item
        n_updates = min(self._per_item, self._n_updates - begin)
        start = self._first + begin * layout.size
        updates = range(start, start + n_updates * layout.size, layout.size)
        # [accum * local rows]: positions within an update, microbatch by microbatch.
        slots = [first + row for first in range(0, layout.accum * layout.rows, layout.rows)
                 for row in local]  # fmt: skip
        indices = [self._index(first, slot) for first in updates for slot in slots]
        shape = (n_updates, layout.accum, len(local))
        examples = self._dataset.batch(indices).items()
        arrays = {name: array.reshape(*shape, *array.shape[1:]) for name, array in examples}
        return [{name: array[i] for name, array in arrays.items()} for i in range(n_updates)]

    def _index(self, first: int, slot: int) -> int:
        """Return the index of the sequence in a slot of the update whose first position is given.

        Slots after the last sequence of the update get the index of padding.
        """
        return self._order[first + slot] if slot < self._layout.size else len(self._dataset)


def _to_devices(items: Iterator[list[Example]], layout: _Layout) -> Iterator[dict[str, jax.Array]]:
    """Yield batches on devices; start the transfer of each before its predecessor is used."""
    ahead: collections.deque[dict[str, jax.Array]] = collections.deque()
    for batch in itertools.chain.from_iterable(items):
        ahead.append(layout.put(batch))
        if len(ahead) == _AHEAD:
            yield ahead.popleft()
    yield from ahead
