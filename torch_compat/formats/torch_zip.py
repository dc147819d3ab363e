"""Archives of `torch.save`: uncompressed zip files of a pickle and raw little-endian storages.

    archive/data.pkl    the object; a tensor is a storage, an offset, a size and strides
    archive/data/0 ...  the storages
    archive/byteorder   "little"
    archive/version     "3"

Archives are read in place: only the requested bytes are read. `zipfile` reads and writes the index.
`torch.load` is not used, because conversions work without torch, with files at a URL, and with
files that nobody trusts (`pickle_machine`).
"""

import math
import os
import struct
import sys
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats import limits, pickles
from torch_compat.formats.files import Bytes, in_file, writing
from torch_compat.formats.lazy import DTYPES, LazyTensor, blocks, is_shape
from torch_compat.formats.limits import shown
from torch_compat.formats.pickle_machine import Record
from torch_compat.formats.pickles import Call, Global, Persistent

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
_TAIL = 1024  # bytes at the end of an archive
_ALIGNMENT = 64  # bytes
_LOCAL = struct.Struct(
    "<4s22x2H"
)  # local header: signature, lengths of the name and of extra fields
_ZIP64_SIZES = 20  # bytes of the extra field of 64-bit sizes
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
    # requires_grad, backward hooks and metadata follow.
    offset, size, stride, *_ = details
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    return _Tensor(storage, storage.dtype, offset, as_size(size), as_size(stride))


def _tensor_v3(storage: Any, *details: Any) -> _Tensor:  # noqa: ANN401
    # offset, size, stride, requires_grad, backward hooks, dtype; metadata may follow.
    *_, dtype = details[:6]
    if not isinstance(dtype, Dtype):
        raise TypeError("a tensor without a dtype")
    return _tensor_v2(storage, *details)._replace(dtype=dtype.numpy)


def as_size(sizes: Any) -> tuple:  # noqa: ANN401
    """Return a tuple of sizes, as `torch.Size` does."""
    if not isinstance(sizes, tuple | list):
        raise TypeError("a size that is not a tuple")
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


class _Range:
    """Range of a file that is read like a file.

    Args:
        file: the file.
        start: first byte of the range.
        size: length of the range in bytes.
        crc: CRC-32 of the range, which is then read as a whole each time to verify it; 0: none.
        where: description of the range for messages.
    """

    def __init__(self, file: Bytes, start: int, size: int, crc: int = 0, where: str = "") -> None:
        self._file, self._start, self.size = file, start, size
        self._crc, self._where = crc, where

    def __call__(self, start: int, length: int) -> np.ndarray:
        if not self._crc:
            return self._file(self._start + start, length)
        data = self._file(self._start, self.size)
        if zlib.crc32(data.data) != self._crc:
            raise UserError(f"{self._where}: its checksum differs: the file is damaged")
        return data[start : start + length]


class _Index:
    """File object in which `zipfile` reads the index of an archive.

    The last bytes, which hold the whole index of a small archive, are read at once: each read of a
    file at a URL is a request.
    """

    def __init__(self, archive: Bytes) -> None:
        self._archive, self._at = archive, 0
        self._tail = max(0, archive.size - _TAIL)
        self._last = archive(self._tail, archive.size - self._tail).tobytes()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._archive.size)[whence]
        if self._at < 0:
            raise OSError("a position before the archive")
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._archive.size - self._at)
        size = left if size < 0 else min(size, left)
        # An index may claim to fill a sparse file of any size.
        if size > limits.ENTRIES:
            raise ValueError(f"an index of {size} bytes")
        at, self._at = self._at, self._at + size
        if at >= self._tail:
            return self._last[at - self._tail : at - self._tail + size]
        return self._archive(at, size).tobytes()


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
        self._archive, self._where = _Range(file, start, length), where
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
        # Archives of older versions of torch have no such record.
        if "byteorder" in self._records and self._read("byteorder", 8) != b"little":
            raise UserError(f"{self._where}: its numbers are big-endian, which is not supported")
        loaded = pickles.load(self._read("data.pkl", limits.PICKLE), names, self._where, _storage)
        try:
            return self._resolve(loaded, {})
        except RecursionError:
            raise UserError(f"{self._where}: the object is nested too deeply; refused") from None

    def _find_records(self) -> dict[str, zipfile.ZipInfo]:
        """Return the index entries by record name, without the archive's prefix."""
        try:
            entries = zipfile.ZipFile(_Index(self._archive)).infolist()
        except (zipfile.BadZipFile, RuntimeError, OSError, ValueError, struct.error) as error:
            raise UserError(
                f"{self._where}: no torch.save archive there ({shown(error)}): the file is damaged "
                "or another one"
            ) from error
        records = {}
        for entry in entries:
            # `torch.save` stores records as they are, so that they can be memory-mapped. Refusing
            # compression also rules out zip bombs.
            name, is_encrypted = entry.orig_filename, entry.flag_bits & 1
            if entry.compress_type or is_encrypted or entry.file_size != entry.compress_size:
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
        start, size = self._data_start(entry, where), entry.file_size
        return _Range(self._archive, start, size, entry.CRC * (size <= limits.CHECKED), where)

    def _data_start(self, entry: zipfile.ZipInfo, where: str) -> int:
        """Return the first byte of a record's content, after its local header.

        The header is read with one request, where `ZipFile.open` needs three. Only its name tells
        that it belongs to the record; sizes and checksum are those of the index.
        """
        # Bit 11 of the flags marks a name in UTF-8; otherwise it is in code page 437.
        name = entry.orig_filename.encode("utf-8" if entry.flag_bits & 0x800 else "cp437")
        start, length = entry.header_offset, _LOCAL.size + len(name)
        if not 0 <= start <= self._archive.size - length:
            raise UserError(f"{where}: the index is damaged")
        header = self._archive(start, length).tobytes()
        signature, name_length, extra = _LOCAL.unpack_from(header)
        if (signature, name_length, header[_LOCAL.size :]) != (b"PK\3\4", len(name), name):
            raise UserError(f"{where}: its header is damaged, or another record's")
        if start + length + extra + entry.file_size > self._archive.size:
            raise UserError(f"{where}: it is truncated")
        return start + length + extra

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
    # ("storage", type, record, device, number of elements).
    kind, dtype, record, _, length = pid
    is_named = kind == "storage" and isinstance(record, str) and isinstance(dtype, Dtype)
    if not is_named or not isinstance(length, int):
        raise ValueError("a persistent id that is not a tensor storage")
    return _Storage(record, dtype.numpy, length)


