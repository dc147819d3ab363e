"""Writer of DCP checkpoints, which FSDP2 jobs load at any world size.

Torch is not needed, and tensors are written one block of rows at a time. `.metadata` is written
last: torch ignores a directory without it.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch_compat.formats import pickles, torch_zip
from torch_compat.formats.dcp_reader import METADATA
from torch_compat.formats.files import writing
from torch_compat.formats.lazy import Index, LazyTensor, blocks, index_shape
from torch_compat.formats.pickles import Call, Global, New, Pairs
from torch_compat.formats.staging import Unit, batches

_FILE = 1 << 28  # bytes of data after which the next file begins
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"

KeyPath = tuple[str | int, ...]
"""Path of an entry in the nested state dict: ("optimizer", "param_groups", 0, "lr")."""


class Entry(NamedTuple):
    """Entry of the checkpoint.

    Attributes:
        path: path in the nested state dict; the key is the path joined by dots.
        value: a tensor, or plain values.
    """

    path: KeyPath
    value: LazyTensor | Any

    @property
    def key(self) -> str:
        """Flat key."""
        return ".".join(map(str, self.path))


class _Item(NamedTuple):
    key: str
    region: Index | None  # None: an object
    nbytes: int


def units(
    entries: Mapping[str, Entry], directory: Path, block: int, prefix: str = ""
) -> list[Unit]:
    """Return the data files to write, each as a unit whose result is the locations of its items.

    Args:
        entries: key -> entry.
        directory: directory of the files; created if absent.
        block: bytes that may be in memory at a time.
        prefix: prefix of the unit names, to distinguish directories of one conversion.
    """

    def unit(number: int, items: list[_Item]) -> Unit:
        path = directory / f"__0_{number}.distcp"
        nbytes = sum(item.nbytes for item in items)
        return Unit(f"{prefix}{path.stem}", nbytes, lambda: _write_file(path, items, entries))

    # A file is a unit: large enough that syncing it is cheap, small enough to repeat after a kill.
    files = batches(_items(entries, block), lambda item: item.nbytes, _FILE)
    return [unit(i, items) for i, items in enumerate(files)]


def write_metadata(
    entries: Mapping[str, Entry], locations: Mapping[str, Any], directory: Path, block: int
) -> None:
    """Write `.metadata`, which turns the files into a checkpoint.

    Args:
        entries: the `entries` given to `units`.
        locations: results of the units by name.
        directory: directory of the files.
        block: the `block` given to `units`.
    """
    storage = [
        (
            New(
                # `index` is a hint that torch leaves out of comparisons of this class.
                Global(_METADATA_MODULE, "MetadataIndex"),
                {"fqn": key, "index": None,
                 "offset": None if offset is None else _torch_size(offset)},
            ),
            New(
                Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
                {"relative_path": name, "offset": start, "length": length,
                 "transform_descriptors": None},
            ),
        )
        for items in locations.values()
        for key, offset, name, start, length in items
    ]  # fmt: skip
    tensors = {key: e.value for key, e in entries.items() if isinstance(e.value, LazyTensor)}
    state = {
        "state_dict_metadata": {
            key: _tensor_metadata(tensors[key], block) if key in tensors
            else New(Global(_METADATA_MODULE, "BytesStorageMetadata"), {})
            for key in entries
        },
        "planner_data": {key: entry.path for key, entry in entries.items()},
        "storage_data": Pairs(storage),
        "storage_meta": New(
            Global(_METADATA_MODULE, "StorageMeta"),
            {"checkpoint_id": None, "save_id": None, "load_id": None, "modules": []},
        ),
        "version": "1.0.0",
    }  # fmt: skip
    metadata = New(Global(_METADATA_MODULE, "Metadata"), state)
    # Not synced here: `Staging.commit` syncs every file before its rename.
    (directory / METADATA).write_bytes(pickles.dump(metadata, protocol=4))


def _items(entries: Mapping[str, Entry], block: int) -> Iterator[_Item]:
    for key, entry in entries.items():
        tensor = entry.value
        if not isinstance(tensor, LazyTensor):
            yield _Item(key, None, 0)
            continue
        for index in _chunks(tensor, block):
            yield _Item(key, index, math.prod(index_shape(index)) * tensor.dtype.itemsize)


def _chunks(tensor: LazyTensor, block: int) -> Iterator[Index]:
    return blocks(tensor.shape, tensor.dtype.itemsize, block)


def _write_file(path: Path, items: list[_Item], entries: Mapping[str, Entry]) -> list[Any]:
    locations = []
    path.parent.mkdir(exist_ok=True)
    with writing(path) as put:
        end = 0
        for key, index, _ in items:
            value = entries[key].value
            content = value if index is None else value.read(index)
            length = torch_zip.write_archive(content, put, end)
            offset = None if index is None else [s.start for s in index]
            locations.append([key, offset, path.name, end, length])
            end += length
    return locations


def _tensor_metadata(tensor: LazyTensor, block: int) -> New:
    chunks = [
        New(
            Global(_METADATA_MODULE, "ChunkStorageMetadata"),
            {"offsets": _torch_size([s.start for s in i]), "sizes": _torch_size(index_shape(i))},
        )
        for i in _chunks(tensor, block)
    ]
    # Member 0 of the enum is `torch.contiguous_format`.
    contiguous = Call(Global(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
    strided = Call(Global("torch.serialization", "_get_layout"), ("torch.strided",))
    dtype = Global("torch", tensor.dtype.name)
    # State: dtype, layout, requires_grad, memory format, pin_memory.
    properties = New(
        Global(_METADATA_MODULE, "TensorProperties"), (dtype, strided, False, contiguous, False)
    )
    state = {"properties": properties, "size": _torch_size(tensor.shape), "chunks": chunks}
    return New(Global(_METADATA_MODULE, "TensorStorageMetadata"), state)


def _torch_size(sizes: tuple[int, ...] | list[int]) -> Call:
    return Call(Global("torch", "Size"), (tuple(sizes),))
