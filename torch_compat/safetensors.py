"""safetensors files, read and written in place: 8 bytes of length, a JSON header, row-major data.

Format: https://huggingface.co/docs/safetensors. All shapes are known beforehand, so that a writer
emits the header first and then one block after the other.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from torch_compat.files import Bytes, Directory, in_file, sync
from torch_compat.lazy import DTYPES, Lazy, blocks, is_shape
from torch_compat.staging import Unit

SUFFIX = ".safetensors"
INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_LARGEST_HEADER = 100_000_000  # as the reference implementation has it

_CODES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
_CODE_OF = {name: code for code, name in _CODES.items()}


def open_directory(directory: Directory) -> dict[str, Lazy]:
    """Every tensor of a directory: those of its index, of `model.safetensors`, or of all its files.

    Raises:
        UserError: there is none, a file is damaged, or two files hold one name.
    """
    names = directory.names()
    indexed: Mapping[str, str] = {}
    if INDEX in names:
        try:
            indexed = json.loads(directory.read(INDEX))["weight_map"]
            files = sorted({str(name) for name in indexed.values()})
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{directory}/{INDEX}: not an index ({error!r})") from error
    else:
        files = [_SINGLE] if _SINGLE in names else [n for n in names if n.endswith(SUFFIX)]
    if not files:
        raise UserError(f"{directory}: no {SUFFIX} file in it")
    tensors: dict[str, Lazy] = {}
    for name in files:
        found = open_file(directory.open(name), f"{directory}/{name}")
        if twice := found.keys() & tensors.keys():
            raise UserError(f"{directory}: {sorted(twice)[0]} is in two files")
        tensors |= found
    if absent := indexed.keys() - tensors.keys():
        raise UserError(f"{directory}: {sorted(absent)[0]} is in the index and in no file")
    return tensors


def open_file(file: Bytes, where: str) -> dict[str, Lazy]:
    """The tensors of a file.

    Raises:
        UserError: the header is damaged, or the file does not hold what it says.
    """
    if file.size < 8:
        raise UserError(f"{where}: too short for a safetensors file")
    (length,) = struct.unpack("<Q", file(0, 8).tobytes())
    if length > min(_LARGEST_HEADER, file.size - 8):
        raise UserError(f"{where}: its header would be {length} bytes: damaged, or another format")
    try:
        header = json.loads(file(8, length).tobytes())
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: item[1]["data_offsets"])
        tensors = {name: _tensor(file, 8 + length, name, e, where) for name, e in entries}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{where}: its header is damaged ({error!r})") from error
    end = 0
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


def _tensor(file: Bytes, data: int, name: str, entry: dict[str, Any], where: str) -> Lazy:
    code, shape = entry["dtype"], tuple(entry["shape"])
    if code not in _CODES:
        raise UserError(f"{where}: {name} has dtype {code}, which is not known here")
    dtype = DTYPES[_CODES[code]]
    start, stop = entry["data_offsets"]
    if not is_shape(shape, dtype.itemsize) or not all(isinstance(n, int) for n in (start, stop)):
        raise ValueError(f"{name}: {entry}")
    if math.prod(shape) * dtype.itemsize != stop - start:
        raise UserError(f"{where}: {name} is {code}{list(shape)} in {stop - start} bytes")
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    return in_file(file, data + start, shape, strides, dtype, f"{where}: {name}")


def units(
    tensors: Mapping[str, Lazy], directory: Path, largest: int, block: int
) -> tuple[list[Unit], dict[str, Any] | None]:
    """The files to write, and the index that they need; None for a single file.

    Args:
        tensors: name -> tensor.
        directory: where the files go.
        largest: bytes of tensors in a file, if one tensor does not have more.
        block: bytes that may be in memory at a time.
    """
    shards = list(_shards(tensors, largest))
    if len(shards) == 1:
        names = [_SINGLE]
    else:
        width = f"{len(shards):05d}"
        names = [f"model-{i:05d}-of-{width}{SUFFIX}" for i in range(1, len(shards) + 1)]

    def unit(name: str, shard: Mapping[str, Lazy]) -> Unit:
        nbytes = sum(tensor.nbytes for tensor in shard.values())
        return Unit(name, nbytes, lambda: write_file(directory / name, shard, block))

    made = [unit(name, shard) for name, shard in zip(names, shards, strict=True)]
    if len(shards) == 1:
        return made, None
    weight_map = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    return made, {"metadata": {"total_size": total}, "weight_map": weight_map}


def write_file(path: Path, tensors: Mapping[str, Lazy], block: int) -> None:
    """Writes one file, a block at a time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, tensor in tensors.items():
        code = _CODE_OF[tensor.dtype.name]
        end = at + tensor.nbytes
        header[name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in tensors.values():
            for index in blocks(tensor.shape, tensor.dtype.itemsize, block):
                values = np.asarray(tensor.read(index), order="C")
                file.write(values.reshape(-1).view(np.uint8).data)
    sync(path)


def _shards(tensors: Mapping[str, Lazy], largest: int) -> Iterator[dict[str, Lazy]]:
    shard: dict[str, Lazy] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > largest:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
