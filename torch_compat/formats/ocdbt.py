"""Reader of the arrays of an Orbax checkpoint: zarr in OCDBT, the key-value store of tensorstore.

    manifest.ocdbt, d/...            index: key -> a short value, or file, offset and length
    ocdbt.process_*/d/...            values that each process wrote
    key {name}/.zarray               shape, dtype, chunk shape and compression of an array
    key {name}/0.1                   chunk (0, 1) of an array

An uncompressed chunk has the same layout in the file as in memory, so it is mapped and not copied.
Tensorstore would read a whole chunk for each part of it, and a chunk may be a matrix of a layer.
Tensorstore reads everything else: compressed chunks, arrays with omitted zero chunks, databases in
buckets and unexpected forms.
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
"""Subdirectory of index and chunks, in the database's directory or in that of a process."""
ZARRAY = "/.zarray"
"""Suffix of the key of an array's metadata."""

# Base path, file, offset and length. Escaped names (with %) are left to tensorstore.
_LOCATION = re.compile(r"value:([^:%]*):([^:%]*):(\d+):(\d+)")

Location = tuple[str, int, int] | bytes
"""File, offset and length of a value, or a short value itself."""


def spec(store: Path, name: str) -> dict[str, Any]:
    """Return the tensorstore spec of an array.

    Args:
        store: directory of the database.
        name: name of the array.
    """
    return {"driver": "zarr", "kvstore": {**_database(store), "path": f"{name}/"}}


def chunk_key(cell: tuple[int, ...]) -> str:
    """Return the key of a chunk, without the prefix of its array."""
    return ".".join(map(str, cell)) or "0"


def open_arrays(store: Path) -> dict[str, LazyTensor]:
    """Open all arrays of a database; only metadata are read.

    Returns:
        array name -> tensor.

    Raises:
        ValueError: the database is damaged.
        OSError: the database cannot be read.
    """
    database = ts.KvStore.open(_database(store)).result()
    # Only keys are listed. Values are read later, and metadata all at once, since each is a
    # request.
    keys = [key.decode() for key in database.list().result()]
    described = {key: database.read(key) for key in keys if key.endswith(ZARRAY)}
    locations = tensor_locations(store)
    directory = Directory(store)
    files = functools.cache(directory.open)
    arrays = {}
    for key, value in described.items():
        name = key.removesuffix(ZARRAY)
        metadata = _ArrayMetadata.parse(json.loads(value.result().value))
        if metadata is not None and metadata.describes(locations.get(name, {})):
            array = _MappedArray(files, metadata, locations[name], f"{store}: {name}")
            arrays[name] = LazyTensor(metadata.shape, metadata.dtype, array.read, array.where)
        else:
            arrays[name] = open_with_tensorstore(store, name)
    return arrays


def _database(store: Path) -> dict[str, Any]:
    return {"driver": "ocdbt", "base": _base(store)}


def _base(store: Path) -> dict[str, Any]:
    if not urls.in_bucket(store):
        return {"driver": "file", "path": f"{store}/"}
    from jaxforge.checkpoint import orbax_manager

    return orbax_manager.spec(f"{store}/")


def open_with_tensorstore(store: Path, name: str) -> LazyTensor:
    """Open a tensor that this reader does not support with the library that wrote it."""
    array = ts.open(spec(store, name), open=True, read=True).result()
    shape, dtype, where = tuple(array.shape), np.dtype(array.dtype.numpy_dtype), f"{store}: {name}"

    def read(index: Index) -> np.ndarray:
        try:
            return array[index].read().result()
        except (OSError, ValueError) as error:
            raise UserError(f"{where} is damaged ({shown(error)})") from error

    return LazyTensor(shape, dtype, read, where)


