"""Directories of token files that other programs wrote, recognised by their names.

- Megatron-LM: `PREFIX.idx` and `PREFIX.bin`, as a prefix or a directory;
- nanoGPT: `train.bin` and `val.bin`, bare uint16;
- llm.c: `*_train_*.bin` and `*_val_*.bin`, with a header.

They are read if a directory has no file of the default pattern, and no `manifest.json`.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from jaxforge.config.data import DataConfig
from jaxforge.data.megatron_index import SUFFIX, index_of

log = logging.getLogger(__name__)

Split = Literal["train", "val"]
_DEFAULT = DataConfig.model_fields["file_pattern"].default


class Layout(NamedTuple):
    """Token files of a program.

    Attributes:
        paths: `.bin` files, or the `.idx` of Megatron's, sorted.
        dtype: NumPy name of the type of bare files; "" if each file says it.
    """

    paths: list[Path]
    dtype: str = ""


def find_layout(directory: Path, pattern: str, split: Split) -> Layout | None:
    """Return the token files of another program; None if there are none.

    Args:
        directory: a directory, or the prefix of Megatron's files.
        pattern: `data.file_pattern`. Another than the default one selects files by itself.
        split: the part to read of directories that hold both.
    """
    if is_prefix(directory):
        return Layout([directory.with_name(directory.name + SUFFIX)])
    if pattern != _DEFAULT or next(directory.glob(pattern), None) is not None:
        return None
    for glob, dtype, name in (
        (f"*{SUFFIX}", "", "Megatron-LM"),
        (f"{split}.bin", "uint16", "nanoGPT"),
        (f"*_{split}_*.bin", "", "llm.c"),
    ):
        if paths := sorted(directory.glob(glob)):
            log.info("%s: reading %d file(s) %s of %s", directory, len(paths), glob, name)
            return Layout(paths, dtype)
    return None


def with_indices(paths: Sequence[Path]) -> list[Path]:
    """Replace each `.bin` file by its index, if Megatron wrote one next to it."""
    indices = (path.suffix == ".bin" and index_of(path) for path in paths)
    return list(dict.fromkeys(index or path for index, path in zip(indices, paths, strict=True)))


def is_prefix(path: Path) -> bool:
    """Return whether a path is the prefix of Megatron's token files."""
    return not path.is_dir() and path.with_name(path.name + SUFFIX).exists()


def prefix_hint(path: Path) -> str:
    """Return advice, appended to a path, for a file of Megatron instead of its prefix; else ""."""
    prefix = path.with_suffix("")
    if path.suffix not in (".bin", SUFFIX) or not is_prefix(prefix):
        return ""
    return f"is a file; name the prefix of Megatron's files instead: {prefix}"
