"""Data sources of training and evaluation, opened from the config."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

import grain
import numpy as np

from jaxforge.config.data import DATASETS, DataConfig
from jaxforge.config.eval import EvalDataset
from jaxforge.config.job import JobConfig
from jaxforge.data.conversation_shards import ConversationShards, PreferenceShards
from jaxforge.data.corpus.conversations import Conversations
from jaxforge.data.corpus.huggingface import cached_shards, load_dataset
from jaxforge.data.corpus.manifest import BLOCK_BYTES, Manifest
from jaxforge.data.corpus.records import Content, TextField
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer, tokenizer_of
from jaxforge.data.dataset import Dataset, Example, Mixture, Streaming
from jaxforge.data.order import data_seed
from jaxforge.data.packing import (
    as_conversations,
    split_documents,
    split_entries,
    split_packed,
    split_window,
)
from jaxforge.data.stream import StreamedTokens
from jaxforge.data.teacher_logits import with_saved_logits
from jaxforge.data.tokens import SyntheticTokens, TokenFiles, TokenShards, manifest_of
from jaxforge.errors import UserError
from jaxforge.storage import urls

if TYPE_CHECKING:
    from datasets import IterableDataset

    from jaxforge.storage.block_cache import BlockCache

_THREADS = 16  # items that are requested from a bucket at a time, unless they are large
_BYTES = 256 << 20  # of blocks that may be in memory for these items
_TOKEN_BYTES = 4  # at most

DatasetBuilder = Callable[[JobConfig], Dataset | Mixture | Streaming]
"""config -> training set. Only "auto" reads `data.datasets`, and so opens mixtures."""


def open_training_data(config: JobConfig) -> Dataset | Mixture | Streaming:
    """Open the training set of `data.dataset_type`, with the logits of `distillation.logits`.

    Raises:
        UserError: the data are missing, damaged or do not fit the model.
    """
    return with_saved_logits(config, DATASETS[config.data.dataset_type](config))


def register_dataset(name: str) -> Callable[[DatasetBuilder], DatasetBuilder]:
    """Register the decorated function to open training sets of `data.dataset_type = name`."""
    return DATASETS.register(name)


@register_dataset("auto")
def _open_named(config: JobConfig) -> Dataset | Mixture | Streaming:
    """Open a mixture, token shards, or a Hugging Face dataset."""
    data = config.data
    if data.datasets:
        return _open_mixture(config)
    if data.dataset_path or (data.hf_dataset_name and not data.hf_streaming):
        return _open_shards(config, data, ("data.dataset_path", "data.file_pattern"))
    if data.hf_dataset_name:
        return _open_stream(config, data.hf_dataset_name)
    return _random_tokens(config)


@register_dataset("synthetic")
def _open_synthetic(config: JobConfig) -> Dataset | Mixture | Streaming:
    """Open the data that the config names, else random tokens."""
    return _open_named(config) if config.data.has_source else _random_tokens(config)


def _random_tokens(config: JobConfig) -> Dataset:
    source = SyntheticTokens(config.model.vocab_size, config.train.seq_len, data_seed(config))
    return Dataset(source, split_window)


def open_eval_data(config: JobConfig) -> dict[str, Dataset]:
    """Open the evaluation sets by name; the name of a single set may be "".

    They are packed like the training set, so that losses are comparable.

    Raises:
        UserError: shards are missing, damaged or do not fit the model.
    """
    sets = {}
    for i, (name, source) in enumerate(config.eval.sources().items()):
        section = f"eval.datasets[{i}]"
        keys = (f"{section}.dataset_path", f"{section}.file_pattern")
        sets[name] = _open_shards(config, source, keys)
    return sets


def eval_sets_have_pairs(config: JobConfig) -> bool:
    """Return whether an evaluation set holds pairs of answers."""
    directories = (source.dataset_path for source in config.eval.sources().values())
    manifests = (manifest_of(path, "eval.dataset_path") for path in directories if path)
    return any(manifest is not None and manifest.preferences for manifest in manifests)


def _open_mixture(config: JobConfig) -> Mixture:
    datasets = {}
    for i, source in enumerate(config.data.datasets):
        alone = {
            "dataset_path": source.path,
            "hf_dataset_name": source.hf_name,
            "hf_dataset_config": source.hf_config or None,
        }
        keys = (f"data.datasets[{i}].path", "data.file_pattern")
        datasets[source.label] = _open_shards(config, config.data.with_values(alone), keys)
    _check_same_tokenizer(datasets)
    if any(isinstance(dataset.source, ConversationShards) for dataset in datasets.values()):
        # Batches of a mixture have one set of fields.
        datasets = {name: _with_all_fields(dataset) for name, dataset in datasets.items()}
    return Mixture(datasets)


def _with_all_fields(dataset: Dataset) -> Dataset:
    """Return the dataset with the fields that conversations have."""
    return replace(dataset, split=lambda window: as_conversations(dataset.split(window)))


def _check_same_tokenizer(datasets: Mapping[str, Dataset]) -> None:
    """Compare tokenizers by manifest; datasets without a manifest are not checked."""
    made_by: dict[str, tuple[str, str]] = {}
    begun_by: dict[tuple[int, ...], str] = {}
    for name, dataset in datasets.items():
        manifest = dataset.source.manifest if isinstance(dataset.source, TokenFiles) else None
        if manifest:
            made_by.setdefault(manifest.tokenizer_sha256, (name, manifest.tokenizer))
        if manifest and not manifest.conversations:  # chat templates write BOS themselves
            begun_by.setdefault(manifest.bos_ids, name)
    if len(made_by) > 1:
        (first, fingerprint), (other, other_fingerprint), *_ = made_by.values()
        raise UserError(
            f"data.datasets: {first} and {other} were tokenized differently "
            f"({fingerprint}, {other_fingerprint}): prepare them with the same tokenizer"
        )
    if len(begun_by) > 1:
        without = begun_by.pop((), None) or begun_by.popitem()[1]
        raise UserError(
            f"data.datasets: documents of {next(iter(begun_by.values()))} begin with BOS, those "
            f"of {without} do not: prepare all of them with --no-bos, or none"
        )


def _open_shards(
    config: JobConfig, source: DataConfig | EvalDataset, keys: tuple[str, str]
) -> Dataset:
    """Open the shards of a source; `keys` are the config keys of directory and pattern."""
    directory, pattern = source.dataset_path, source.file_pattern
    if not directory:
        assert source.hf_dataset_name
        tokenizer = _tokenizer(config.data)
        shards_of_rows = cached_shards(
            source.hf_dataset_name, source.hf_dataset_config, source.hf_dataset_split,
            _content(config.data, tokenizer), tokenizer,
        )  # fmt: skip
        directory, pattern = str(shards_of_rows), "*.npy"
    manifest = manifest_of(directory, keys[0])
    options = {
        "manifest": manifest,
        "vocab_size": config.model.vocab_size,
        "token_dtype": config.data.token_dtype,
        "verify": config.data.verify,
        "keys": keys,
        "cache": _cache(config.data, directory),
        "split": "val" if isinstance(source, EvalDataset) else "train",
    }
    _check_objective(config, manifest, f"{keys[0]} = {directory}")
    if manifest and manifest.conversations:
        overlong = config.data.overlong
        kind = PreferenceShards if manifest.preferences else ConversationShards
        packed = kind(directory, pattern, config.train.seq_len, overlong, **options)
        return Dataset(packed, split_entries)
    shards = TokenShards(directory, pattern, config.train.seq_len, **options)
    manifest_eos = shards.manifest.eos_id if shards.manifest else None
    # The index of Megatron knows the documents even if no EOS ends them.
    if config.data.pack_sequences and config.data.eos_token_id is None and shards.has_documents:
        shards.marks_documents = True
        return Dataset(shards, split_documents)
    if config.data.pack_sequences:
        eos = _eos_id(config, manifest_eos)
        if eos != manifest_eos:  # else `prepare` ended documents with it
            shards.warn_without(eos)
    return Dataset(shards, _splitter(config, manifest_eos))


def _check_objective(config: JobConfig, manifest: Manifest | None, source: str) -> None:
    """Check that pairs of answers, and nothing else, are the data of DPO."""
    needs_pairs = config.train.objective == "dpo"
    has_pairs = bool(manifest and manifest.preferences)
    if needs_pairs and not has_pairs:
        raise UserError(
            f'{source} does not hold pairs of answers, which train.objective = "dpo" needs: '
            "prepare them with jaxforge prepare --preferences"
        )
    if has_pairs and not needs_pairs:
        raise UserError(
            f"{source} holds pairs of answers, and both would be learned with train.objective = "
            f'"{config.train.objective}": set train.objective = "dpo"'
        )


def _cache(config: DataConfig, directory: str) -> "BlockCache | None":
    """Return the cache of blocks for a directory; None if it is local, or there is no cache.

    Raises:
        UserError: `data.cache_dir` cannot be used.
    """
    if not config.cache_dir or not urls.in_bucket(directory):
        return None
    from jaxforge.storage.block_cache import shared_cache

    return shared_cache(config.cache_dir, round(config.cache_gb * 1e9))


def _content(config: DataConfig, tokenizer: Tokenizer) -> Content:
    """Return the part of a Hugging Face row that is read."""
    if config.hf_dataset_conversations:
        return Conversations(tokenizer)
    return TextField(config.hf_dataset_text_field)


def _open_stream(config: JobConfig, name: str) -> Streaming:
    data, tokenizer = config.data, _tokenizer(config.data)
    dataset = load_dataset(name, data.hf_dataset_config, data.hf_dataset_split, streaming=True)
    source = StreamedTokens(
        name=":".join(filter(None, [name, data.hf_dataset_config, data.hf_dataset_split])),
        dataset=cast("IterableDataset", dataset),
        content=_content(data, tokenizer),
        tokenizer=tokenizer,
        window=config.train.seq_len + 1,
        vocab_size=config.model.vocab_size,
        seed=data_seed(config),
        shuffle=data.shuffle,
        directory=Path(config.checkpoint.dir) / "stream",
        overlong=data.overlong,
    )
    split = split_entries if source.conversations else _splitter(config, tokenizer.eos_id)
    return Streaming(source, split)


def _tokenizer(config: DataConfig) -> Tokenizer:
    """Return the tokenizer that encodes text."""
    spec = tokenizer_of(config)
    tokenizer = load_tokenizer(spec) if spec else None
    if tokenizer is None or tokenizer.eos_id is None:
        raise UserError(
            "reading a Hugging Face dataset needs a tokenizer with an end-of-text token: set "
            "data.tokenizer_path"
        )
    return tokenizer


def _splitter(config: JobConfig, eos_id: int | None) -> Callable[[np.ndarray], Example]:
    """Return the function window -> example by `data.pack_sequences`; `eos_id` is the data's."""
    if not config.data.pack_sequences:
        return split_window
    eos = _eos_id(config, eos_id)
    return lambda window: split_packed(window, eos)


