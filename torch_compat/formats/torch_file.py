"""Reader of `torch.save` files, such as `checkpoint.pt` and `pytorch_model.bin`, without torch.

A file holds one object: a state dict, or a dict of several (`model`, `optimizer`, `scheduler`,
`step`). It is opened like a DCP checkpoint: nested keys are joined by dots, tensors are read from
the file on demand, and nothing in the pickle is executed.
"""

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from jaxforge.errors import UserError
from jaxforge.storage.untrusted_json import load_object
from torch_compat.formats import limits
from torch_compat.formats.dcp_reader import Dcp, LazyObjects
from torch_compat.formats.files import Bytes, Directory
from torch_compat.formats.lazy import LazyTensor
from torch_compat.formats.limits import check_name, shown
from torch_compat.formats.torch_zip import Archive

SUFFIXES = (".pt", ".pth", ".bin", ".ckpt")
WEIGHTS = "pytorch_model.bin"
"""Weights of a Hugging Face directory, as transformers wrote them before safetensors."""
WEIGHTS_INDEX = f"{WEIGHTS}.index.json"

_LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""First pickle of a file of torch 0.1.10 to 1.5: the integer 0x1950a86a20f9469cfc6c."""
_TAR_MAGIC, _TAR_OFFSET = b"ustar", 257
_DEPTH = 64


def find_file(path: str) -> tuple[Directory, str] | None:
    """Return the directory and name of a `torch.save` file; None if the path is not such a file."""
    location = Directory(path)
    parent, _, name = location.path.rstrip("/").rpartition("/")
    if not name.endswith(SUFFIXES):
        return None
    directory = Directory(parent or "/").resolved()
    return (directory, name) if name in directory.stamps() else None


def names_in(directory: Directory) -> list[str]:
    """Return the names of files in a directory that look like files of `torch.save`."""
    return [name for name in directory.names() if name.endswith(SUFFIXES)]


def open_file(directory: Directory, name: str) -> Dcp:
    """Open a file of `torch.save`.

    Args:
        directory: directory of the file.
        name: name of the file.

    Raises:
        UnsafePickleError: the pickle uses a name that no checkpoint needs.
        UserError: the file is damaged, in a format of torch before 1.6, or holds no dict.
    """
    where = f"{directory}/{name}"
    value = _archive(directory.open(name), where).object()
    if not isinstance(value, Mapping):
        kind = "one tensor" if isinstance(value, LazyTensor) else f"a {type(value).__name__}"
        raise UserError(
            f"{where}: holds {kind} instead of a dict. Save a state dict: "
            'torch.save({"model": model.state_dict(), ...}, path).'
        )
    tensors: dict[str, LazyTensor] = {}
    objects = LazyObjects()
    for key, item in flatten(value, where):
        # Nested and dotted keys may coincide: {"a": {"b": x}, "a.b": y}.
        if key in tensors or key in objects:
            raise UserError(f"{where}: two entries have the key {shown(key)}")
        if isinstance(item, LazyTensor):
            tensors[key] = item
        else:
            # `LazyObjects` holds readers, but this object is in memory already.
            objects[key] = functools.partial(lambda value, _: value, item)
    return Dcp(directory, tensors, objects, name)


def open_weights(directory: Directory) -> dict[str, LazyTensor]:
    """Return the tensors of `pytorch_model.bin`, or of the files in its index.

    Raises:
        UserError: a file is damaged, or a tensor is in two files.
    """
    names = [WEIGHTS]
    if directory.has(WEIGHTS_INDEX):
        where = f"{directory}/{WEIGHTS_INDEX}"
        files = load_object(directory.read(WEIGHTS_INDEX), where).get("weight_map")
        if not isinstance(files, dict) or not all(isinstance(f, str) for f in files.values()):
            raise UserError(f"{where}: weight_map does not map names of tensors to files")
        names = sorted(set(files.values()))
    tensors: dict[str, LazyTensor] = {}
    for name in names:
        opened = open_file(directory, name).tensors
        if twice := sorted(tensors.keys() & opened.keys()):
            raise UserError(f"{directory}: {shown(twice[0])} is in two files")
        tensors |= opened
    return tensors


def _archive(file: Bytes, where: str) -> Archive:
    # 512 bytes: the header of a tar archive, with its magic at byte 257.
    head = file(0, min(file.size, 512)).tobytes()
    if head.startswith(_LEGACY_MAGIC):
        form = "torch.save of torch before 1.6"
    elif head[_TAR_OFFSET:].startswith(_TAR_MAGIC):
        form = "torch.save of torch before 0.1.10 (a tar archive)"
    else:
        return Archive(file, 0, file.size, where)
    raise UserError(
        f"{where}: written by {form}, whose pickles cannot be read without running them. Load the "
        "file with torch and save it again: torch.save writes the current format."
    )


def flatten(value: Mapping[Any, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of a nested state dict.

    Raises:
        UserError: the dict has more entries than any checkpoint, or is nested too deeply.
    """
    yield from itertools.islice(entries := _flatten(value, (), where), limits.KEYS)
    if next(entries, None) is not None:  # a small pickle can repeat one dict many times
        raise UserError(f"{where}: more than {limits.KEYS} entries; refused")


def _flatten(
    value: Mapping[Any, Any] | list[Any], path: tuple[str, ...], where: str
) -> Iterator[tuple[str, Any]]:
    """Yield dotted keys and values of nested dicts, and of lists that hold dicts or tensors."""
    if len(path) > _DEPTH:
        raise UserError(f"{where}: nested more than {_DEPTH} deep")
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in items:
        name = str(key) if isinstance(key, int) else key
        check_name(name, where)
        inner = (*path, name)
        if _has_keys(item):
            yield from _flatten(item, inner, where)
        else:
            yield ".".join(inner), item


def _has_keys(item: Any) -> bool:  # noqa: ANN401
    if isinstance(item, list):
        return any(isinstance(x, Mapping | LazyTensor) for x in item)
    # An empty dict has no keys to join, so that it is an entry itself.
    return isinstance(item, Mapping) and bool(item)
