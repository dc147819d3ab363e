"""PyTorch DCP checkpoints (torch.distributed.checkpoint), read without torch and without trust.

    .metadata            a pickle: every tensor's shape, dtype and chunks, and where each chunk lies
    __{rank}_{n}.distcp  chunks and objects one after the other, each an archive of `torch.save`

Chunks may be cut in any way (FSDP2, tensor parallel, strided shards, empty ones): only offsets
count. A checkpoint per pipeline stage (`pp0/`, `pp1/`, ...) is read as one.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats import limits, pickles
from torch_compat.formats.files import Bytes, Directory
from torch_compat.formats.lazy import (
    Index,
    LazyTensor,
    equal,
    extent,
    intersection,
    is_shape,
    relative,
    whole,
)
from torch_compat.formats.limits import check_name, is_name, shown
from torch_compat.formats.pickle_machine import Record
from torch_compat.formats.pickles import Unsafe
from torch_compat.formats.torch_zip import TORCH_DTYPES, Archive, Dtype, as_size

METADATA = ".metadata"
_STAGE = re.compile(r"pp(0|[1-9][0-9]{0,3})")


class _Metadata(Record):
    state_dict_metadata: Any = None
    storage_data: Any = None
    planner_data: Any = None


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
    if sum(map(len, parts)) > limits.NAME:
        raise ValueError("a path that is too long")
    return "/".join(parts)


def _unused(*_: object) -> None: ...


def _member(of: object, _: object) -> None:
    """`getattr`, by which Python 3.11.0 to 3.11.3 pickle the members of an enumeration."""
    if of is not _unused:
        raise Unsafe(
            "the pickle names builtins.getattr for more than a memory format, which no checkpoint "
            "needs; refused, nothing was run"
        )


_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
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
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}
"""All that a `.metadata` names, whichever job wrote it."""


@dataclasses.dataclass(frozen=True)
class Dcp:
    """A checkpoint that has been opened.

    Attributes:
        directory: where it is.
        tensors: key -> tensor.
        objects: key -> the object, read when it is asked for.
        file: name of the `torch.save` file in the directory that holds all of it; "" for a DCP.
    """

    directory: Directory
    tensors: Mapping[str, LazyTensor]
    objects: "Objects"
    file: str = ""

    @property
    def where(self) -> str:
        """Its path, for messages."""
        return f"{self.directory}/{self.file}" if self.file else str(self.directory)


class Objects(dict[str, Callable[[], Any]]):
    """Keys of objects that are no tensors, with what reads each; call with a key to read one."""

    def __call__(self, key: str) -> Any:  # noqa: ANN401 (torch.save holds anything)
        """Reads one.

        Raises:
            Unsafe: its pickle names what no checkpoint needs.
        """
        return self[key]()


def stage_name(stage: int) -> str:
    """The directory in which a pipeline stage keeps its own checkpoint."""
    return f"pp{stage}"


def is_dcp(directory: Directory) -> bool:
    """Return whether a directory holds a DCP: its commit marker, or its stages'."""
    return bool(parts(directory))


def open_dcp(directory: Directory) -> Dcp:
    """Opens a checkpoint; only its metadata are read.

    Raises:
        Unsafe: a pickle names what no checkpoint needs.
        UserError: there is none, it is damaged, or its chunks leave holes or overlap.
    """
    stages = parts(directory)
    if not stages:
        raise UserError(
            f"{directory}: no {METADATA} in it, so it is no DCP checkpoint, or one whose save did "
            "not end"
        )
    tensors: dict[str, LazyTensor] = {}
    objects = Objects()
    for stage in stages:
        opened, others = _open_one(stage)
        for key in sorted(opened.keys() & tensors.keys()):
            if not equal(tensors[key], opened[key]):  # as tied weights are
                both = f"{tensors[key].source}, {opened[key].source}"
                raise UserError(f"{key} is in two pipeline stages and differs: {both}")
        tensors |= opened
        for key in others.keys() & objects.keys():
            del others[key]  # such as hyper-parameters, the same in all stages
        objects.update(others)
    return Dcp(directory, tensors, objects)


def parts(directory: Directory) -> list[Directory]:
    """The directories that are a checkpoint together: itself, or its pipeline stages.

    Raises:
        UserError: stages are missing.
    """
    if directory.has(METADATA):
        return [directory]
    numbers = [int(n[2:]) for n in directory.names() if _STAGE.fullmatch(n)]
    stages = [stage_name(i) for i in range(max(numbers, default=-1) + 1)]
    if missing := [name for name in stages if not (directory / name).has(METADATA)]:
        raise UserError(f"{directory}: pipeline stages are missing or torn: {', '.join(missing)}")
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
        """The checkpoint, the key and the file."""
        return f"{self.files.directory}: {self.key} in {shown(self.name)}"

    def archive(self) -> Archive:
        return Archive(self.files[self.name], self.offset, self.length, self.where)

    def read_object(self) -> Any:  # noqa: ANN401 (torch.save holds anything)
        return self.archive().object()


