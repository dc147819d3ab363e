"""Activations in files: a directory that NumPy reads, written sequence by sequence.

<point>.npy        float32 [sequences, layers, tokens, dim]; of attention_weights [sequences,
                   layers, heads, queries, keys], of logits [sequences, tokens, vocabulary]
tokens.npy         int32 [sequences, tokens]
activations.json   whose they are
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
"""In a run directory: what was captured while it was trained, `step_<n>/` of each step."""

_ABOUT = "activations.json"


def write(
    directory: Path, sequences: Iterable[Mapping[str, np.ndarray]], about: Mapping[str, Any]
) -> int:
    """Writes a directory that has its name once it is whole, in the place of one that is there.

    Args:
        directory: its path.
        sequences: of each, values by name; one is in memory at a time.
        about: what `activations.json` is to say.

    Returns:
        How many sequences there were.

    Raises:
        OSError: it cannot be written, and nothing of it is left.
    """
    n = 0
    with _replacing(directory) as partial, contextlib.ExitStack() as opened:
        files: dict[str, _Growing] = {}
        for sequence in sequences:
            for name, values in sequence.items():
                if name not in files:
                    path = partial / f"{name}.npy"
                    files[name] = opened.enter_context(_Growing(path, values))
                files[name].add(values)
            n += 1
        for file in files.values():
            file.finish()
        (partial / _ABOUT).write_text(json.dumps(dict(about), indent=2) + "\n")
    return n


def read(directory: Path) -> dict[str, np.ndarray]:
    """The arrays of a directory by name; what is not looked at is not read."""
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(directory.glob("*.npy"))}


def steps(run: Path) -> list[int]:
    """The steps whose activations a run directory has."""
    names = (path.name.removeprefix("step_") for path in (run / DIRECTORY).glob("step_*"))
    return sorted(int(name) for name in names if name.isdigit())


def step_directory(run: Path, step: int) -> Path:
    """Return the directory of a run's activations of a step."""
    return run / DIRECTORY / f"step_{step}"


class _Growing(contextlib.AbstractContextManager):
    """A `.npy` file that arrays are added to, along a first axis."""

    def __init__(self, path: Path, like: np.ndarray) -> None:
        self._file, self._like, self._n = path.open("w+b"), like, 0
        self._header()

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, values: np.ndarray) -> None:
        """Adds one at the end."""
        self._file.write(np.ascontiguousarray(values).data)
        self._n += 1

    def finish(self) -> None:
        """Says in the header how many there are."""
        self._file.seek(0)
        self._header()
        self._file.flush()
        os.fsync(self._file.fileno())

    def _header(self) -> None:
        descr = np.lib.format.dtype_to_descr(self._like.dtype)
        shape = (self._n, *self._like.shape)
        described = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(self._file, described)  # with room for the number


@contextlib.contextmanager
def _replacing(directory: Path) -> Iterator[Path]:
    safe_files.make_directory(directory.parent)
    for torn in directory.parent.glob(f".{directory.name}.*partial"):  # of one that was killed
        shutil.rmtree(torn, ignore_errors=True)
    partial, old = safe_files.temporary_path(directory), safe_files.temporary_path(directory)
    try:
        partial.mkdir()
        yield partial
        if directory.exists():
            directory.replace(old)
        partial.replace(directory)
    finally:  # a full disk has room again
        for torn in (partial, old):
            shutil.rmtree(torn, ignore_errors=True)
