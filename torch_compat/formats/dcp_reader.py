"""Reader of PyTorch DCP checkpoints (torch.distributed.checkpoint), safe for untrusted files.

    .metadata            a pickle: shape, dtype and chunks of each tensor, location of each chunk
    __{rank}_{n}.distcp  concatenated chunks and objects, each an archive of `torch.save`

Torch is not needed. Chunks may be cut in any way (FSDP2, tensor parallel, strided shards, empty
chunks): only their offsets and sizes matter. Checkpoints with a directory per pipeline stage
(`pp0/`, `pp1/`, ...) are read as one.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats import flattened, limits, pickles
from torch_compat.formats.files import Bytes, Directory
from torch_compat.formats.lazy import (
    Index,
    LazyTensor,
    equal,
    full_index,
    index_shape,
    intersection,
    is_shape,
    relative_to,
)
from torch_compat.formats.limits import check_name, is_name, shown
from torch_compat.formats.pickle_machine import Record
from torch_compat.formats.pickles import UnsafePickleError
from torch_compat.formats.torch_zip import TORCH_DTYPES, Archive, Dtype, as_size

METADATA = ".metadata"
_STAGE = re.compile(r"pp(0|[1-9][0-9]{0,3})")


# Tables of the unpickled `.metadata` (a key is the flat name of a tensor or object):
#
#   state_dict_metadata   key -> _TensorMetadata (size, properties, chunks) | _BytesMetadata
#   storage_data          _Index (key, offset of a chunk) -> _Item (file, offset, length)
#   planner_data          key -> path in the nested state dict; not used here
#
# Offsets identify the chunks of a key, so both tables must have the same ones. All fields are
# untrusted: any attribute may be absent (None) or of another type.
class _Metadata(Record):
    state_dict_metadata: Any = None
    storage_data: Any = None
    planner_data: Any = None
    mcore_data: Any = None


class _Unread(Record):
    """Part of Megatron-Core's save plans, which `.metadata` repeats and no reader needs."""

    def __init__(self, *_: object) -> None: ...


class _TensorMetadata(Record):
    properties: Any = None
    size: Any = None
    chunks: Any = None


class _BytesMetadata(Record):
    pass


class _Chunk(Record):
    offsets: Any = None
    sizes: Any = None


class _Index(Record):
    fqn: Any = None
    offset: Any = None


class _Item(Record):
    relative_path: Any = None
    offset: Any = None
    length: Any = None
    transform_descriptors: Any = None


def _path(*parts: str) -> str:
    # The memo can repeat a long part, so that a small pickle may join a huge path.
    if sum(map(len, parts)) > limits.NAME:
        raise ValueError("a path that is too long")
    return "/".join(parts)


def _unused(*_: object) -> None: ...


