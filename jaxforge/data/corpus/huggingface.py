"""Hugging Face datasets from the Hub, a directory of data files, or `save_to_disk`.

`HuggingFace` is the input of `prepare`, and `cached_shards` the shards of a dataset that training
reads without `prepare`.
"""

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Self

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.conversations import Conversations
from jaxforge.data.corpus.files import FileState, InputSpan, check_unchanged
from jaxforge.data.corpus.formats.arrow import validate
from jaxforge.data.corpus.inputs import Unit
from jaxforge.data.corpus.manifest import ENTRY_DTYPE, FILE_NAME, Options
from jaxforge.data.corpus.parts import Done
from jaxforge.data.corpus.records import (
    DEFAULT_FIELD,
    Content,
    Input,
    Record,
    TableRow,
    library,
    to_record,
)
from jaxforge.data.corpus.tokenizer import Tokenizer, identity
from jaxforge.data.corpus.unit_worker import assemble, begin_job, run_units
from jaxforge.data.corpus.writer import token_dtype
from jaxforge.errors import InputChangedError, UserError
from jaxforge.storage.atomic_directory import atomic_directory

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

log = logging.getLogger(__name__)

ROWS = 64
"""Rows of a dataset converted to Python objects at a time."""

_LOG_SECONDS = 10.0


