"""Output directory of `jaxforge prepare`."""

from pathlib import Path
from typing import NamedTuple

from jaxforge.data.corpus.manifest import FILE_NAME, Manifest
from jaxforge.errors import UserError

TRAIN, VALIDATION, TOKENIZER = "train", "validation", "tokenizer"
"""Subdirectories of a prepared directory."""


class PreparedData(NamedTuple):
    """A prepared directory.

    Attributes:
        directory: absolute path, present or future.
        train: manifest of the training set.
        validation: manifest of the held-out set; None if there is none.
    """

    directory: Path
    train: Manifest
    validation: Manifest | None = None

    @classmethod
    def read(cls, directory: Path, path: Path | None = None) -> "PreparedData":
        """Read the manifests.

        Args:
            directory: the directory of `prepare --output`.
            path: future path of the directory, if it will be renamed.

        Raises:
            UserError: the directory was not made by `prepare`.
        """
        train = Manifest.read(directory / TRAIN)
        if train is None:
            raise UserError(
                f"{directory} was not made by `jaxforge prepare`: {directory / TRAIN / FILE_NAME} "
                "does not exist. Prepare the text first, and give the directory of --output"
            )
        validation = Manifest.read(directory / VALIDATION)
        return cls((path or directory).absolute(), train, validation)

    @property
    def pattern(self) -> str:
        """Glob of the shards."""
        return "*.bin" if self.train.shards[0].file.endswith(".bin") else "*.npy"

    def at(self, name: str) -> str:
        """Return the path of a subdirectory."""
        return str(self.directory / name)


def windows(manifest: Manifest, seq_len: int) -> int:
    """Return the sequences of an epoch; each file is split separately into seq_len + 1 tokens."""
    return sum(shard.tokens // (seq_len + 1) for shard in manifest.shards)


def longest_sequence(manifest: Manifest) -> int:
    """Return the tokens of the longest sequence that a single file can hold."""
    return max(shard.tokens for shard in manifest.shards) - 1
