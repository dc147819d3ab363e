"""Datasets for training and evaluation: sequences as examples."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Int

from jaxforge.data.stream import StreamedTokens

Example = dict[str, np.ndarray]
"""`input_ids`, `labels`, perhaps `segment_ids` and `is_padding`: int32 [seq]; of a mixture also
`dataset_idx`: int32."""


class Windows(Protocol):
    """Windows of seq_len + 1 tokens in random access; read by several threads at once."""

    def __len__(self) -> int:
        """Return the number of examples."""
        ...

    def __getitem__(self, index: int, /) -> np.ndarray:
        """Return one window, int32 [seq_len + 1]."""
        ...

    def batch(self, indices: Sequence[int], /) -> np.ndarray:
        """Return windows, int32 [n, seq_len + 1]."""
        ...


@dataclass(frozen=True)
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
        """Return the examples `indices`, stacked."""
        return self.split(self.source.batch(indices))


@dataclass(frozen=True)
class Mixture:
    """Concatenation of datasets.

    Attributes:
        datasets: by name, in the order of `data.datasets`.
    """

    datasets: Mapping[str, Dataset]

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Sequences of each dataset."""
        return {name: len(dataset) for name, dataset in self.datasets.items()}

    @functools.cached_property
    def _datasets(self) -> list[Dataset]:
        return list(self.datasets.values())

    @functools.cached_property
    def _ends(self) -> Int[np.ndarray, "datasets"]:
        """Index after the last sequence of each dataset."""
        return np.cumsum(list(self.sizes.values()))

    def __len__(self) -> int:
        return sum(self.sizes.values())

    def batch(self, indices: Sequence[int]) -> Example:
        """Return the examples `indices`, stacked, with the number of the dataset of each."""
        ends, datasets = self._ends, self._datasets
        # [n]; "right": an index that equals an end belongs to the next dataset.
        numbers = np.searchsorted(ends, indices, side="right").astype(np.int32)
        examples: Example = {"dataset_idx": numbers}
        for number in np.unique(numbers).tolist():  # of perhaps a thousand, only those with rows
            rows, dataset = np.flatnonzero(numbers == number), datasets[number]
            first = ends[number] - len(dataset)
            part = dataset.batch((np.asarray(indices)[rows] - first).tolist())
            for name, array in part.items():
                if name not in examples:
                    # All datasets have the same fields, so that no row stays empty.
                    examples[name] = np.empty((len(numbers), *array.shape[1:]), array.dtype)
                examples[name][rows] = array
        return examples


@dataclass(frozen=True)
class Streaming:
    """Sequences of a streaming dataset.

    Attributes:
        source: the dataset.
        split: see `Dataset`.
    """

    source: StreamedTokens
    split: Callable[[np.ndarray], Example]

    def start(self, first: int, rows: int, local_rows: Sequence[int]) -> Dataset:
        """Return the sequences from position `first` on, by position; see `source.start`."""
        return Dataset(self.source.start(first, rows, local_rows), self.split)