def _member(of: object, _: object) -> None:
    """Stand-in for `getattr`, with which Python 3.11.0 to 3.11.3 pickle members of an enum."""
    if of is not _unused:
        raise UnsafePickleError(
            "the pickle names builtins.getattr for more than a memory format, which no checkpoint "
            "needs; refused, nothing was run"
        )


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_PLANNER_MODULE = "torch.distributed.checkpoint.planner"
_MEGATRON_MODULE = "megatron.core.dist_checkpointing.strategies.torch"
_NAMES: Mapping[tuple[str, str], Any] = {
    **TORCH_DTYPES,
    ("torch", "Size"): as_size,
    ("torch.serialization", "_get_layout"): _unused,
    ("collections", "OrderedDict"): dict,
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"): _Item,
    (_METADATA_MODULE, "Metadata"): _Metadata,
    (_METADATA_MODULE, "TensorStorageMetadata"): _TensorMetadata,
    (_METADATA_MODULE, "BytesStorageMetadata"): _BytesMetadata,
    (_METADATA_MODULE, "ChunkStorageMetadata"): _Chunk,
    (_METADATA_MODULE, "MetadataIndex"): _Index,
    (_METADATA_MODULE, "TensorProperties"): Record,
    (_METADATA_MODULE, "StorageMeta"): Record,
    (_METADATA_MODULE, "_MEM_FORMAT_ENCODING"): _unused,
    ("builtins", "getattr"): _member,
    (_MEGATRON_MODULE, "MCoreMetadata"): _Metadata,
    (_MEGATRON_MODULE, "MCoreSavePlan"): _Unread,
    **{
        (_PLANNER_MODULE, name): _Unread
        for name in ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData")
    },
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""Names that a `.metadata` file may use, with their stand-ins."""


@dataclasses.dataclass(frozen=True)
class Dcp:
    """Opened checkpoint.

    Attributes:
        directory: directory of the checkpoint.
        tensors: key -> tensor.
        objects: key -> object, read on access.
        file: name of the `torch.save` file in the directory that holds all of it; "" for a DCP.
    """

    directory: Directory
    tensors: Mapping[str, LazyTensor]
    objects: "LazyObjects"
    file: str = ""

    @property
    def where(self) -> str:
        """Its path, for messages."""
        return f"{self.directory}/{self.file}" if self.file else str(self.directory)


class LazyObjects(dict[str, Callable[[bool], Any]]):
    """Readers of objects that are not tensors; a call with a key reads the object.

    A reader's argument is `is_tolerant` of `Archive.object`.
    """

    def __call__(self, key: str, *, is_tolerant: bool = False) -> Any:  # noqa: ANN401 (torch.save holds anything)
        """Read the object of a key.

        Args:
            key: its key.
            is_tolerant: whether instances of unknown classes become `Opaque`.

        Raises:
            UnsafePickleError: the pickle uses a name that no checkpoint needs.
        """
        return self[key](is_tolerant)


def stage_name(stage: int) -> str:
    """Return the name of the directory of a pipeline stage's checkpoint."""
    return f"pp{stage}"


def is_dcp(directory: Directory) -> bool:
    """Return whether a directory holds a committed DCP checkpoint, or one per pipeline stage."""
    return bool(stage_directories(directory))


def open_dcp(directory: Directory) -> Dcp:
    """Open a checkpoint; only its metadata are read.

    Raises:
        UnsafePickleError: a pickle uses a name that no checkpoint needs.
        UserError: the checkpoint is missing or damaged, or its chunks leave holes or overlap.
    """
    stages = stage_directories(directory)
    if not stages:
        raise UserError(
            f"{directory}: no {METADATA} in it, so it is no DCP checkpoint, or one whose save did "
            "not end"
        )
    tensors: dict[str, LazyTensor] = {}
    objects = LazyObjects()
    for stage in stages:
        opened, stage_objects = _open_stage(stage)
        # Tied weights are in the first and the last stage and must be equal. Objects such as
        # hyper-parameters are in every stage; the first one counts.
        for key in sorted(opened.keys() & tensors.keys()):
            if not equal(tensors[key], opened[key]):
                both = f"{tensors[key].source}, {opened[key].source}"
                raise UserError(f"{key} is in two pipeline stages and differs: {both}")
        tensors |= opened
        for key in stage_objects.keys() & objects.keys():
            del stage_objects[key]
        objects.update(stage_objects)
    return Dcp(directory, tensors, objects)


def stage_directories(directory: Directory) -> list[Directory]:
    """Return the directory itself or those of its pipeline stages; empty for no checkpoint.

    Raises:
        UserError: stages are missing.
    """
    if directory.has(METADATA):
        return [directory]
    numbers = [int(n[2:]) for n in directory.names() if _STAGE.fullmatch(n)]
    # A gap in the numbers is an error: the model would lack the layers of that stage.
    stages = [stage_name(i) for i in range(max(numbers, default=-1) + 1)]
    if missing := [name for name in stages if not (directory / name).has(METADATA)]:
        raise UserError(
            f"{directory}: pipeline stages are missing or incomplete: {', '.join(missing)}"
        )
    return [directory / name for name in stages]


@dataclasses.dataclass(frozen=True)
class _Location:
    """Location of an item; files are opened on demand."""

    files: "_Files"
    key: str
    name: str
    offset: int
    length: int

    @property
    def where(self) -> str:
        """Checkpoint, key and file, for messages."""
        return f"{self.files.directory}: {self.key} in {shown(self.name)}"

    def archive(self) -> Archive:
        return Archive(self.files[self.name], self.offset, self.length, self.where)

    def read_object(self, is_tolerant: bool) -> Any:  # noqa: ANN401 (torch.save holds anything)
        return self.archive().object(is_tolerant=is_tolerant)


class _Files(dict[str, Bytes]):
    """Data files of a directory, each opened once."""

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, name: str) -> Bytes:
        self[name] = self.directory.open(name)
        return self[name]


