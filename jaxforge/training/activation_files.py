"""Files of captured activations: a directory of `.npy` files, written sequence by sequence.

<point>.npy        float32 [sequences, layers, tokens, dim]; of attention_weights [sequences,
                   layers, heads, queries, keys], of logits [sequences, tokens, vocabulary]
tokens.npy         int32 [sequences, tokens]
activations.json   step, dataset, points, layers and sequences of the capture
"""

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.storage import safe_files

DIRECTORY = "activations"
"""Subdirectory of a run directory with `step_<n>/` of each capture during training."""

_ABOUT = "activations.json"


def write(
    directory: Path, sequences: Iterable[Mapping[str, np.ndarray]], about: Mapping[str, Any]
) -> int:
    """Write a directory of activations; it appears under its name only when it is complete.

    Args:
        directory: the path; an existing directory is replaced.
        sequences: arrays by name, for each sequence. Only one sequence is in memory at a time.
        about: contents of `activations.json`.

    Returns:
        The number of sequences.

    Raises:
        OSError: the directory cannot be written; nothing of it remains.
    """
    n = 0
    with _replacing(directory) as partial, contextlib.ExitStack() as opened:
        files: dict[str, AppendableArray] = {}
        for sequence in sequences:
            for name, values in sequence.items():
                if name not in files:
                    path = partial / f"{name}.npy"
                    files[name] = opened.enter_context(AppendableArray(path, values))
                files[name].add(values)
            n += 1
        for file in files.values():
            file.finish()
        (partial / _ABOUT).write_text(json.dumps(dict(about), indent=2) + "\n")
    return n


def read(directory: Path) -> dict[str, np.ndarray]:
    """Return the arrays of a directory by name, memory-mapped."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(directory.glob("*.npy"))}


def steps(run: Path) -> list[int]:
    """Return the steps whose activations a run directory contains."""
    names = (path.name.removeprefix("step_") for path in (run / DIRECTORY).glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def step_directory(run: Path, step: int) -> Path:
    """Return the directory of the activations of a step."""
    return run / DIRECTORY / f"step_{step}"


class AppendableArray(contextlib.AbstractContextManager):
    """A `.npy` file to which arrays are appended along a new first axis.

    The header is written first with length 0, and again with the final length by `finish`: NumPy
    pads headers so that a longer number does not move the data.
    """

    def __init__(self, path: Path, like: np.ndarray) -> None:
        self._file, self._like, self._n = path.open("w+b"), like, 0
        self._header()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, values: np.ndarray) -> None:
        """Append an array."""
        self._file.write(np.ascontiguousarray(values).data)
        self._n += 1

    def finish(self) -> None:
        """Write the final header and make the file durable."""
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._like.dtype)
        shape = (self._n, *self._like.shape)
        described = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)  # padded, see the class


@contextlib.contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    safe_files.make_directory(directory.parent)
    for torn in directory.parent.glob(
        f".{directory.name}.*partial"
    ):  # left by a process that was killed
        shutil.rmtree(torn, ignore_errors=True)
    partial, old = safe_files.temporary_path(directory), safe_files.temporary_path(directory)
    try:
        partial.mkdir()
        yield partial
        if directory.exists():
            directory.replace(old)
        partial.replace(directory)
    finally:  # frees the space on a full disk
        for torn in (partial, old):
            shutil.rmtree(torn, ignore_errors=True)
