"""Reader and writer of safetensors files: 8 bytes of length, a JSON header, row-major data.

Format: https://huggingface.co/docs/safetensors. All shapes are known in advance, so the offset of
each part is known before anything is written, and several parts are written concurrently. The
package `safetensors` is not used: it reads no URLs, and writes only tensors that are in memory.
"""

import functools
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import DOCUMENT, load_object
from torch_compat.formats.files import Bytes, Directory, in_file, writing
from torch_compat.formats.lazy import DTYPES, Index, LazyTensor, blocks, index_shape, is_shape
from torch_compat.formats.limits import check_name, is_name, shown
from torch_compat.formats.staging import Unit

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
UNIT = 64 << 20  # bytes of a file that are written and synced together

_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODE_OF = {name: code for code, name in _CODES.items()}


def open_directory(directory: Directory) -> dict[str, LazyTensor]:
    """Open the tensors of `model.safetensors`, else of the index, else of all files.

    This order of precedence is that of transformers.

    Raises:
        UserError: the directory has no file, a file is damaged, two files hold one name, or
            `model.safetensors` and the index disagree.
    """
    names = directory.names()
    tensors = _open_indexed(directory, names)
    if _SINGLE not in names or INDEX not in names:
        return tensors
    single = open_file(directory.open(_SINGLE), f"{directory}/{_SINGLE}")
    if _forms(single) != _forms(tensors):
        raise UserError(
            f"{directory}: {_SINGLE} and the files of {INDEX} hold different tensors, of which "
            "transformers would take the former: remove what is out of date"
        )
    return single


