"""The archives of `torch.save`: stored zip files of a pickle and raw little-endian storages.

    archive/data.pkl    the object; tensors name a storage, an offset, a size and strides
    archive/data/0 ...  the storages

Read in place: nothing is unpacked, and only the bytes that are asked for are touched.
"""

import io
import math
import struct
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxforge.errors import UserError
from torch_compat import pickles
from torch_compat.files import Bytes, in_file
from torch_compat.lazy import DTYPES, Lazy, is_shape
from torch_compat.pickles import Call, Global, Persistent

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


class _Tensor(NamedTuple):
    storage: _Storage
    dtype: np.dtype
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


class Dtype(NamedTuple):
    """Stands for a dtype. A pickle can set the state of what it names, and NumPy lets it change
    the sizes of `ml_dtypes`' own objects.
    """

    numpy: np.dtype


def _tensor_v2(storage: Any, *rest: Any) -> _Tensor:  # noqa: ANN401
    offset, size, stride, *_ = rest
    if not isinstance(storage, _Storage):
        raise TypeError("a tensor without a storage")
    return _Tensor(storage, storage.dtype, offset, tuple(size), tuple(stride))


def _tensor_v3(storage: Any, *rest: Any) -> _Tensor:  # noqa: ANN401
    *_, dtype = rest[:6]
    if not isinstance(dtype, Dtype):
        raise TypeError("a tensor without a dtype")
    return _tensor_v2(storage, *rest)._replace(dtype=dtype.numpy)


class _OrderedDict(dict):
    def __setstate__(self, state: Any) -> None:  # noqa: ANN401
        """Leaves what a module's state dict has as attributes."""


class _NumpyArray(pickles.Record):
    """An array inside a pickle, such as NumPy's random state; its values are not looked at."""

    def __init__(self, *_: object) -> None: ...


_PLAIN: Mapping[str, Any] = {"set": set, "frozenset": frozenset, "complex": complex,
                             "bytes": lambda: b""}  # fmt: skip
TORCH_DTYPES = {("torch", name): Dtype(dtype) for name, dtype in DTYPES.items()}
_NAMES: Mapping[tuple[str, str], Any] = {
    **TORCH_DTYPES,
    **{("torch", storage): Dtype(DTYPES[dtype]) for storage, dtype in _STORAGES.items()},
    ("torch.storage", "UntypedStorage"): Dtype(DTYPES["uint8"]),
    ("torch", "UntypedStorage"): Dtype(DTYPES["uint8"]),
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): lambda tensor, *_: tensor,
    ("torch", "Size"): tuple,
    ("torch", "device"): lambda kind, *index: ":".join([kind, *map("{:d}".format, index)]),
    ("collections", "OrderedDict"): _OrderedDict,
    ("numpy", "ndarray"): _NumpyArray,
    ("numpy", "dtype"): _NumpyArray,
    ("numpy.core.multiarray", "_reconstruct"): _NumpyArray,
    ("numpy._core.multiarray", "_reconstruct"): _NumpyArray,
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1") if isinstance(text, str) else b"",
    **{
        (module, name): make
        for module in ("builtins", "__builtin__")
        for name, make in _PLAIN.items()
    },
}


class Archive:
    """One `torch.save` archive, in a file of its own or among others in one file.

    Args:
        file: the file.
        start: where the archive begins in it.
        length: its length in bytes.
        where: what it is, for messages.

    Raises:
        UserError: it lies outside the file, is damaged, or is compressed.
    """

    def __init__(self, file: Bytes, start: int, length: int, where: str) -> None:
        if start < 0 or length < 0 or start + length > file.size:
            raise UserError(
                f"{where}: said to lie at bytes {start} to {start + length} of a file of "
                f"{file.size}: the file is truncated or another one"
            )
        self._file, self._start, self._length, self._where = file, start, length, where
        self._records = self._find_records()

    def object(self) -> Any:  # noqa: ANN401 (torch.save holds anything)
        """What was saved; tensors are `Lazy`.

        Raises:
            Unsafe: the pickle names what no checkpoint needs.
        """
        if "byteorder" in self._records and self._read("byteorder") != b"little":
            raise UserError(f"{self._where}: its numbers are big-endian, which is not read here")
        found = pickles.load(self._read("data.pkl"), _NAMES, self._where, _storage)
        try:
            return self._resolve(found, {})
        except RecursionError:
            raise UserError(f"{self._where}: the object is nested too deeply; refused") from None

    def _find_records(self) -> dict[str, tuple[int, int]]:
        """Name (without the archive's own) -> (where its header is in the archive, length)."""
        try:
            with zipfile.ZipFile(_Window(self._file, self._start, self._length)) as archive:
                entries = archive.infolist()
        except (zipfile.BadZipFile, ValueError, struct.error, NotImplementedError) as error:
            raise UserError(
                f"{self._where}: no torch.save archive there ({error}): the file is damaged or "
                "another one"
            ) from error
        records = {}
        for entry in entries:
            stored = entry.compress_type == zipfile.ZIP_STORED and not entry.flag_bits & 1
            if not stored or entry.file_size != entry.compress_size:
                raise UserError(
                    f"{self._where}: record {entry.filename!r} is compressed or encrypted, which "
                    "torch.save never does; refused"
                )
            records[entry.filename.partition("/")[2]] = (entry.header_offset, entry.file_size)
        return records

    def _record(self, name: str) -> tuple[int, int]:
        """Start in the file, and length."""
        if name not in self._records:
            raise UserError(f"{self._where}: the archive has no record {name}")
        header, length = self._records[name]
        if not 0 <= header <= self._length - 30:
            raise UserError(f"{self._where}: the archive's index is damaged")
        fields = self._file(self._start + header, 30).tobytes()
        start = header + 30 + sum(struct.unpack("<HH", fields[26:30]))
        if start + length > self._length:
            raise UserError(f"{self._where}: record {name} is truncated")
        return self._start + start, length

    def _read(self, name: str) -> bytes:
        return self._file(*self._record(name)).tobytes()

    def _resolve(self, value: Any, seen: dict[int, Any]) -> Any:  # noqa: ANN401
        """`value` with lazy tensors; what is shared in it is looked at once."""
        if not isinstance(value, dict | list | tuple):
            return value
        if id(value) in seen:
            if seen[id(value)] is None:
                raise UserError(f"{self._where}: the object contains itself; refused")
            return seen[id(value)]
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

    def _lazy(self, tensor: _Tensor) -> Lazy:
        start, length = self._record(f"data/{tensor.storage.record}")
        itemsize = tensor.dtype.itemsize
        sizes, strides = tensor.size, tensor.stride
        numbers = all(isinstance(n, int) and n >= 0 for n in (*strides, tensor.offset))
        if not numbers or not is_shape(sizes, itemsize) or len(sizes) != len(strides):
            raise UserError(f"{self._where}: a tensor's size, strides or offset are damaged")
        last = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        if math.prod(sizes) and (tensor.offset + last + 1) * itemsize > length:
            raise UserError(
                f"{self._where}: a tensor of size {sizes} and strides {strides} reaches beyond its "
                f"{length} bytes"
            )
        first = start + tensor.offset * itemsize
        return in_file(self._file, first, sizes, strides, tensor.dtype, self._where)


