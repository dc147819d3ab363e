"""Hostile checkpoints: hand-made archives and metadata, and readers of everything in them."""

import functools
import io
import struct
import zipfile

import numpy as np

from tests.torch_compat.tensors import opened, random_array, read_everything
from torch_compat.checkpoint import checkpoints
from torch_compat.checkpoint.inspection import inspect
from torch_compat.checkpoint.train_state import read_train_state
from torch_compat.formats.pickles import Call, Global, New, Pairs, Persistent
from torch_compat.formats.torch_zip import Archive

MODULE = "torch.distributed.checkpoint.metadata"
FILE = "__0_0.distcp"


@functools.cache
def intact_state():
    """Return the state that the intact checkpoint holds."""
    import torch

    return {
        "model": {
            "matrix": torch.from_numpy(random_array("float32", (4, 6))),
            "half": torch.from_numpy(random_array("float32", (5,))).bfloat16(),
        },
        "optimizer": {"param_groups": [{"lr": 0.1, "betas": (0.9, 0.95)}]},
    }


def read_all(path):
    """Read everything that any command reads of a checkpoint."""
    result = read_everything(path)
    read_train_state(opened(path))
    inspect(checkpoints.find(path))
    return result


def archive_of(data, **records):
    """Return an archive with a pickle and records."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as result:
        result.writestr("archive/data.pkl", data)
        for name, content in {"data/0": bytes(96), **records}.items():
            result.writestr(f"archive/{name}", content)
    return out.getvalue()


def read_archive(data):
    class InMemory:
        size = len(data)

        def __call__(self, start, length):
            assert 0 <= start <= start + length <= self.size, "beyond the file"
            return np.frombuffer(data, np.uint8)[start : start + length]

    return Archive(InMemory(), 0, len(data), "here").object()


def tensor(offset=0, size=(2, 3), stride=(3, 1), storage=None, dtype=None):
    """Return the pickle of a tensor over 96 bytes."""
    kind = Global("torch", "FloatStorage")
    storage = storage or Persistent(("storage", kind, "0", "cpu", 24))
    hooks = Call(Global("collections", "OrderedDict"), ())
    arguments = (storage, offset, size, stride, False, hooks)
    if dtype is None:
        return Call(Global("torch._utils", "_rebuild_tensor_v2"), arguments)
    return Call(Global("torch._utils", "_rebuild_tensor_v3"), (*arguments, dtype))


def metadata(storage=None, **parts):
    """Return the metadata of one tensor, with the given parts replaced."""
    chunk = New(Global(MODULE, "ChunkStorageMetadata"), {
        "offsets": parts.get("offsets", (0, 0)), "sizes": parts.get("sizes", (4, 6)),
    })  # fmt: skip
    properties = New(
        Global(MODULE, "TensorProperties"),
        parts.get("properties", (Global("torch", "float32"), None, False, None, False)),
    )
    about = New(Global(MODULE, "TensorStorageMetadata"), {
        "properties": properties, "size": parts.get("size", (4, 6)),
        "chunks": parts.get("chunks", [chunk]),
    })  # fmt: skip
    index = New(Global(MODULE, "MetadataIndex"), {
        "fqn": parts.get("fqn", "w"), "offset": parts.get("offset", (0, 0)), "index": 0,
    })  # fmt: skip
    info = New(Global("torch.distributed.checkpoint.filesystem", "_StorageInfo"), {
        "relative_path": parts.get("path", FILE), "offset": parts.get("start", 0), "length": 1500,
    })  # fmt: skip
    return New(Global(MODULE, "Metadata"), {
        "state_dict_metadata": Pairs([(parts.get("key", "w"), about)]),
        "storage_data": Pairs([(index, info)]) if storage is None else storage,
    })  # fmt: skip


def patched(data, at, form, *values):
    """Return data with values packed at an offset, which may be negative."""
    data = bytearray(data)
    struct.pack_into(form, data, at % len(data), *values)
    return bytes(data)
