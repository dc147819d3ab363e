"""Logits of a teacher that were saved in advance, read next to the tokens of their sequences.

DIR/
    teacher_logits.json     `Manifest`
    0_00000.npy ...         records of the first dataset, `sequences_per_file` in each file
    1_00000.npy ...         records of the second dataset

A record holds the K largest logits of each of the S tokens of a sequence, largest first:

    checksum    uint32 [1]      CRC-32 of input_ids, segment_ids, ids and logits
    ids         uint [S, K]     vocabulary entries; 16 bits if the vocabulary allows
    logits      float [S, K]

Records have the indices of their sequences (`loader`: index = order[position]). An index does not
depend on the order, the epoch, the mixture, the batch size or the mesh.
"""

import dataclasses
import functools
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from jaxtyping import UInt32
from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from jaxforge.cli.suggestions import path_hint
from jaxforge.config.job import JobConfig
from jaxforge.data.dataset import Dataset, Example, Mixture, Streaming
from jaxforge.data.fingerprint import fingerprint_of
from jaxforge.errors import UserError
from jaxforge.storage import urls
from jaxforge.storage.safe_files import read_regular
from jaxforge.storage.untrusted_json import DOCUMENT, first_problem

TEACHER_IDS, TEACHER_LOGITS = "teacher_ids", "teacher_logits"
"""Fields of a batch: entries and values of the teacher's largest logits [..., s, k]."""

FILE_NAME = "teacher_logits.json"
VERSION = 1
LogitsDtype = Literal["float32", "float16"]
_KEY = "distillation.logits"
_SEQUENCE_KEYS = (
    "train.seq_len", "data.pack_sequences", "data.eos_token_id", "data.overlong",
)  # fmt: skip
"""Keys on which the content of a sequence depends, apart from the files of its dataset."""
_OPEN_FILES = 64
_ENTRY_BYTES, _RECORD_BYTES = 8, 2**31 - 64  # NumPy's limit on the bytes of a record


@dataclass(frozen=True)
class SavedSet:
    """A dataset whose logits were saved.

    Attributes:
        name: name of the dataset, for messages.
        sequences: number of its sequences.
        contents: hash of its files (`fingerprint`).
    """

    name: str
    sequences: NonNegativeInt
    contents: str


@dataclass(frozen=True)
class Manifest:
    """Description of a directory of saved logits.

    Attributes:
        teacher: path of the teacher, for messages.
        arrays: dtype and hash of each of its arrays, as in `Progress.frozen`.
        vocab_size: entries of its vocabulary.
        top_k: number of saved logits of a token.
        dtype: dtype of the logits.
        settings: values of the keys on which the content of a sequence depends.
        sequences_per_file: number of records in a file; the last file of a dataset has fewer.
        datasets: the datasets, in the order of the numbers of their files.
        version: version of the format.
    """

    teacher: str
    arrays: dict[str, Annotated[list[str | int], Field(min_length=2, max_length=2)]]
    vocab_size: PositiveInt
    top_k: PositiveInt
    dtype: LogitsDtype
    settings: dict[str, Any]
    sequences_per_file: PositiveInt
    datasets: Annotated[list[SavedSet], Field(min_length=1)]
    version: int = VERSION

    @classmethod
    def read(cls, directory: Path) -> "Manifest":
        """Read the manifest of a directory.

        Raises:
            UserError: the file does not exist, cannot be read, or has another version.
        """
        path = directory / FILE_NAME
        try:
            manifest = _JSON.validate_json(read_regular(path, DOCUMENT), strict=True)
        except FileNotFoundError as error:
            raise UserError(
                f"{_KEY} = {directory}: {path.name} does not exist there{path_hint(directory)}. "
                "Save the logits first: jaxforge prepare --teacher-logits FILE --output DIR"
            ) from error
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error
        except ValidationError as error:
            raise UserError(_damaged(path, first_problem(error))) from error
        if manifest.version != VERSION:
            raise UserError(
                f"{path} has version {manifest.version}; this jaxforge reads version {VERSION}. "
                "Save the logits again"
            )
        if problem := _record_problem(manifest):
            raise UserError(_damaged(path, problem))
        return manifest

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return dataclasses.asdict(self)

    @property
    def record(self) -> np.dtype:
        """The type of a record."""
        return record_type(self.settings["train.seq_len"], self.top_k, self.vocab_size, self.dtype)


_JSON = TypeAdapter(Manifest)


def _damaged(path: Path, problem: str) -> str:
    return (
        f"{path} is damaged, or no manifest of logits: {problem}. Copy the directory again, or "
        "save the logits again"
    )