def tensor_locations(store: Path) -> dict[str, dict[str, Location]]:
    """Return array -> chunk key -> location; empty if the index has several nodes."""
    # Objects of a bucket cannot be mapped, so that tensorstore reads these arrays.
    if urls.in_bucket(store):
        return {}
    base = ts.KvStore.open(_base(store)).result()
    # Versions are in ascending order: the last one is the newest.
    version = ts.ocdbt.dump(base).result()["versions"][-1]
    locations: dict[str, dict[str, Location]] = {}
    # An index of several nodes is left to tensorstore.
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
class _ArrayMetadata:
    """Contents of `.zarray` for an array with uncompressed row-major chunks."""

    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    dtype: np.dtype

    @classmethod
    def parse(cls, described: Mapping[str, Any]) -> "_ArrayMetadata | None":
        """Return metadata; None if chunks are compressed, filtered, column-major or big-endian."""
        plain = {"compressor": None, "filters": None, "order": "C", "dimension_separator": "."}
        dtype = _parse_dtype(described.get("dtype"))
        if dtype is None or any(described.get(key) != value for key, value in plain.items()):
            return None
        return cls(tuple(described["shape"]), tuple(described["chunks"]), dtype)

    def describes(self, locations: Mapping[str, Location]) -> bool:
        """Return whether these are all chunks of the array, each of its required length."""
        cells = math.prod(-(-n // each) for n, each in zip(self.shape, self.chunk, strict=True))
        length = math.prod(self.chunk) * self.dtype.itemsize
        # Before the cells are enumerated: damaged metadata may claim any number of them.
        if len(locations) != cells + 1:  # plus `.zarray`
            return False
        keys = (chunk_key(cell) for cell in self.cells(full_index(self.shape)))
        sizes = {
            key: len(location) if isinstance(location, bytes) else location[2]
            for key, location in locations.items()
        }
        return all(sizes.get(key) == length for key in keys)

    def cells(self, index: Index) -> Iterator[tuple[int, ...]]:
        """Return the grid cells of the chunks that an index intersects."""
        return itertools.product(
            *(range(s.start // n, -(-s.stop // n)) for s, n in zip(index, self.chunk, strict=True))
        )

    def bounds(self, cell: tuple[int, ...]) -> Index:
        """Return the index of a chunk, which may exceed the array at the end."""
        return tuple(slice(i * n, (i + 1) * n) for i, n in zip(cell, self.chunk, strict=True))


@dataclasses.dataclass(frozen=True)
class _MappedArray:
    """Array whose chunks are read from mapped files."""

    files: Callable[[str], Bytes]
    metadata: _ArrayMetadata
    locations: Mapping[str, Location]
    where: str

    def read(self, index: Index) -> np.ndarray:
        if not math.prod(index_shape(index)):
            return np.empty(index_shape(index), self.metadata.dtype)
        cells = list(self.metadata.cells(index))
        if len(cells) == 1:
            return self._read_chunk(cells[0], index)
        out, origin = np.empty(index_shape(index), self.metadata.dtype), [s.start for s in index]
        for cell in cells:
            both = intersection(index, self.metadata.bounds(cell))
            assert both is not None
            out[relative_to(both, origin)] = self._read_chunk(cell, both)
        return out

    def _read_chunk(self, cell: tuple[int, ...], index: Index) -> np.ndarray:
        """Read an index that lies within a chunk."""
        within = relative_to(index, [s.start for s in self.metadata.bounds(cell)])
        location, chunk = self.locations[chunk_key(cell)], self.metadata.chunk
        if isinstance(location, bytes):
            return np.frombuffer(location, self.metadata.dtype).reshape(chunk)[within]
        name, offset, length = location
        file = self.files(name)
        if offset + length > file.size:
            raise UserError(f"{self.where}: {name} is truncated at byte {file.size}")
        strides = [math.prod(chunk[i + 1 :]) for i in range(len(chunk))]
        return in_file(file, offset, chunk, strides, self.metadata.dtype, self.where).read(within)


def _parse_dtype(name: Any) -> np.dtype | None:  # noqa: ANN401 (untrusted JSON)
    """Return the dtype of a little-endian zarr name or of the name of an extended type."""
    if not isinstance(name, str):
        return None
    # `str` of ml_dtypes' types has no meaning outside NumPy (kind V): zarr uses their names.
    by_code = {dtype.newbyteorder("<").str: dtype for dtype in DTYPES.values() if dtype.kind != "V"}
    return by_code.get(name) or DTYPES.get(name)
