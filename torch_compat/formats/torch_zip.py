"""Archives of `torch.save`: uncompressed zip files of a pickle and raw little-endian storages.

    archive/data.pkl    the object; a tensor is a storage, an offset, a size and strides
    archive/data/0 ...  the storages
    archive/byteorder   "little"
    archive/version     "3"

Archives are read in place: only the requested bytes are read.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from zlib_ng import zlib_ng  # CRC-32 several times as fast as that of zlib

from jaxforge.errors import UserError
from torch_compat.formats import limits, pickles
from torch_compat.formats.files import Bytes, in_file, writing
from torch_compat.formats.lazy import DTYPES, LazyTensor, blocks, is_shape
from torch_compat.formats.limits import shown
from torch_compat.formats.pickle_machine import Record
from torch_compat.formats.pickles import Call, Global, Persistent
from torch_compat.formats.zip_index import (
    ChecksummedRecord,
    FileRange,
    ZipEntry,
    data_start,
    read_index,
)

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
_STORAGE_OF = {dtype: storage for storage, dtype in _STORAGES.items()}


class _Storage(NamedTuple):
    record: str
    dtype: np.dtype
    length: int


# A tensor while the pickle runs. `Archive._resolve` validates it afterwards and makes a LazyTensor.
class _Tensor(NamedTuple):
    storage: _Storage
    dtype: np.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Dtype(NamedTuple):
    """Stand-in for a dtype.

    A pickle may set the state of any object that it names. With a bare `np.dtype`, that would
    change the global dtype objects of `ml_dtypes`.
    """

    numpy: np.dtype


def _tensor_v2(storage: Any, *details: Any) -> _Tensor:  # noqa: ANN401
    offset, size, stride, *_ = details
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    return _Tensor(storage, storage.dtype, offset, as_size(size), as_size(stride))


def _tensor_v3(storage: Any, *details: Any) -> _Tensor:  # noqa: ANN401
    *_, dtype = details[:6]
    if not isinstance(dtype, Dtype):
        raise TypeError("a tensor without a dtype")
    return _tensor_v2(storage, *details)._replace(dtype=dtype.numpy)


def as_size(sizes: Any) -> tuple:  # noqa: ANN401
    """Return a tuple of sizes, as `torch.Size` does."""
    if not isinstance(sizes, tuple | list):
        raise TypeError("a size that is no tuple")
    return tuple(sizes)


class _OrderedDict(dict):
    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        """Ignore the attributes of a module's state dict (`_metadata`)."""


class _NumpyArray(Record):
    """Array inside a pickle, such as NumPy's random state; the values are ignored."""

    def __init__(self, *_: object) -> None: ...


_PLAIN: Mapping[str, Any] = {"set": set, "frozenset": frozenset, "complex": complex,
                             "bytes": lambda: b""}  # fmt: skip
_COMPLEX = Dtype(np.dtype(np.complex64))  # rotary table of torchtitan until September 2025
TORCH_DTYPES = {
    **{("torch", name): Dtype(dtype) for name, dtype in DTYPES.items()},
    ("torch", "complex64"): _COMPLEX,
}
_NAMES: Mapping[tuple[str, str], Any] = {
    **TORCH_DTYPES,
    **{("torch", storage): Dtype(DTYPES[dtype]) for storage, dtype in _STORAGES.items()},
    ("torch", "ComplexFloatStorage"): _COMPLEX,
    ("torch.storage", "UntypedStorage"): Dtype(DTYPES["uint8"]),
    ("torch", "UntypedStorage"): Dtype(DTYPES["uint8"]),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch", "Size"): as_size,
    ("torch", "device"): lambda kind, *index: ":".join([kind, *map("{:d}".format, index)]),
    ("collections", "OrderedDict"): _OrderedDict,
    ("numpy", "ndarray"): _NumpyArray,
    ("numpy", "dtype"): _NumpyArray,
    ("numpy.core.multiarray", "scalar"): _NumpyArray,
    ("numpy._core.multiarray", "scalar"): _NumpyArray,
    ("numpy.core.multiarray", "_reconstruct"): _NumpyArray,
    ("numpy._core.multiarray", "_reconstruct"): _NumpyArray,
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1") if isinstance(text, str) else b"",
    **{
        (module, name): make
        for module in ("builtins", "__builtin__")
        for name, make in _PLAIN.items()
    },
}


class Opaque(Record):
    """Stands for an instance of a class whose meaning is not needed; its state is kept as data."""

    def __init__(self, *_: object) -> None: ...