@dataclass(frozen=True)
class HuggingFace(Input):
    """Dataset of the library `datasets`, or one file of such a dataset.

    Attributes:
        name: name in messages.
        dataset: the rows, streaming or on disk.
        content: selects the text of a row.
        span: the first row to read, and the row after the last; None reads all rows.
        states: states of the files of a dataset on disk when it was listed.
    """

    name: str
    dataset: "Dataset | IterableDataset"
    content: Content = DEFAULT_FIELD
    span: InputSpan | None = None
    states: tuple[tuple[Path, FileState], ...] = ()

    @classmethod
    def on_disk(cls, name: str, dataset: "Dataset", content: Content) -> Self:
        """Return the input of a dataset with the states of its files."""
        paths = [Path(file["filename"]) for file in dataset.cache_files]
        return cls(name, dataset, content, states=tuple((p, FileState.of(p)) for p in paths))

    def check_unchanged(self, *, opening: bool = False) -> None:
        """Check that the files are those of the plan."""
        for path, state in self.states:
            try:
                check_unchanged(path, state, opening=opening)
            except InputChangedError as error:
                raise InputChangedError(str(error), self.name) from error

    @property
    def identity(self) -> tuple[str, ...]:
        """Name, and the fingerprint that `datasets` computes of source and transformations."""
        return self.name, self.dataset._fingerprint

    @property
    def where(self) -> str:
        """The name."""
        return self.name

    @property
    def weight(self) -> int:
        """Bytes of the rows in Arrow's format; 0 for a stream."""
        table = getattr(self.dataset, "data", None)
        if table is None:
            return 0
        first, end = self.span or InputSpan(0, len(self.dataset))
        return table.nbytes * (end - first) // max(1, table.num_rows)

    @property
    def begins(self) -> bool:
        """False for ranges of rows other than the first."""
        return not self.span or not self.span.start

    def slices(self, nbytes: int) -> "Sequence[HuggingFace]":
        """Return equal ranges of rows of about `nbytes`."""
        n = min(-(-self.weight // nbytes), len(self.dataset)) if self.weight else 1
        if n < 2:
            return [self]
        # Equal numbers of rows, as the size of each row is unknown.
        borders = [len(self.dataset) * i // n for i in range(n + 1)]
        return [replace(self, span=InputSpan(*ends)) for ends in pairwise(borders)]

    def records(self) -> Iterator[Record]:
        """Yield the rows of the span.

        Raises:
            UserError: a column does not exist.
        """
        columns = self.content.columns(self.dataset.column_names, self.name)
        rows = self.dataset.select_columns(columns) if columns else self.dataset
        start = 0
        if self.span:
            start = self.span.start
            # `take` before `skip`: the end of a span counts from the start of the dataset.
            rows = rows.take(self.span.end)
        for number, record in enumerate(_rows(rows.skip(start), self.name), start + 1):
            yield to_record(number, record, f"{self.name}:{number}", self.content)


def _rows(dataset: "Dataset | IterableDataset", where: str) -> Iterator[TableRow]:
    for batch in _checked(dataset, where) if hasattr(dataset, "data") else dataset.iter(ROWS):
        for values in zip(*batch.values(), strict=True):
            yield TableRow(zip(batch, values, strict=True))


def _checked(dataset: "Dataset", where: str) -> Iterator[dict[str, Any]]:
    """Yield batches of a dataset on disk, each after a check of its Arrow data."""
    # In step: each table is checked before Python objects are made of the same rows.
    batches = dataset.iter(ROWS)
    for table in dataset.with_format("arrow").iter(ROWS):
        try:
            for part in table.to_batches():
                validate(part)
        except ValueError as error:  # of pyarrow
            raise UserError(f"cannot read {where}: {error}") from error
        yield next(batches)


def load_dataset(
    name: str, config: str | None = None, split: str = "train", *, streaming: bool = False
) -> "Dataset | IterableDataset":
    """Load a split of a dataset.

    Args:
        name: a name on the Hub; a directory of data files (JSONL, Parquet, CSV, text, Arrow); or
            a directory written by `save_to_disk`.
        config: configuration of the dataset, if it has several.
        split: such as "train", or "train[:1%]" without streaming.
        streaming: download rows when they are read.

    Returns:
        A `datasets.Dataset`, or a `datasets.IterableDataset` for streaming.

    Raises:
        UserError: `datasets` is not installed, or cannot load it.
    """
    datasets = library("datasets", "reading Hugging Face datasets")
    try:
        if (Path(name) / "dataset_dict.json").exists() or (Path(name) / "state.json").exists():
            return _saved(datasets, name, split, streaming)
        return datasets.load_dataset(name, config or None, split=split, streaming=streaming)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        source = f"{name!r}, config {config!r}, split {split!r}"
        raise UserError(f"cannot load the Hugging Face dataset {source}: {error}") from error


def _saved(
    datasets: ModuleType, name: str, split: str, streaming: bool
) -> "Dataset | IterableDataset":
    """Open a dataset written by `save_to_disk`, with or without splits."""
    saved = datasets.load_from_disk(name)
    splits = saved if isinstance(saved, dict) else {str(saved.split or split): saved}
    if split not in splits:
        raise ValueError(f"it has the splits {listed(splits)}")
    dataset = splits[split]
    # One shard for each file: `StreamedTokens` divides a dataset by its shards.
    n_files = max(1, len(dataset.cache_files))
    return dataset.to_iterable_dataset(num_shards=n_files) if streaming else dataset


def cached_shards(
    name: str, config: str | None, split: str, content: Content, tokenizer: Tokenizer
) -> Path:
    """Return the cached token shards of a dataset, tokenizing it at the first use.

    The directory is named by the fingerprints of dataset, content and tokenizer. One process writes
    it, even among several runs, while the others wait. After a kill it is resumed.

    Args:
        name: see `load_dataset`.
        config: see `load_dataset`.
        split: see `load_dataset`.
        content: selects the text of a row.
        tokenizer: a tokenizer with an EOS.

    Returns:
        A directory with a manifest.

    Raises:
        UserError: the dataset cannot be loaded, or has a row without text.
    """
    dataset = load_dataset(name, config, split)
    label = ":".join(filter(None, [name, config, split]))
    source = HuggingFace.on_disk(label, dataset, content)
    # Without the name: the same rows under another name have the same tokens.
    key = [*source.identity[1:], *content.identity, *identity(tokenizer)]
    cache = library("datasets", "reading Hugging Face datasets").config.HF_DATASETS_CACHE
    output = Path(cache) / "jaxforge" / hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]
    plan = {"options": {"key": key}, "inputs": []}
    with atomic_directory(
        output, plan, marker=f"train/{FILE_NAME}", shared=True, say=log.info
    ) as directory:
        if directory:
            log.info("tokenizing %s into %s", source.name, output)
            tokenizer.save(directory.out / "tokenizer")
            conversations = isinstance(content, Conversations)
            dtype = ENTRY_DTYPE if conversations else token_dtype(None, tokenizer.vocab_size)
            options = Options(dtype=dtype, conversations=conversations)
            job = begin_job(directory, 1, tokenizer, options, isolate=False)
            run_units(job, [Unit(0, (source,))], 1, _progress_log())
            assemble(job, tokenizer, "data.tokenizer_path")
    return output / "train"


def _progress_log() -> Callable[[Done], None]:
    said = time.monotonic()

    def show(done: Done) -> None:
        nonlocal said
        if time.monotonic() - said >= _LOG_SECONDS:
            said = time.monotonic()
            fraction = 100 * (done.fraction or 0.0)
            log.info("%.0f%% tokenized: %.1f M tokens", fraction, done.tokens / 1e6)

    return show
