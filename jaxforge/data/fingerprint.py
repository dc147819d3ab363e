"""Fingerprints of datasets, compared between hosts and between starts of a run.

Files with hashes in their manifest are identified by the hashes. For other files, names, sizes, and
the first and last bytes are used: a replaced file is detected, a single changed token may not be.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jaxforge.config.data import DataConfig
from jaxforge.data.dataset import Dataset, Mixture, Streaming
from jaxforge.data.stream import StreamedTokens
from jaxforge.data.token_file import TokenFile
from jaxforge.data.tokens import TokenFiles
from jaxforge.errors import UserError
from jaxforge.storage import urls

Fingerprint = dict[str, Any]
"""Identity of a dataset as JSON: `tokenizer` and `contents` are hashes, other keys for messages."""

_TRAINING = "data: "
_RANDOM = {f"{_TRAINING}auto", f"{_TRAINING}synthetic"}  # names of random tokens
_END_BYTES = 4096  # hashed at either end of a file without hashes


def fingerprints(
    config: DataConfig, training: Dataset | Mixture | Streaming, evaluation: Mapping[str, Dataset]
) -> dict[str, Fingerprint]:
    """Return the fingerprint of each dataset, by its name in the config.

    Args:
        config: `[data]`.
        training: the training set that the section opened.
        evaluation: evaluation sets by name.
    """
    name = config.dataset_path or config.hf_dataset_name or config.dataset_type
    sets = training.datasets if isinstance(training, Mixture) else {name: training}
    by_label = {f"{_TRAINING}{label}": fingerprint_of(dataset) for label, dataset in sets.items()}
    held_out = {f"eval: {label}": fingerprint_of(dataset) for label, dataset in evaluation.items()}
    return by_label | held_out


def changes(then: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint]) -> list[str]:
    """Describe the changes of the training data since a checkpoint.

    Only datasets with the same name in the config are compared: under a new name, other data are
    intended. Another tokenizer is reported under any name.

    Args:
        then: fingerprints stored with the checkpoint; empty for older versions.
        now: fingerprints of the present data.
    """
    lines = [
        f"{name.removeprefix(_TRAINING)} had {difference}"
        for name in then
        if name in now and name.startswith(_TRAINING)
        for difference in _differences(then[name], now[name])
    ]
    # Names may have changed, but with a common tokenizer ids have kept their meaning.
    were, are = _tokenizers(then), _tokenizers(now)
    if not lines and were and are and not were & are:
        lines = ["the data were tokenized by another tokenizer"]
    return lines


def check_unchanged(
    on_change: str, then: Mapping[str, Fingerprint], now: Mapping[str, Fingerprint], step: int
) -> list[str]:
    """Return `changes`, or raise if they are not allowed.

    Args:
        on_change: `data.on_change`.
        then: fingerprints stored with the checkpoint.
        now: fingerprints of the present data.
        step: step of the checkpoint.

    Raises:
        UserError: the data have changed, and `on_change` is "refuse".
    """
    differences = changes(then, now)
    if differences and on_change == "refuse":
        raise UserError(
            f"the data have changed since step {step} of this run: {'; '.join(differences)}. "
            "At its position, sequences would be repeated or never read. Bring the data back, or "
            "continue with --data.on_change=continue, "
            "or start a new run with checkpoint.load_path"
        )
    return differences


def check_random_tokens(data: DataConfig, trained_on: Mapping[str, Fingerprint]) -> None:
    """Refuse random tokens for weights that were trained on other data.

    A new model may train on random tokens, as in KempnerForge, to test a machine or a mesh.

    Args:
        data: the `[data]` section.
        trained_on: fingerprints of the data of the checkpoint to start from.

    Raises:
        UserError: the section names no data and does not ask for random tokens.
    """
    if data.has_source or data.dataset_type != "auto" or _RANDOM & trained_on.keys():
        return
    raise UserError(
        "no data: neither data.dataset_path, data.hf_dataset_name nor data.datasets names any, and "
        "random tokens would spoil weights that were trained on others. Set one (jaxforge prepare "
        "TEXT --output DIR makes shards), or, to train them on random tokens, data.dataset_type = "
        '"synthetic"'
    )


def _differences(then: Fingerprint, now: Fingerprint) -> Iterator[str]:
    """Yield differences such as "20 files, and has 21"."""
    numbers = [key for key in ("files", "tokens", "sequences") if then.get(key) != now.get(key)]
    for key in numbers:
        yield f"{then.get(key)} {key}, and has {now.get(key)}"
    if then.get("tokenizer") != now.get("tokenizer"):
        yield "tokens of another tokenizer"
    # Other numbers imply other contents, which need no second line.
    if not numbers and then.get("contents") != now.get("contents"):
        yield "other contents"


def _tokenizers(fingerprints_: Mapping[str, Fingerprint]) -> set[str]:
    training = (each for name, each in fingerprints_.items() if name.startswith(_TRAINING))
    return {each["tokenizer"] for each in training if each.get("tokenizer")}


def fingerprint_of(dataset: Dataset | Streaming) -> Fingerprint:
    """Return the fingerprint of a dataset; without `contents` if its tokens are not in files."""
    source = getattr(dataset, "source", None)  # a registered dataset may have none
    if isinstance(source, TokenFiles):
        return _fingerprint_of_files(source)
    if isinstance(source, StreamedTokens):
        identity = [source.name, *source.content.identity]
        return {"tokenizer": source.tokenizer.fingerprint, "contents": _digest(identity)}
    return {"sequences": len(dataset) if isinstance(dataset, Dataset) else None}


def _fingerprint_of_files(source: TokenFiles) -> Fingerprint:
    manifest = source.manifest
    return {
        "files": len(source.files),
        "tokens": source.tokens,
        "tokenizer": manifest and manifest.tokenizer_sha256,
        "contents": _digest_of_list(_contents(source)),
    }


def _contents(source: TokenFiles) -> Iterator[list[Any]]:
    """Yield the identity of each file, and of the directory."""
    manifest = source.manifest
    for file in source.files:
        shard = manifest and manifest.by_file.get(file.path.name)
        about: list[Any] = [file.path.name, file.tokens, file.dtype.str]
        about += [file.index.crc32] if file.index else []
        if shard and shard.crc32:
            yield [*about, shard.crc32]
        else:
            # Of objects no ends: reading these would take requests for each file at every start.
            yield [*about, None if urls.in_bucket(file.path) else _ends(file)]
    if manifest:
        yield [manifest.eos_id, manifest.lengths_crc32]


def _ends(file: TokenFile) -> str:
    with file.path.open("rb") as opened:
        first = opened.read(_END_BYTES)
        opened.seek(max(0, file.path.stat().st_size - _END_BYTES))
        return hashlib.sha256(first + opened.read()).hexdigest()


def _digest(value: Any) -> str:  # noqa: ANN401 (any JSON)
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _digest_of_list(values: Iterable[Any]) -> str:
    """Return `_digest` of the values as a list, which is never in memory as a whole."""
    digest = hashlib.sha256(b"[")
    for number, value in enumerate(values):
        # The separator of `json.dumps`: the digest is that of the whole list.
        digest.update((", " * bool(number) + json.dumps(value)).encode())
    digest.update(b"]")
    return digest.hexdigest()
