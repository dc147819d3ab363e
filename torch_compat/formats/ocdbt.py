"""The arrays of an Orbax checkpoint: zarr in OCDBT, tensorstore's database in files.

    manifest.ocdbt, d/...            an index: key -> a short value, or file, offset and length
    ocdbt.process_*/d/...            what each process wrote, where the index points to
    key {name}/.zarray               shape, dtype, chunks and compression of an array
    key {name}/0.1                   one of its chunks

A chunk that is not compressed lies in its file as it would in memory. It is mapped, so that nothing
is copied on the way to where it is wanted. Everything else is read by tensorstore: chunks that are
compressed, those that were left out for being zero, and databases in buckets or of a form not
expected here.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from jaxforge.errors import UserError
from jaxforge.storage import urls
from torch_compat.formats.files import Bytes, Directory, in_file
from torch_compat.formats.lazy import (
    DTYPES,
    Index,
    LazyTensor,
    full_index,
    index_shape,
    intersection,
    relative_to,
)
from torch_compat.formats.limits import shown

DATA = "d"
"""Directories of index and chunks, below that of the database or of a process."""
ZARRAY = "/.zarray"
"""Ends the key of what describes an array."""

_LOCATION = re.compile(r"value:([^:%]*):([^:%]*):(\d+):(\d+)")

Location = tuple[str, int, int] | bytes
"""File, offset and length of a value; or the value itself, where it is short."""


def spec(store: Path, name: str) -> dict[str, Any]:
    """Tensorstore's of an array.

    Args:
        store: the directory of the database.
        name: the array's.
    """
    return {"driver": "zarr", "kvstore": {**_database(store), "path": f"{name}/"}}


def chunk_key(cell: tuple[int, ...]) -> str:
    """The key of a chunk, after that of its array, by its numbers."""
    return ".".join(map(str, cell)) or "0"


def open_arrays(store: Path) -> dict[str, LazyTensor]:
    """Every array of a database, by name; only what describes them is read.

    Raises:
        ValueError: it is damaged.
        OSError: it cannot be read.
    """
    database = ts.KvStore.open(_database(store)).result()
    keys = [key.decode() for key in database.list().result()]
    described = {key: database.read(key) for key in keys if key.endswith(ZARRAY)}
    locations = _locations(store)
    directory = Directory(store)
    files = functools.cache(directory.open)
    arrays = {}
    for key, value in described.items():
        name = key.removesuffix(ZARRAY)
        about = _About.of(json.loads(value.result().value))
        if about is not None and about.describes(locations.get(name, {})):
            arrays[name] = _Mapped(files, about, locations[name], f"{store}: {name}").lazy()
        else:
            arrays[name] = _by_tensorstore(store, name)
    return arrays


def _database(store: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _base(store)}


def _base(store: Path) -> dict[str, Any]:
    if not urls.in_bucket(store):
        return {"driver": "file", "path": f"{store}/"}
    from jaxforge.storage import buckets

    return buckets.spec(f"{store}/")


def _by_tensorstore(store: Path, name: str) -> LazyTensor:
    array = ts.open(spec(store, name), open=True, read=True).result()
    shape, dtype, where = tuple(array.shape), np.dtype(array.dtype.numpy_dtype), f"{store}: {name}"

    def read(index: Index) -> np.ndarray:
        try:
            return array[index].read().result()
        except (OSError, ValueError) as error:
            raise UserError(f"{where} is damaged ({shown(error)})") from error

    return LazyTensor(shape, dtype, read, where)


def _locations(store: Path) -> dict[str, dict[str, Location]]:
    """Array -> key of a chunk -> where it lies; nothing where the index is of several nodes."""
    if urls.in_bucket(store):
        return {}
    base = ts.KvStore.open(_base(store)).result()
    version = ts.ocdbt.dump(base).result()["versions"][-1]
    locations: dict[str, dict[str, Location]] = {}
    if version["root_height"] or "location" not in version["root"]:
        return locations
    for entry in ts.ocdbt.dump(base, version["root"]["location"]).result()["entries"]:
        name, _, key = entry["key"].decode().rpartition("/")
        location = entry.get("inline_value")
        if location is None and (match := _LOCATION.fullmatch(entry["indirect_value"])):
            location = match[1] + match[2], int(match[3]), int(match[4])
        if location is not None:
            locations.setdefault(name, {})[key] = location
    return locations


@dataclasses.dataclass(frozen=True)
class _About:
    """Contents of `.zarray` for an array with chunks as in memory."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def of(cls, described: Mapping[str, Any]) -> "_About | None":
        """None where its chunks are not: compressed, filtered, of another order, big-endian."""
        plain = {"compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
        dtype = _dtype(described.get("dtype"))
        if dtype is None or any(described.get(key) != value for key, value in plain.items()):
            return None
        return cls(tuple(described["shape"]), tuple(described["chunks"]), dtype)

    def describes(self, locations: Mapping[str, Location]) -> bool:
        """Return whether these are all chunks of the array, each of its required length."""
        cells = math.prod(-(-n // each) for n, each in zip(self.shape, self.chunk, strict=True))
        length = math.prod(self.chunk) * self.dtype.itemsize
        if len(locations) != cells + 1:  # with its description
            return False
        keys = (chunk_key(cell) for cell in self.cells(full_index(self.shape)))
        sizes = {k: len(p) if isinstance(p, bytes) else p[2] for k, p in locations.items()}
        return all(sizes.get(key) == length for key in keys)

    def cells(self, index: Index) -> Iterator[tuple[int, ...]]:
        """Numbers of the chunks that an index reaches."""
        of = [range(s.start // n, -(-s.stop // n)) for s, n in zip(index, self.chunk, strict=True)]
        return itertools.product(*of)

    def bounds(self, cell: tuple[int, ...]) -> Index:
        """Return the index range of a chunk, which may exceed the array at its end."""
        return tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, self.chunk, strict=True))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """An array read from the files themselves."""

    files: Callable[[str], Bytes]
    about: _About
    locations: Mapping[str, Location]
    where: str

    def lazy(self) -> LazyTensor:
        return LazyTensor(self.about.shape, self.about.dtype, self.read, self.where)

    def read(self, index: Index) -> np.ndarray:
        if not math.prod(index_shape(index)):
            return np.empty(index_shape(index), self.about.dtype)
        cells = list(self.about.cells(index))
        if len(cells) == 1:
            return self._part(cells[0], index)
        out, origin = np.empty(index_shape(index), self.about.dtype), [s.start for s in index]
        for cell in cells:
            both = intersection(index, self.about.bounds(cell))
            assert both is not None
            out[relative_to(both, origin)] = self._part(cell, both)
        return out

    def _part(self, cell: tuple[int, ...], index: Index) -> np.ndarray:
        """An index within one chunk."""
        within = relative_to(index, [s.start for s in self.about.bounds(cell)])
        location, chunk = self.locations[chunk_key(cell)], self.about.chunk
        if isinstance(location, bytes):
            return np.frombuffer(location, self.about.dtype).reshape(chunk)[within]
        name, offset, length = location
        file = self.files(name)
        if offset + length > file.size:
            raise UserError(f"{self.where}: {name} is truncated: it ends at byte {file.size}")
        strides = [math.prod(chunk[i + 1 :]) for i in range(len(chunk))]
        return in_file(file, offset, chunk, strides, self.about.dtype, self.where).read(within)


def _dtype(name: Any) -> np.dtype | None:  # noqa: ANN401 (whatever the file held)
    """Return the dtype of a little-endian zarr name, or of an extended type's own name."""
    if not isinstance(name, str):
        return None
    by_code = {dtype.newbyteorder("<").str: dtype for dtype in DTYPES.values() if dtype.kind != "V"}
    return by_code.get(name) or DTYPES.get(name)