def _forms(tensors: Mapping[str, LazyTensor]) -> dict[str, tuple[Any, ...]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _open_indexed(directory: Directory, names: Sequence[str]) -> dict[str, LazyTensor]:
    indexed: Any = {}
    if INDEX in names:
        indexed = load_object(directory.read(INDEX), f"{directory}/{INDEX}").get("weight_map")
        if not isinstance(indexed, dict) or not all(map(is_name, indexed.values())):
            raise UserError(f"{directory}/{INDEX}: not an index: it has no weight_map of names")
        files = sorted(set(indexed.values()))
    else:
        files = [_SINGLE] if _SINGLE in names else [n for n in names if n.endswith(SUFFIX)]
    if not files:
        raise UserError(f"{directory}: no {SUFFIX} file in it")
    tensors: dict[str, LazyTensor] = {}
    for name in files:
        result = open_file(directory.open(name), f"{directory}/{name}")
        if twice := result.keys() & tensors.keys():
            raise UserError(f"{directory}: {sorted(twice)[0]} is in two files")
        tensors |= result
    if absent := indexed.keys() - tensors.keys():
        raise UserError(f"{directory}: {shown(sorted(absent)[0])} is in the index and in no file")
    return tensors


def open_file(file: Bytes, where: str) -> dict[str, LazyTensor]:
    """Open the tensors of a file.

    Raises:
        UserError: the header is damaged or does not match the file.
    """
    if file.size < 8:
        raise UserError(f"{where}: too short for a safetensors file")
    (length,) = struct.unpack("<Q", file(0, 8).tobytes())
    # Before the header is read: the number may claim any size.
    if length > min(DOCUMENT, file.size - 8):
        raise UserError(f"{where}: its header would be {length} bytes: damaged, or another format")
    header = load_object(file(8, length).tobytes(), f"{where}: its header is damaged")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        check_name(name, where)
        if not _is_entry(entry):
            raise UserError(f"{where}: its header is damaged: {name} has no dtype, shape, offsets")
    entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
    tensors = {name: lazy_tensor(file, 8 + length, name, e, where) for name, e in entries}
    end = 0
    # In ascending order without gaps, as the format requires: no byte belongs to two tensors.
    for name, entry in entries:
        start, stop = entry["data_offsets"]
        if start != end:
            raise UserError(f"{where}: {name} begins at byte {start}, where {end} was expected")
        end = stop
    if 8 + length + end != file.size:
        raise UserError(
            f"{where}: {file.size} bytes, where its header asks for {8 + length + end}: truncated, "
            "or another file's header"
        )
    return tensors


def _is_entry(entry: Any) -> bool:  # noqa: ANN401 (untrusted JSON)
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        return False
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not isinstance(offsets, list) or len(offsets) != 2 or not isinstance(shape, list):
        return False
    # The largest dtype has 8 bytes.
    return is_shape([offsets[0]], 1) and is_shape([offsets[1]], 1) and is_shape(shape, 8)


def lazy_tensor(file: Bytes, data: int, name: str, entry: dict[str, Any], where: str) -> LazyTensor:
    """Return the tensor of an entry of the header; its data start at byte `data` of the file."""
    code, shape = entry["dtype"], tuple(entry["shape"])
    if code not in _CODES:
        raise UserError(f"{where}: {name} has dtype {shown(code)}, which is not supported")
    dtype = DTYPES[_CODES[code]]
    start, stop = entry["data_offsets"]
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise UserError(f"{where}: {name} is {code}{list(shape)} in {stop - start} bytes")
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return in_file(file, data + start, shape, strides, dtype, f"{where}: {name}")


def units(
    tensors: Mapping[str, LazyTensor], directory: Path, largest: int, block: int
) -> tuple[list[Unit], dict[str, Any] | None]:
    """Return the units that write the files, and the index; None for a single file.

    Args:
        tensors: name -> tensor.
        directory: directory of the files.
        largest: bytes of tensors per file; a single tensor may exceed it.
        block: bytes that may be in memory at a time.
    """
    shards = list(_shards(tensors, largest))
    if len(shards) == 1:
        names = [_SINGLE]
    else:
        # The names of transformers: model-00001-of-00003.safetensors.
        width = f"{len(shards):05d}"
        names = [f"model-{i:05d}-of-{width}{SUFFIX}" for i in range(1, len(shards) + 1)]
    result = [
        unit
        for name, shard in zip(names, shards, strict=True)
        for unit in units_of_file(directory / name, shard, block)
    ]
    if len(shards) == 1:
        return result, None
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return result, {"metadata": {"total_size": total}, "weight_map": weight_map}


class _Part(NamedTuple):
    tensor: LazyTensor
    region: Index
    at: int  # offset in the file

    @property
    def nbytes(self) -> int:
        return math.prod(index_shape(self.region)) * self.tensor.dtype.itemsize


def units_of_file(path: Path, tensors: Mapping[str, LazyTensor], block: int) -> Iterator[Unit]:
    """Yield the units that write one file; arguments as for `units`."""
    header, at = _header(tensors), 0
    parts: list[list[_Part]] = [[]]
    for tensor in tensors.values():
        for index in blocks(tensor.shape, tensor.dtype.itemsize, block):
            if sum(chunk.nbytes for chunk in parts[-1]) >= UNIT:
                parts.append([])
            parts[-1].append(_Part(tensor, index, len(header) + at))
            at += parts[-1][-1].nbytes
    for i, part in enumerate(parts):
        # The first unit writes the header. Units can be written in any order.
        write = functools.partial(_write_part, path, b"" if i else header, part)
        yield Unit(f"{path.name}.{i}", sum(chunk.nbytes for chunk in part), write)


def _write_part(path: Path, header: bytes, parts: list[_Part]) -> None:
    with writing(path) as put:
        put(header, 0)
        for tensor, index, at in parts:
            # The values may be a transposed view, and the file is row-major.
            values = np.asarray(tensor.read(index), order="C")
            put(values.reshape(-1).view(np.uint8), at)


def _header(tensors: Mapping[str, LazyTensor]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        code, end = _CODE_OF[tensor.dtype.name], at + tensor.nbytes
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    # Data begin at a multiple of 8, so that mapped tensors are aligned.
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _shards(tensors: Mapping[str, LazyTensor], largest: int) -> Iterator[dict[str, LazyTensor]]:
    shard: dict[str, LazyTensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