def _storage(pid: Any) -> _Storage:  # noqa: ANN401
    kind, dtype, record, _, length = pid
    if kind != "storage" or not isinstance(record, str) or not isinstance(dtype, Dtype):
        raise ValueError("it refers to what is no tensor's storage")
    return _Storage(record, dtype.numpy, int(length))


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: Bytes, start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("before the beginning")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        size = left if size is None or size < 0 else min(size, left)
        data = self._file(self._start + self._at, size).tobytes()
        self._at += size
        return data


_ALIGNMENT = 64


def archive(value: Any) -> Iterator[bytes | memoryview]:  # noqa: ANN401
    """The bytes of `torch.save(value)`, in pieces: arrays are not copied.

    Args:
        value: nested dicts, lists and tuples of plain values and NumPy arrays, which become
            tensors, and of what `pickles.dump` takes.
    """
    arrays: list[np.ndarray] = []
    data = pickles.dump(_with_tensors(value, arrays))
    records: list[tuple[str, bytes | memoryview]] = [("data.pkl", data), ("byteorder", b"little")]
    for i, array in enumerate(arrays):
        raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        records.append((f"data/{i}", raw.data))
    records.append(("version", b"3\n"))
    directory, at = [], 0
    for name, content in records:
        path = f"archive/{name}".encode()
        size, crc = len(content), zlib.crc32(content)
        if size >= 2**32 - 1:
            raise ValueError(f"a record of {size} bytes: cut it into smaller ones")
        pad = -(at + 30 + len(path) + 4) % _ALIGNMENT
        extra = struct.pack("<2sH", b"FB", pad) + b"Z" * pad
        common = struct.pack("<HHHHHIII", 0, 0, 0, 0, 0x21, crc, size, size)
        header = b"PK\x03\x04" + common + struct.pack("<HH", len(path), len(extra)) + path + extra
        directory.append(
            b"PK\x01\x02\0\0" + common
            + struct.pack("<HHHHHII", len(path), 0, 0, 0, 0, 0, at) + path
        )  # fmt: skip
        yield header
        yield content
        at += len(header) + size
    index = b"".join(directory)
    count = len(directory)
    end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, count, count, len(index), at, 0)
    yield index + end


def _with_tensors(value: Any, arrays: list[np.ndarray]) -> Any:  # noqa: ANN401
    match value:
        case np.ndarray():
            arrays.append(value)
            return _tensor(str(len(arrays) - 1), value)
        case dict():
            return {key: _with_tensors(item, arrays) for key, item in value.items()}
        case list():
            return [_with_tensors(item, arrays) for item in value]
        case tuple() if not hasattr(value, "_fields"):
            return tuple(_with_tensors(item, arrays) for item in value)
    return value


def _tensor(record: str, array: np.ndarray) -> Call:
    dtype = array.dtype.name
    strides = tuple(math.prod(array.shape[i + 1 :]) for i in range(array.ndim))
    hooks = Call(Global("collections", "OrderedDict"), ())
    geometry = (0, array.shape, strides, False, hooks)
    if dtype in _STORAGE_OF:
        of = Global("torch", _STORAGE_OF[dtype])
        storage = Persistent(("storage", of, record, "cpu", array.size))
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), (storage, *geometry))
    untyped = Global("torch.storage", "UntypedStorage")
    storage = Persistent(("storage", untyped, record, "cpu", array.nbytes))
    rebuild = Global("torch._utils", "_rebuild_tensor_v3")
    return Call(rebuild, (storage, *geometry, Global("torch", dtype)))