def _open_stage(directory: Directory) -> tuple[dict[str, LazyTensor], LazyObjects]:
    where = f"{directory}/{METADATA}"
    data = directory.view(METADATA, limits.PICKLE)
    metadata = pickles.load(data, _NAMES, where)
    if not isinstance(metadata, _Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise UserError(f"{where}: holds no DCP metadata")
    locations = _locations(metadata, _Files(directory), where)
    tensors, objects = {}, LazyObjects()
    # Largest number of chunks in metadata of this size. A pickle can repeat one list of chunks for
    # every tensor without more bytes.
    chunks_left = len(data) // limits.CHUNK
    for key, value in metadata.state_dict_metadata.items():
        check_name(key, where)
        of_key = locations.get(key, {})
        if isinstance(value, _TensorMetadata):
            chunks_left -= len(value.chunks) if isinstance(value.chunks, list) else 0
            if chunks_left < 0:
                raise UserError(f"{where}: it has more chunks than it can hold")
            stored = _tensor(key, value, of_key, str(directory))
            shape = flattened.original_shape(metadata.mcore_data, key)
            tensors[key] = flattened.unflattened(stored, shape) if shape else stored
        elif isinstance(value, _BytesMetadata):
            if _key(None) not in of_key:
                raise UserError(f"{where}: no file is named for {key}")
            objects[key] = of_key[_key(None)].read_object
        else:
            raise UserError(f"{where}: {key} is neither a tensor nor an object")
    return tensors, objects


def _locations(metadata: _Metadata, files: _Files, where: str) -> dict[str, dict[str, _Location]]:
    """Return key -> `_key` of a chunk's offset -> location; objects have the offset None."""
    locations: dict[str, dict[str, _Location]] = {}
    if not isinstance(metadata.storage_data, dict):
        raise UserError(f"{where}: the table of files is missing")
    for index, item in metadata.storage_data.items():
        if not _is_entry(index, item):
            raise UserError(f"{where}: an entry of the table of files is damaged")
        if item.transform_descriptors:
            raise UserError(
                f"{where}: {index.fqn} was compressed by a storage extension; save it without"
            )
        location = _Location(files, index.fqn, item.relative_path, item.offset, item.length)
        locations.setdefault(index.fqn, {})[_key(index.offset)] = location
    _check_disjoint([loc for of_key in locations.values() for loc in of_key.values()], where)
    return locations


def _check_disjoint(locations: list[_Location], where: str) -> None:
    """Raise UserError if two items overlap in a file.

    An item does not name its key. If damaged metadata gave two tensors of one shape and dtype the
    same bytes, no other check would notice.
    """
    # In this order, any overlap implies an overlap of two neighbors.
    locations.sort(key=lambda location: (location.name, location.offset))
    for a, b in itertools.pairwise(locations):
        if a.name == b.name and a.offset + a.length > b.offset:
            both = f"{a.key} and {b.key}"
            raise UserError(f"{where}: {both} lie in the same bytes of {shown(a.name)}")


def _key(offset: tuple[int, ...] | None) -> str:
    """Return an offset as dict key; text, because tuples of equal hash are easy to construct."""
    return str(offset)


def _is_entry(index: Any, item: Any) -> bool:  # noqa: ANN401 (untrusted pickle)
    if not isinstance(index, _Index) or not isinstance(item, _Item):
        return False
    types = {"offset": int, "length": int, "relative_path": str}
    has_offset = index.offset is None or _are_sizes(index.offset)
    is_typed = all(isinstance(getattr(item, name), kind) for name, kind in types.items())
    return has_offset and is_typed and is_name(index.fqn) and len(item.relative_path) <= limits.NAME


def _are_sizes(value: Any) -> bool:  # noqa: ANN401
    # 64: NumPy supports no more dimensions.
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value) and len(value) <= 64