class _Files(dict[str, Bytes]):
    """The data files of a directory, each opened once."""

    def __init__(self, directory: Directory) -> None:
        super().__init__()
        self.directory = directory

    def __missing__(self, name: str) -> Bytes:
        self[name] = self.directory.open(name)
        return self[name]


def _open_one(directory: Directory) -> tuple[dict[str, LazyTensor], Objects]:
    where = f"{directory}/{METADATA}"
    data = directory.view(METADATA, limits.PICKLE)
    metadata = pickles.load(data, _NAMES, where)
    if not isinstance(metadata, _Metadata) or not isinstance(metadata.state_dict_metadata, dict):
        raise UserError(f"{where}: holds no DCP metadata")
    locations = _locations(metadata, _Files(directory), where)
    tensors, objects = {}, Objects()
    chunks = len(data) // limits.CHUNK  # a pickle can name the same ones again and again
    for key, value in metadata.state_dict_metadata.items():
        check_name(key, where)
        of_key = locations.get(key, {})
        if isinstance(value, _TensorMetadata):
            chunks -= len(value.chunks) if isinstance(value.chunks, list) else 0
            if chunks < 0:
                raise UserError(f"{where}: it has more chunks than it can hold")
            tensors[key] = _tensor(key, value, of_key, str(directory))
        elif isinstance(value, _BytesMetadata):
            if _key(None) not in of_key:
                raise UserError(f"{where}: no file is named for {key}")
            objects[key] = of_key[_key(None)].read_object
        else:
            raise UserError(f"{where}: {key} is neither a tensor nor an object")
    return tensors, objects


def _locations(metadata: _Metadata, files: _Files, where: str) -> dict[str, dict[str, _Location]]:
    """Key -> offset of a chunk -> place; objects have offset None."""
    locations: dict[str, dict[str, _Location]] = {}
    if not isinstance(metadata.storage_data, dict):
        raise UserError(f"{where}: says nothing of where the data lie")
    for index, item in metadata.storage_data.items():
        if not _is_entry(index, item):
            raise UserError(f"{where}: an entry of the table of files is damaged")
        if item.transform_descriptors:
            raise UserError(
                f"{where}: {index.fqn} was compressed by a storage extension; save it without"
            )
        location = _Location(files, index.fqn, item.relative_path, item.offset, item.length)
        locations.setdefault(index.fqn, {})[_key(index.offset)] = location
    _check_apart([location for of_key in locations.values() for location in of_key.values()], where)
    return locations


def _check_apart(locations: list[_Location], where: str) -> None:
    """No two items in the same bytes: of a shape and dtype, nothing else tells them apart."""
    locations.sort(key=lambda location: (location.name, location.offset))
    for a, b in itertools.pairwise(locations):
        if a.name == b.name and a.offset + a.length > b.offset:
            both = f"{a.key} and {b.key}"
            raise UserError(f"{where}: {both} lie in the same bytes of {shown(a.name)}")


def _key(offset: tuple[int, ...] | None) -> str:
    """An offset as a key: of text, since anyone can find tuples that have the same hash."""
    return str(offset)


def _is_entry(index: Any, item: Any) -> bool:  # noqa: ANN401 (whatever the pickle checkpoint)
    if not isinstance(index, _Index) or not isinstance(item, _Item):
        return False
    types = {"offset": int, "length": int, "relative_path": str}
    where = index.offset is None or _are_sizes(index.offset)
    typed = all(isinstance(getattr(item, name), kind) for name, kind in types.items())
    return where and typed and is_name(index.fqn) and len(item.relative_path) <= limits.NAME


def _are_sizes(value: Any) -> bool:  # noqa: ANN401
    return isinstance(value, tuple) and all(isinstance(n, int) for n in value) and len(value) <= 64


