"""Result of `jaxforge prepare`, as a config needs it."""

from pathlib import Path
from typing import NamedTuple

from jaxforge.data.corpus.manifest import FILE_NAME, Manifest
from jaxforge.errors import UserError

TRAIN, VALIDATION, TOKENIZER = "train", "validation", "tokenizer"
"""What lies in a prepared directory."""


class PreparedData(NamedTuple):
    """A prepared directory.

    Attributes:
        place: where it is, or will be, from any working directory.
        train: what is trained on.
        validation: what was held out, if anything was.
    """

    directory: Path
    train: Manifest
    validation: Manifest | None = None

    @classmethod
    def read(cls, directory: Path, path: Path | None = None) -> "PreparedData":
        """Reads the manifests.

        Args:
            directory: as of `prepare --output`.
            path: where it will be, if not there.

        Raises:
            UserError: it is no such directory.
        """
        train = Manifest.read(directory / TRAIN)
        if train is None:
            raise UserError(
                f"{directory} was not made by `jaxforge prepare`: {directory / TRAIN / FILE_NAME} "
                "is not there; prepare the text first, and give the directory of --output"
            )
        validation = Manifest.read(directory / VALIDATION)
        return cls((path or directory).absolute(), train, validation)

    @property
    def pattern(self) -> str:
        """Glob of the shards."""
        return "*.bin" if self.train.shards[0].file.endswith(".bin") else "*.npy"

    def at(self, name: str) -> str:
        """The path of a part of it."""
        return str(self.directory / name)


def windows(manifest: Manifest, seq_len: int) -> int:
    """Sequences of an epoch: each file is cut by itself, and a sequence has a label more."""
    return sum(shard.tokens // (seq_len + 1) for shard in manifest.shards)


def longest_sequence(manifest: Manifest) -> int:
    """Tokens of the longest sequence that some file has."""
    return max(shard.tokens for shard in manifest.shards) - 1
