"""Hugging Face datasets from the Hub, a directory of data files, or `save_to_disk`."""

import hashlib
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from jaxforge.cli.suggestions import listed
from jaxforge.data.corpus.content import Content
from jaxforge.data.corpus.conversations import Conversations
from jaxforge.data.corpus.corpus_state import Corpus, Options
from jaxforge.data.corpus.entries import ENTRY_DTYPE
from jaxforge.data.corpus.ingest import ingest
from jaxforge.data.corpus.inputs import HuggingFace
from jaxforge.data.corpus.manifest import FILE_NAME
from jaxforge.data.corpus.optional import library
from jaxforge.data.corpus.tokenizer import Tokenizer, identity
from jaxforge.data.corpus.writer import token_dtype
from jaxforge.errors import UserError
from jaxforge.storage.atomic_directory import atomic_directory

if TYPE_CHECKING:
    from datasets import Dataset, IterableDataset

log = logging.getLogger(__name__)

_LOG_SECONDS = 10.0


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
        wanted = f"{name!r}, config {config!r}, split {split!r}"
        raise UserError(f"cannot load the Hugging Face dataset {wanted}: {error}") from error


def _saved(
    datasets: ModuleType, name: str, split: str, streaming: bool
) -> "Dataset | IterableDataset":
    """Open a dataset written by `save_to_disk`, with or without splits."""
    saved = datasets.load_from_disk(name)
    splits = saved if isinstance(saved, dict) else {str(saved.split or split): saved}
    if split not in splits:
        raise ValueError(f"it has the splits {listed(splits)}")
    dataset = splits[split]
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
            ingest(
                [source],
                tokenizer,
                options,
                directory,
                tokenizer_name="data.tokenizer_path",
                show=_progress_log(len(dataset)),
            )
    return output / "train"


def _progress_log(rows: int) -> Callable[[Corpus], None]:
    said = time.monotonic()

    def show(corpus: Corpus) -> None:
        nonlocal said
        if time.monotonic() - said >= _LOG_SECONDS:
            said = time.monotonic()
            tokens = corpus.splits["train"].writer.tokens
            log.info(
                "%.0f%% tokenized: %.1f M tokens", 100 * corpus.position.record / rows, tokens / 1e6
            )

    return show