def _record_problem(manifest: Manifest) -> str:
    """Return why the type of a record cannot be what the manifest says, or ""."""
    if lacking := [key for key in _SEQUENCE_KEYS if key not in manifest.settings]:
        return f"settings has no {lacking[0]}"
    seq_len = manifest.settings["train.seq_len"]
    if not isinstance(seq_len, int) or isinstance(seq_len, bool) or seq_len < 1:
        return "train.seq_len is not an integer of at least 1"
    if manifest.top_k > manifest.vocab_size:
        return f"top_k exceeds vocab_size = {manifest.vocab_size:,}"
    if seq_len * manifest.top_k * _ENTRY_BYTES > _RECORD_BYTES:
        return f"a record of {seq_len:,} tokens and {manifest.top_k:,} logits is too large"
    return ""


def record_type(seq_len: int, top_k: int, vocab_size: int, dtype: LogitsDtype) -> np.dtype:
    """Return the type of a record."""
    ids, shape = ("<u2" if vocab_size <= 1 << 16 else "<u4"), (seq_len, top_k)
    logits = np.dtype(dtype).newbyteorder("<")
    return np.dtype([("checksum", "<u4", (1,)), ("ids", ids, shape), ("logits", logits, shape)])


def sequence_settings(config: JobConfig) -> dict[str, Any]:
    """Return the values of the keys on which the content of a sequence depends."""
    return {key: config.settings[key] for key in _SEQUENCE_KEYS}


def saved_sets(config: JobConfig, dataset: Dataset | Mixture | Streaming) -> list[SavedSet]:
    """Return the datasets of the training data in the form of a manifest.

    Raises:
        UserError: the sequences of a dataset have no fixed indices.
    """
    data = config.data
    name = data.dataset_path or data.hf_dataset_name or data.dataset_type
    sets = dataset.datasets if isinstance(dataset, Mixture) else {name: dataset}
    return [_saved_set(*item) for item in sets.items()]


def _saved_set(name: str, dataset: Dataset | Mixture | Streaming) -> SavedSet:
    contents = None if isinstance(dataset, Mixture) else fingerprint_of(dataset).get("contents")
    if not isinstance(dataset, Dataset) or contents is None:
        raise UserError(
            f"{name}: logits can be saved for token files alone, not for streamed, random or "
            "registered data. Prepare the data with jaxforge prepare, or set distillation.teacher"
        )
    return SavedSet(name, len(dataset), contents)


def checksums(example: Mapping[str, np.ndarray], records: np.ndarray) -> UInt32[np.ndarray, "n"]:
    """Return the checksum of each record.

    Args:
        example: the sequences, each array [n, S].
        records: their records [n].
    """
    # Little-endian, so that the bytes, and their checksum, are the same on every machine.
    tokens = np.ascontiguousarray(example["input_ids"], "<i4")
    # Without packing, a sequence is a single segment.
    segments = np.ascontiguousarray(example.get("segment_ids", np.zeros_like(tokens)), "<i4")
    values = np.empty(len(records), np.uint32)
    for i, record in enumerate(records):
        parts = (tokens[i], segments[i], record["ids"], record["logits"])
        values[i] = functools.reduce(lambda crc, x: zlib.crc32(x.tobytes(), crc), parts, 0)
    return values


def file_name(dataset: int, file: int) -> str:
    """Return the name of a file of records."""
    return f"{dataset}_{file:05d}.npy"