class _Tolerant(dict[tuple[str, str], Any]):
    """Names in which every unknown one stands for `Opaque`: nothing is imported or called."""

    def __contains__(self, name: object) -> bool:
        return True

    def __missing__(self, name: tuple[str, str]) -> type[Opaque]:
        return Opaque


_TOLERANT = _Tolerant(
    {**_NAMES, ("collections", "defaultdict"): lambda *_: {}},
)


class Archive:
    """`torch.save` archive that is a file or a part of a file.

    Args:
        file: the file.
        start: first byte of the archive.
        length: size of the archive in bytes.
        where: description of the archive for messages.

    Raises:
        UserError: the archive lies outside the file, is damaged, or is compressed.
    """

    def __init__(self, file: Bytes, start: int, length: int, where: str) -> None:
        if start < 0 or length < 0 or start + length > file.size:
            raise UserError(
                f"{where}: said to lie at bytes {start} to {start + length} of a file of "
                f"{file.size}: the file is truncated or another one"
            )
        self._archive, self._where = FileRange(file, start, length), where
        self._records = self._find_records()

    def object(self, *, is_tolerant: bool = False) -> Any:  # noqa: ANN401 (torch.save holds anything)
        """Return the saved object; tensors are `LazyTensor`.

        Args:
            is_tolerant: whether instances of unknown classes become `Opaque`, as in a file of a
                job's arguments; nothing of them is run either way.

        Raises:
            UnsafePickleError: the pickle uses a name that no checkpoint needs.
        """
        names = _TOLERANT if is_tolerant else _NAMES
        if "byteorder" in self._records and self._read("byteorder", 8) != b"little":
            raise UserError(f"{self._where}: its numbers are big-endian, which is not supported")
        loaded = pickles.load(self._read("data.pkl", limits.PICKLE), names, self._where, _storage)
        try:
            return self._resolve(loaded, {})
        except RecursionError:
            raise UserError(f"{self._where}: the object is nested too deeply; refused") from None

    def _find_records(self) -> dict[str, ZipEntry]:
        """Return the index entries by record name, without the archive's prefix."""
        try:
            entries = list(read_index(self._archive))
        except (ValueError, struct.error) as error:
            raise UserError(
                f"{self._where}: no torch.save archive there ({shown(error)}): the file is damaged "
                "or another one"
            ) from error
        records = {}
        for entry in entries:
            # `torch.save` stores records as they are, so that they can be memory-mapped. Refusing
            # compression also rules out zip bombs.
            name = entry.name.decode("utf-8", "backslashreplace")
            if entry.method or entry.flags & 1 or entry.length != entry.stored:
                raise UserError(
                    f"{self._where}: record {shown(name)} is compressed or encrypted, which "
                    "torch.save never does; refused"
                )
            if (short := name.partition("/")[2]) in records:
                raise UserError(f"{self._where}: two records are called {shown(name)}")
            records[short] = entry
        return records

    def _record(self, name: str) -> Bytes:
        """Return the data of a record.

        Only small records verify their checksum: a large one would have to be read as a whole.
        """
        if name not in self._records:
            raise UserError(f"{self._where}: the archive has no record {shown(name)}")
        entry, where = self._records[name], f"{self._where}: record {shown(name)}"
        try:
            part = FileRange(self._archive, data_start(self._archive, entry), entry.length)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
        small = entry.length <= limits.CHECKED
        return ChecksummedRecord(part, entry.crc, where) if small and entry.crc else part

    def _read(self, name: str, most: int) -> memoryview:
        record = self._record(name)
        if record.size > most:
            raise UserError(f"{self._where}: {name} has {record.size} bytes, which is too much")
        return record(0, record.size).data

    def _resolve(self, value: Any, seen: dict[int, Any]) -> Any:  # noqa: ANN401
        """Return `value` with lazy tensors; resolve shared objects once."""
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) in seen:
            if seen[id(value)] is None:
                raise UserError(f"{self._where}: the object contains itself; refused")
            return seen[id(value)]
        # None marks containers that are being resolved: meeting one again is a cycle. Without
        # `seen`, a list that holds the same list twice, 60 levels deep, would take 2^60 steps.
        seen[id(value)] = None
        result: Any
        match value:
            case _Tensor():
                result = self._lazy(value)
            case Dtype():
                result = value.numpy
            case dict():
                result = {key: self._resolve(item, seen) for key, item in value.items()}
            case list():
                result = [self._resolve(item, seen) for item in value]
            case _:
                result = tuple(self._resolve(item, seen) for item in value)
        seen[id(value)] = result
        return result

    def _lazy(self, tensor: _Tensor) -> LazyTensor:
        record = self._record(f"data/{tensor.storage.record}")
        itemsize = tensor.dtype.itemsize
        sizes, strides = tensor.size, tensor.stride
        numbers = all(isinstance(n, int) and n >= 0 for n in (*strides, tensor.offset))
        if not numbers or not is_shape(sizes, itemsize) or len(sizes) != len(strides):
            raise UserError(f"{self._where}: a tensor's size, strides or offset are damaged")
        # An index (i, j, ...) lies at element offset + i * stride_0 + j * stride_1 + ... of its
        # storage. Strides are not negative, so the last index is the farthest element. A stride of
        # 0 repeats elements (`expand`): a small file may then claim a huge tensor.
        last = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        count = math.prod(sizes)
        # Both limits hold before any memory is allocated for the tensor.
        if count and (tensor.offset + last + 1) * itemsize > record.size:
            raise UserError(
                f"{self._where}: a tensor of size {sizes} and strides {strides} reaches beyond its "
                f"{record.size} bytes"
            )
        if count * itemsize > max(record.size, limits.EXPANDED):
            raise UserError(
                f"{self._where}: a tensor of size {sizes} repeats the same {record.size} bytes"
            )
        return in_file(record, tensor.offset * itemsize, sizes, strides, tensor.dtype, self._where)