def _eos_id(config: JobConfig, of_data: int | None) -> int:
    """Return the EOS id: of the config, else of the data, else of the tokenizer.

    Raises:
        UserError: no EOS id is known, or it is outside the vocabulary of the model.
    """
    data, vocab_size = config.data, config.model.vocab_size
    eos = of_data if data.eos_token_id is None else data.eos_token_id
    if eos is None and data.tokenizer_path:
        eos = load_tokenizer(data.tokenizer_path).eos_id
    if eos is None:
        raise UserError(
            "data.pack_sequences needs the id of the token that ends a document: set "
            "data.eos_token_id, or data.tokenizer_path to a tokenizer that has one"
        )
    if eos >= vocab_size:
        raise UserError(
            f"token {eos}, which ends documents, is outside model.vocab_size = {vocab_size}: set "
            "data.eos_token_id to the one in the data, or model.vocab_size to that of the tokenizer"
        )
    return eos


def sequences_per_epoch(
    config: JobConfig, rows: int, dataset: Dataset | Mixture | Streaming | None = None
) -> int | None:
    """Return the sequences of an epoch; None if there is no such number.

    Random tokens and streams have no known length. The datasets of a mixture have different epochs.

    Args:
        config: the config; its schedule is not used.
        rows: sequences of a microbatch, all ranks together.
        dataset: the training set; opened here if None.

    Raises:
        UserError: the data are missing, damaged or do not fit the model.
    """
    data = config.data
    has_length = data.dataset_path or (data.hf_dataset_name and not data.hf_streaming)
    if data.dataset_type in ("auto", "synthetic") and (data.datasets or not has_length):
        return None
    dataset = open_training_data(config) if dataset is None else dataset
    if not isinstance(dataset, Dataset):  # a registered dataset that streams
        return None
    # torch's sampler drops the last partial batch.
    return len(dataset) // rows * rows if data.order == "torch" else len(dataset)


def read_options(
    config: DataConfig, dataset: Dataset | Mixture, sequences: int, seq_len: int
) -> grain.ReadOptions:
    """Return the number of threads that read items, and of items that are read in advance.

    Local files are read as `[data]` says; with `num_workers = 0`, nothing is read in advance. A
    request to a bucket takes 10 to 200 ms, and many must be in flight. The threads that wait for
    them are limited only by the memory of their blocks.

    Args:
        config: `[data]`.
        dataset: the dataset.
        sequences: sequences of an item.
        seq_len: tokens of a sequence.
    """
    threads, ahead = config.num_workers, config.num_workers * config.prefetch_factor
    if threads and is_remote(dataset):
        # A window may begin anywhere in a block, and so fills parts of one more.
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