@dataclass(frozen=True)
class SavedLogits:
    """Saved logits of one dataset.

    Attributes:
        directory: the directory.
        manifest: its manifest.
        number: number of the dataset in the manifest.
        top_k: number of logits of a token that are read.
    """

    directory: Path
    manifest: Manifest
    number: int
    top_k: int

    def check_files(self) -> None:
        """Check that all files exist and have their full size.

        Raises:
            UserError: a file does not exist, or is too short.
        """
        total, per_file = self._set.sequences, self.manifest.sequences_per_file
        for first in range(0, total, per_file):
            path = self._path(first // per_file)
            # Without the header of the .npy file: a lower bound.
            needed = min(per_file, total - first) * self.manifest.record.itemsize
            size = path.stat().st_size if path.is_file() else 0
            if size < needed:
                raise UserError(
                    f"{path} is missing or cut short: {size:,} of at least {needed:,} bytes. Copy "
                    "the directory again, or save the logits again"
                )

    def read(self, indices: Sequence[int], example: Example) -> Example:
        """Return the fields of some sequences.

        Args:
            indices: indices of the sequences in the dataset.
            example: the sequences, stacked.

        Raises:
            UserError: a record is damaged, or belongs to other tokens.
        """
        records = np.empty(len(indices), self.manifest.record)
        for i, index in enumerate(indices):
            file, row = divmod(int(index), self.manifest.sequences_per_file)
            saved = _open(self._path(file), self.manifest.record)
            if row >= len(saved):
                raise UserError(
                    f"{self._path(file)} has {len(saved):,} records, and {FILE_NAME} names "
                    f"{self.manifest.sequences_per_file:,}. Copy the directory again, or save the "
                    "logits again"
                )
            records[i] = saved[row]
        is_damaged = checksums(example, records) != records["checksum"][:, 0]
        if is_damaged.any():
            raise UserError(
                f"{_KEY} = {self.directory}: the logits of sequence "
                f"{indices[int(np.argmax(is_damaged))]} of {self._set.name} are damaged, or belong "
                "to other tokens. Copy the directory again, or save the logits again"
            )
        return {
            # Sorted, largest first: fewer logits are the first ones.
            TEACHER_IDS: records["ids"][..., : self.top_k].astype(np.int32),
            TEACHER_LOGITS: records["logits"][..., : self.top_k].astype(np.float32),
        }

    @property
    def _set(self) -> SavedSet:
        return self.manifest.datasets[self.number]

    def _path(self, file: int) -> Path:
        return self.directory / file_name(self.number, file)


@functools.lru_cache(_OPEN_FILES)
def _open(path: Path, record: np.dtype) -> np.ndarray:
    try:
        records = np.load(path, mmap_mode="r")
    except Exception as error:  # NumPy reads the header as Python code, which may raise anything
        raise UserError(f"cannot read {path}: {error}") from error
    if records.dtype != record or records.ndim != 1:
        raise UserError(f"{path} has records of another type than {FILE_NAME}. Save it again")
    return records


@dataclass(frozen=True)
class DatasetWithLogits(Dataset):
    """Dataset whose examples have the fields of a teacher.

    Attributes:
        logits: the saved logits of the dataset.
    """

    logits: SavedLogits

    def __getitem__(self, index: int) -> Example:
        return {name: array[0] for name, array in self.batch([index]).items()}

    def batch(self, indices: Sequence[int]) -> Example:
        """Return the examples `indices`, stacked."""
        example = super().batch(indices)
        return {**example, **self.logits.read(indices, example)}


def with_saved_logits(
    config: JobConfig, dataset: Dataset | Mixture | Streaming
) -> Dataset | Mixture | Streaming:
    """Return training data with the fields of `distillation.logits`; unchanged if it is not set.

    Raises:
        UserError: the logits do not exist, or were saved for other data or settings.
    """
    path = config.distillation.logits
    if config.train.objective != "distillation" or path is None:
        return dataset
    directory = urls.local(urls.path(path, _KEY), _KEY, "copy the directory to a local disk")
    manifest = Manifest.read(directory)
    _check_settings(config, directory, manifest)
    # By content, as datasets may have been renamed or reordered since.
    by_contents = {(item.contents, item.sequences): i for i, item in enumerate(manifest.datasets)}
    parts = []
    for item in saved_sets(config, dataset):
        number = by_contents.get((item.contents, item.sequences))
        if number is None:
            names = ", ".join(saved.name for saved in manifest.datasets)
            raise UserError(
                f"{_KEY} = {directory} has no logits of {item.name}, or its files have changed. "
                f"It has logits of {names}. Save them again with this config"
            )
        logits = SavedLogits(directory, manifest, number, config.distillation.top_k)
        logits.check_files()
        parts.append(logits)
    if not isinstance(dataset, Mixture):
        assert isinstance(dataset, Dataset)  # `saved_sets` refuses streams
        return DatasetWithLogits(dataset.source, dataset.split, parts[0])
    return Mixture({
        name: DatasetWithLogits(part.source, part.split, logits)
        for (name, part), logits in zip(dataset.datasets.items(), parts, strict=True)
    })  # fmt: skip


def _check_settings(config: JobConfig, directory: Path, manifest: Manifest) -> None:
    saved = {key: manifest.settings.get(key) for key in _SEQUENCE_KEYS}
    for key, value in {**saved, "model.vocab_size": manifest.vocab_size}.items():
        if (of_run := config.settings[key]) != value:
            raise UserError(
                f"{_KEY} = {directory} was saved with {key} = {value}, and this run has {of_run}. "
                "Set it to the saved value, or save the logits again with this config"
            )
    if config.distillation.top_k > manifest.top_k:
        raise UserError(
            f"distillation.top_k = {config.distillation.top_k} exceeds the {manifest.top_k} logits "
            f"of a token in {directory}. Lower it, or save the logits again"
        )