def _storage(pid: Any) -> _Storage:  # noqa: ANN401
    kind, dtype, record, _, length = pid
    is_named = kind == "storage" and isinstance(record, str) and isinstance(dtype, Dtype)
    if not is_named or not isinstance(length, int):
        raise ValueError("a persistent id that is no tensor storage")
    return _Storage(record, dtype.numpy, length)


_ALIGNMENT = 64  # bytes
_LOCAL_HEADER, _CENTRAL_HEADER = b"PK\x03\x04", b"PK\x01\x02"
_MOST32 = 2**32 - 1


class _Record(NamedTuple):
    """Record of an archive that is being written.

    Attributes:
        name: path in the archive.
        size: size in bytes.
        start: offset of the local header in the archive.
        is_wide: whether sizes are 64-bit numbers (zip64).
    """

    name: bytes
    size: int
    start: int
    is_wide: bool

    def header(self, crc: int) -> bytes:
        """Return the local header, padded so that the data are aligned."""
        # Extra fields: kind 1 holds the 64-bit sizes (zip64); "FB" is torch's padding field. The
        # content begins after the header (30 bytes), the name and the extra fields.
        extra = struct.pack("<2H2Q", 1, 16, self.size, self.size) if self.is_wide else b""
        pad = -(self.start + 30 + len(self.name) + len(extra) + 4) % _ALIGNMENT
        extra += struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        return (_LOCAL_HEADER + self._common(crc) + struct.pack("<HH", len(self.name), len(extra))
                + self.name + extra)  # fmt: skip

    def entry(self, crc: int) -> bytes:
        """Return the entry of the index."""
        # In zip64, the 32-bit fields are 2^32 - 1, and kind 1 holds both sizes and the offset.
        values = [self.size, self.size, self.start] if self.is_wide else []
        extra = struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values) if values else b""
        start = _MOST32 if self.is_wide else self.start
        numbers = struct.pack("<HHHHHII", len(self.name), len(extra), 0, 0, 0, 0, start)
        return _CENTRAL_HEADER + b"\0\0" + self._common(crc) + numbers + self.name + extra

    def _common(self, crc: int) -> bytes:
        size, version = (_MOST32, 45) if self.is_wide else (self.size, 0)
        return struct.pack("<HHHHHIII", version, 0, 0, 0, 0x21, crc, size, size)


def archive_blocks(value: Any) -> Iterator[bytes | memoryview]:  # noqa: ANN401
    """Yield the bytes of `torch.save(value)` without copying arrays.

    Args:
        value: nested dicts, lists and tuples of plain values, of NumPy arrays, which become
            tensors, and of the types of `pickles.dump`.
    """
    # Layout of the zip file:
    #   for each record: local header (30 bytes) | path | extra field with padding | content
    #   index ("central directory"): entry (46 bytes) | path | extra field for each record
    #   end record: number of entries, size and offset of the index
    # The padding aligns each content, as torch does, so that a mapped tensor is aligned, too.
    index, at = [], 0
    for name, size, parts in _contents(value, block=_MOST32):
        if size >= _MOST32:
            raise ValueError(f"a record of {size} bytes: split it into smaller ones")
        (data,) = parts
        record, crc = _Record(name, size, at, is_wide=False), zlib_ng.crc32(data)
        header = record.header(crc)
        yield header
        yield data
        at += len(header) + size
        index.append(record.entry(crc))
    yield _end_of_archive(index, at, is_wide=False)