def _tensor(
    key: str, metadata: _TensorMetadata, locations: Mapping[str, _Location], directory: str
) -> LazyTensor:
    where = f"{directory}: {key}"
    try:
        # `TensorProperties` pickles a tuple that begins with the dtype.
        named, shape = metadata.properties.state[0], metadata.size
        chunks = [(c.offsets, c.sizes) for c in metadata.chunks]
        if not all(map(_are_sizes, (shape, *itertools.chain.from_iterable(chunks)))):
            raise ValueError("sizes are not integers")
        indices = [tuple(slice(o, o + n) for o, n in zip(*chunk, strict=True)) for chunk in chunks]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{where}: its metadata are damaged ({shown(error)})") from error
    if not isinstance(named, Dtype):
        raise UserError(f"{where}: its dtype is not supported")
    dtype = named.numpy
    if not is_shape(shape, dtype.itemsize):
        raise UserError(f"{where}: its metadata are damaged")
    check_cover(where, shape, indices)
    # Ranks without rows of a tensor declare empty chunks, which need no file.
    full = [
        (i, at) for i, (at, _) in zip(indices, chunks, strict=True) if math.prod(index_shape(i))
    ]
    if missing := [offset for _, offset in full if _key(offset) not in locations]:
        raise UserError(f"{where}: no file is named for the chunk at {missing[0]}")
    stored = [_StoredChunk(index, locations[_key(offset)], dtype) for index, offset in full]

    def read(index: Index) -> np.ndarray:
        # `check_cover` has verified that a single chunk is the whole tensor.
        if len(stored) == 1:
            return stored[0].read(index)
        needed = [(s, both) for s in stored if (both := intersection(s.index, index))]
        # An index within one chunk needs no copy (a local file is mapped).
        if len(needed) == 1 and needed[0][1] == index:
            return needed[0][0].read(index)
        out = np.empty(index_shape(index), dtype)
        origin = [s.start for s in index]
        for chunk, both in needed:
            out[relative_to(both, origin)] = chunk.read(both)
        return out

    return LazyTensor(shape, dtype, read, where, len(chunks))


@dataclasses.dataclass
class _StoredChunk:
    """Chunk of a tensor, whose archive is opened and checked at the first read."""

    index: Index
    location: _Location
    dtype: np.dtype
    tensor: LazyTensor | None = None

    def read(self, index: Index) -> np.ndarray:
        if self.tensor is None:
            tensor = self.location.archive().object()
            # The data file may stem from another save than `.metadata`, with other shapes.
            expected = index_shape(self.index)
            if not isinstance(tensor, LazyTensor):
                raise UserError(f"{self.location.where}: an object lies where a tensor should")
            if tensor.shape != expected or tensor.dtype != self.dtype:
                raise UserError(
                    f"{self.location.where}: a tensor {tensor.dtype}{list(tensor.shape)} lies "
                    f"where {self.dtype}{list(expected)} should: files were exchanged"
                )
            self.tensor = tensor
        return self.tensor.read(relative_to(index, [s.start for s in self.index]))