class _Output:
    """File object into which `zipfile` writes an archive.

    Args:
        put: (data, offset in the file) -> None.
        start: offset of the archive in the file.
    """

    def __init__(self, put: Callable[[Any, int], None], start: int) -> None:
        self._put, self._start, self._at = put, start, 0

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        assert whence == os.SEEK_SET
        self._at = offset
        return offset

    def write(self, data: Any) -> int:  # noqa: ANN401 (any buffer)
        self._put(data, self._start + self._at)
        self._at += len(data)
        return len(data)

    def flush(self) -> None: ...

    def close(self) -> None: ...


def write_archive(
    value: Any,  # noqa: ANN401
    put: Callable[[Any, int], None],
    start: int = 0,
    block: int = sys.maxsize,
) -> int:
    """Write the bytes of `torch.save(value)` without copying arrays; return their number.

    Args:
        value: nested dicts, lists and tuples of plain values, of NumPy arrays and lazy tensors,
            which become tensors, and of the types of `pickles.dump`.
        put: function that writes: (data, offset in the file) -> None.
        start: offset of the archive in the file.
        block: bytes of a lazy tensor that may be in memory at a time.
    """
    out = _Output(put, start)
    with zipfile.ZipFile(out, "w") as archive:
        for name, parts in _contents(value, block):
            entry = zipfile.ZipInfo(name)
            # The content begins after the header, the name, torch's padding field "FB" and the
            # sizes of zip64. As in torch, it is aligned, so that a mapped tensor is aligned, too.
            before = out.tell() + _LOCAL.size + len(name) + 4 + _ZIP64_SIZES
            pad = -before % _ALIGNMENT
            entry.extra = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
            # `zipfile` does not know the size in advance and could not enlarge the header later.
            with archive.open(entry, "w", force_zip64=True) as record:
                for part in parts:
                    record.write(part)
            entry.extra = b""  # the index needs no padding
    return out.tell()


def save(value: Any, path: Path, block: int = sys.maxsize) -> None:  # noqa: ANN401
    """Write `torch.save(value)` to a file, and replace its content (see `write_archive`)."""
    # `writing` does not truncate: a shorter archive would end with the old bytes.
    path.unlink(missing_ok=True)
    with writing(path) as put:
        write_archive(value, put, block=block)


def _contents(
    value: Any,  # noqa: ANN401
    block: int,
) -> Iterator[tuple[str, Iterable[bytes | memoryview]]]:
    """Yield path and parts of each record of an archive."""
    tensors: list[np.ndarray | LazyTensor] = []
    yield "archive/data.pkl", [pickles.dump(_with_tensors(value, tensors))]
    yield "archive/byteorder", [b"little"]
    for i, tensor in enumerate(tensors):
        # Blocks are contiguous in row-major order, so their concatenation is the whole storage.
        parts = (
            map(_bytes_of, map(tensor.read, blocks(tensor.shape, tensor.dtype.itemsize, block)))
            if isinstance(tensor, LazyTensor)
            else [_bytes_of(tensor)]
        )
        yield f"archive/data/{i}", parts
    yield "archive/version", [b"3\n"]


def _bytes_of(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _with_tensors(value: Any, arrays: list[np.ndarray | LazyTensor]) -> Any:  # noqa: ANN401
    match value:
        case np.ndarray() | LazyTensor():
            arrays.append(value)
            return _tensor(str(len(arrays) - 1), value)
        case dict():
            return {key: _with_tensors(item, arrays) for key, item in value.items()}
        case list():
            return [_with_tensors(item, arrays) for item in value]
        # Named tuples are the types of `pickles.dump`.
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