def save(value: Any, path: Path) -> None:  # noqa: ANN401
    """Write the bytes of `archive_blocks(value)` to a file, and replace its content."""
    with path.open("wb") as file:
        file.writelines(archive_blocks(value))


def write_file(
    value: Any,  # noqa: ANN401
    path: Path,
    block: int,
    wide_from: int = _MOST32,
) -> None:
    """Write `torch.save(value)` to a file, reading lazy tensors a block at a time.

    Args:
        value: a value for `archive_blocks`, which may also contain lazy tensors.
        path: file to write.
        block: bytes that may be in memory at a time.
        wide_from: size or position in bytes from which a record has 64-bit numbers (zip64).
    """
    index, at = [], 0
    with writing(path) as put:
        for name, size, parts in _contents(value, block):
            record = _Record(name, size, at, is_wide=max(size, at) >= wide_from)
            # The length of the header does not depend on the checksum, so the content can be
            # written first, block by block.
            end, crc = at + len(record.header(0)), 0
            for part in parts:
                crc = zlib_ng.crc32(part, crc)
                put(part, end)
                end += len(part)
            put(record.header(crc), at)  # last, because it contains the checksum
            index.append(record.entry(crc))
            at = end
        put(_end_of_archive(index, at, is_wide=at >= wide_from), at)


def _contents(
    value: Any,  # noqa: ANN401
    block: int,
) -> Iterator[tuple[bytes, int, Iterable[bytes | memoryview]]]:
    """Yield path, size in bytes and parts of each record of an archive."""
    tensors: list[np.ndarray | LazyTensor] = []
    data = pickles.dump(_with_tensors(value, tensors))
    yield b"archive/data.pkl", len(data), [data]
    yield b"archive/byteorder", 6, [b"little"]
    for i, tensor in enumerate(tensors):
        # Blocks are contiguous in row-major order, so their concatenation is the whole storage.
        parts = (
            map(_bytes_of, map(tensor.read, blocks(tensor.shape, tensor.dtype.itemsize, block)))
            if isinstance(tensor, LazyTensor)
            else [_bytes_of(tensor)]
        )
        yield f"archive/data/{i}".encode(), tensor.nbytes, parts
    yield b"archive/version", 2, [b"3\n"]


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _end_of_archive(index: list[bytes], start: int, *, is_wide: bool) -> bytes:
    """Return the index and the end record, with a zip64 end record if needed.

    Args:
        index: entries of the records.
        start: offset of the index in the archive.
        is_wide: whether the offset is a 64-bit number.
    """
    entries, count = b"".join(index), len(index)
    if not is_wide and count < 2**16 - 1:
        numbers = (0, 0, count, count, len(entries), start, 0)
        return entries + struct.pack("<4sHHHHIIH", b"PK\x05\x06", *numbers)
    end = struct.pack(
        "<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(entries), start
    )
    locator = struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
    most16 = 2**16 - 1
    last = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, most16, most16, _MOST32, _MOST32, 0)
    return entries + end + locator + last


def _with_tensors(value: Any, arrays: list[np.ndarray | LazyTensor]) -> Any:  # noqa: ANN401
    match value:
        case np.ndarray() | LazyTensor():
            arrays.append(value)
            return _tensor(str(len(arrays) - 1), value)
        case dict():
            return {key: _with_tensors(item, arrays) for key, item in value.items()}
        case list():
            return [_with_tensors(item, arrays) for item in value]
        case tuple() if not hasattr(value, "_fields"):
            return tuple(_with_tensors(item, arrays) for item in value)
    return value


def _tensor(record: str, array: np.ndarray | LazyTensor) -> Call:
    dtype = array.dtype.name
    strides = tuple(math.prod(array.shape[i + 1 :]) for i in range(len(array.shape)))
    hooks = Call(Global("collections", "OrderedDict"), ())
    geometry = (0, array.shape, strides, False, hooks)
    if dtype in _STORAGE_OF:
        typed = Global("torch", _STORAGE_OF[dtype])
        storage = Persistent(("storage", typed, record, "cpu", math.prod(array.shape)))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *geometry))
    # Later dtypes have no typed storage: v3 takes raw bytes and names the dtype.
    untyped = Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", untyped, record, "cpu", array.nbytes))
    rebuild = Global("torch._utils", "_rebuild_tensor_v3")
    return Call(rebuild, (storage, *geometry, Global("torch", dtype)))