def check_cover(where: str, shape: tuple[int, ...], chunks: list[Index]) -> None:
    """Check that every element is in exactly one chunk, which torch itself does not check.

    Raises:
        UserError: a chunk lies outside the tensor, two overlap, or an element is in no chunk.
    """
    for chunk in chunks:
        sizes = zip(chunk, shape, strict=False)
        if len(chunk) != len(shape) or any(not 0 <= s.start <= s.stop <= n for s, n in sizes):
            raise UserError(f"{where}: a chunk at {_shown(chunk)} lies outside {list(shape)}")
    full = [c for c in chunks if math.prod(index_shape(c))]
    if not math.prod(shape) or full == [full_index(shape)]:
        return
    element = _first_miscovered(shape, full, where)
    if element is None:
        return
    # No holder means a hole, several mean an overlap.
    holders = [
        c for c in full if all(s.start <= i < s.stop for s, i in zip(c, element, strict=True))
    ]
    if holders:
        a, b, *_ = holders
        raise UserError(f"{where}: the chunks at {_shown(a)} and {_shown(b)} overlap")
    covered, total = sum(math.prod(index_shape(c)) for c in full), math.prod(shape)
    raise UserError(
        f"{where}: its chunks hold {covered} of {total} elements, that at {list(element)} is in "
        "none; a rank's part is missing"
    )


def _first_miscovered(
    shape: tuple[int, ...], chunks: list[Index], where: str
) -> tuple[int, ...] | None:
    """Return the first element that is not in exactly one chunk; None if there is none."""
    # Let n(x) be the number of chunks that contain element x. Along one dimension, the difference
    # n(x) - n(x - 1) is +1 at the start of each chunk and -1 at its end:
    #
    #   chunks        [0:3)     [3:8)
    #   differences   +1 . . -1 . . . . .
    #                        +1 . . . . -1      sum: +1 at 0, -1 at 8, which is the whole tensor
    #
    # In k dimensions it is a product of such differences: +1 or -1 at each of the 2^k corners of a
    # chunk, with the parity of the corner's ends as sign. Differences determine n, so n is 1
    # everywhere if and only if the corners of all chunks, minus those of the whole tensor, cancel.
    # n - 1 at x is the sum of the uncancelled corners c <= x, so the first of them in row-major
    # order is the first element with n != 1. The time is proportional to the number of chunks times
    # 2^k (and a sort), however the chunks lie. Dimensions that no chunk cuts are left out.
    cut = [d for d, n in enumerate(shape) if any(c[d] != slice(0, n) for c in chunks)]
    if not cut:
        return None if len(chunks) == 1 else (0,) * len(shape)
    if len(cut) > limits.CUT_DIMENSIONS:
        raise UserError(
            f"{where}: its chunks are cut along {len(cut)} dimensions, which no job does"
        )
    # [1 + chunks, cut, 2]: start and end along each cut dimension; the whole tensor comes first.
    ends = np.array([[(c[d].start, c[d].stop) for d in cut] for c in (full_index(shape), *chunks)])
    corners, signs = [], []
    for corner in itertools.product((0, 1), repeat=len(cut)):
        corners.append(ends[:, range(len(cut)), corner])
        sign = np.full(len(ends), (-1) ** sum(corner))
        sign[0] *= -1  # subtract the whole tensor
        signs.append(sign)
    locations, which = np.unique(np.concatenate(corners), axis=0, return_inverse=True)
    sums = np.bincount(which.reshape(-1), np.concatenate(signs), len(locations))
    wrong = np.flatnonzero(sums)
    if not len(wrong):
        return None
    first = dict(zip(cut, locations[wrong[0]].tolist(), strict=True))
    return tuple(first.get(d, 0) for d in range(len(shape)))


def _shown(index: Index) -> str:
    return "[" + ", ".join(f"{s.start}:{s.stop}" for s in index) + "]"