def _tensor(
    key: str, metadata: _TensorMetadata, locations: Mapping[str, _Location], directory: str
) -> LazyTensor:
    where = f"{directory}: {key}"
    try:
        named, shape = metadata.properties.state[0], metadata.size
        chunks = [(c.offsets, c.sizes) for c in metadata.chunks]
        if not all(map(_are_sizes, (shape, *itertools.chain.from_iterable(chunks)))):
            raise ValueError("sizes that are none")
        indices = [tuple(slice(o, o + n) for o, n in zip(*chunk, strict=True)) for chunk in chunks]
    except (TypeError, ValueError, AttributeError, IndexError) as error:
        raise UserError(f"{where}: its metadata are damaged ({shown(error)})") from error
    if not isinstance(named, Dtype):
        raise UserError(f"{where}: its dtype is not known here")
    dtype = named.numpy
    if not is_shape(shape, dtype.itemsize):
        raise UserError(f"{where}: its metadata are damaged")
    _check_cover(where, shape, indices)
    full = [(i, at) for i, (at, _) in zip(indices, chunks, strict=True) if math.prod(extent(i))]
    if missing := [offset for _, offset in full if _key(offset) not in locations]:
        raise UserError(f"{where}: no file is named for the chunk at {missing[0]}")
    stored = [_Stored(index, locations[_key(offset)], dtype) for index, offset in full]

    def read(index: Index) -> np.ndarray:
        if len(stored) == 1:
            return stored[0].read(index)
        needed = [(s, both) for s in stored if (both := intersection(s.index, index))]
        if len(needed) == 1 and needed[0][1] == index:
            return needed[0][0].read(index)
        out = np.empty(extent(index), dtype)
        origin = [s.start for s in index]
        for chunk, both in needed:
            out[relative(both, origin)] = chunk.read(both)
        return out

    return LazyTensor(shape, dtype, read, where, len(chunks))


@dataclasses.dataclass
class _Stored:
    """One chunk of a tensor; its archive is opened at the first read, and checked."""

    index: Index
    location: _Location
    dtype: np.dtype
    tensor: LazyTensor | None = None

    def read(self, index: Index) -> np.ndarray:
        if self.tensor is None:
            tensor = self.location.archive().object()
            expected = extent(self.index)
            if not isinstance(tensor, LazyTensor):
                raise UserError(f"{self.location.where}: an object lies where a tensor should")
            if tensor.shape != expected or tensor.dtype != self.dtype:
                raise UserError(
                    f"{self.location.where}: a tensor {tensor.dtype}{list(tensor.shape)} lies "
                    f"where {self.dtype}{list(expected)} should: files were exchanged"
                )
            self.tensor = tensor
        return self.tensor.read(relative(index, [s.start for s in self.index]))


def _check_cover(where: str, shape: tuple[int, ...], chunks: list[Index]) -> None:
    """Every element in exactly one chunk; torch itself does not look.

    Raises:
        UserError: a chunk lies outside, two overlap, or elements are in none.
    """
    for chunk in chunks:
        sizes = zip(chunk, shape, strict=False)
        if len(chunk) != len(shape) or any(not 0 <= s.start <= s.stop <= n for s, n in sizes):
            raise UserError(f"{where}: a chunk at {_shown(chunk)} lies outside {list(shape)}")
    full = [c for c in chunks if math.prod(extent(c))]
    if not math.prod(shape) or full == [whole(shape)]:
        return
    element = _not_once(shape, full, where)
    if element is None:
        return
    there = [c for c in full if all(s.start <= i < s.stop for s, i in zip(c, element, strict=True))]
    if there:
        a, b, *_ = there
        raise UserError(f"{where}: the chunks at {_shown(a)} and {_shown(b)} overlap")
    covered, total = sum(math.prod(extent(c)) for c in full), math.prod(shape)
    raise UserError(
        f"{where}: its chunks hold {covered} of {total} elements, that at {list(element)} is in "
        "none; a rank's part is missing"
    )


def _not_once(shape: tuple[int, ...], chunks: list[Index], where: str) -> tuple[int, ...] | None:
    """The first element that is not in exactly one chunk; None where all are.

    How often each element is covered, differentiated along every dimension, is a sum over the
    corners of the chunks, with alternating signs. It is to be that of the whole tensor; where they
    differ first, the coverage itself does. This takes time in proportion to the chunks, however
    they lie.
    """
    cut = [d for d, n in enumerate(shape) if any(c[d] != slice(0, n) for c in chunks)]
    if not cut:
        return None if len(chunks) == 1 else (0,) * len(shape)
    if len(cut) > limits.CUT_DIMENSIONS:
        raise UserError(
            f"{where}: its chunks are cut along {len(cut)} dimensions, which no job does"
        )
    ends = np.array([[(c[d].start, c[d].stop) for d in cut] for c in (whole(shape), *chunks)])
    corners, signs = [], []
    for corner in itertools.product((0, 1), repeat=len(cut)):
        corners.append(ends[:, range(len(cut)), corner])
        sign = np.full(len(ends), (-1) ** sum(corner))
        sign[0] *= -1  # the whole tensor
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
