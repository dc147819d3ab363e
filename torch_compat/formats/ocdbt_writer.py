"""Writer of OCDBT databases whose values are already in files: an index node and a manifest.

Tensorstore would copy each value twice on the way to a file. Values that are copied from the mapped
source file cost the same as `cp`: twice the throughput or more (1 GiB in chunks of 32 MiB, fsync
included, three threads on two busy cores: 0.36 to 0.48 GiB/s, tensorstore 0.17 to 0.20). Format: https://google.github.io/tensorstore/kvstore/ocdbt/
"""

import json
import struct
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorstore as ts

from torch_compat.formats.files import sync
from torch_compat.formats.ocdbt import DATA, Location

_INDEX = f"{DATA}/index"
_MANIFEST = "manifest.ocdbt"
_NODE = 0x0CDB20DE
_CONFIG = {
    "compression": None,
    "max_decoded_node_bytes": 100_000_000,  # Orbax's value, with which the index is one node
    "max_inline_value_bytes": 1024,
    "version_tree_arity_log2": 4,
}


# Files of the database (a store of one version and one leaf node):
#
# manifest.ocdbt   config, uuid, and the version: commit time, location and statistics of the root
# d/index          the root: a B+tree leaf with every key and the location of its value
# d/...            values that the caller has written, referenced by (file, offset, length)
def write_index(store: Path, values: Mapping[str, Location]) -> None:
    """Write the index and manifest of a database. Both are durable on return.

    Args:
        store: directory of the database.
        values: key -> location of the value in the directory, or the value itself.
    """
    lengths = [location[2] for location in values.values() if not isinstance(location, bytes)]
    node = _encode_leaf(values)
    root = {
        "location": f"btreenode::{_INDEX}:0:{len(node)}",
        "statistics": {
            "num_indirect_value_bytes": sum(lengths),
            "num_keys": len(values),
            "num_tree_bytes": len(node),
        },
    }
    version = {
        "root": root, "root_height": 0, "generation_number": 1, "commit_time": time.time_ns(),
    }  # fmt: skip
    manifest = {
        "config": {**_CONFIG, "uuid": uuid.uuid4().hex},
        "version_tree_nodes": [],
        "versions": [version],
    }
    # Order matters for crashes: the manifest, which makes the version visible, comes last, and each
    # file is synced before the next one is written.
    files = {_INDEX: node, _MANIFEST: ts.ocdbt.undump_manifest(manifest)}
    for name, content in files.items():
        (store / name).parent.mkdir(parents=True, exist_ok=True)
        (store / name).write_bytes(content)
        sync(store / name)


def description(shape: Sequence[int], chunk: Sequence[int], dtype: np.dtype) -> bytes:
    """Return `.zarray` of an array with uncompressed row-major chunks."""
    metadata = {
        "zarr_format": 2,
        "shape": list(shape),
        # zarr has no chunks of size 0, which an empty array would need.
        "chunks": [max(1, n) for n in chunk],
        "dtype": dtype.newbyteorder("<").str if dtype.isbuiltin == 1 else dtype.name,
        "order": "C",
        "compressor": None,
        "filters": None,
        "fill_value": None,
        "dimension_separator": ".",
    }
    return json.dumps(metadata).encode()


def _encode_leaf(values: Mapping[str, Location]) -> bytes:
    """Encode a leaf node."""
    items = sorted((key.encode(), location) for key, location in values.items())
    keys, locations = [key for key, _ in items], [location for _, location in items]
    inline = [location for location in locations if isinstance(location, bytes)]
    in_files = [location for location in locations if not isinstance(location, bytes)]
    files = sorted({name.encode() for name, _, _ in in_files})
    number = {name.decode(): i for i, name in enumerate(files)}
    # Layout of a leaf node (all columns are arrays over keys, in ascending order of keys):
    #
    # version, compression, height = 0
    # data files:  count | prefix lengths | suffix lengths | base path lengths | suffixes
    # keys:        count | prefix lengths | suffix lengths | suffixes
    # values:      lengths | kind (0 inline, 1 in a file) | file numbers | offsets | inline bytes
    #
    # The format stores a key as the length of the prefix that it shares with its predecessor, and
    # the remaining suffix. All prefix lengths are 0 here, since sharing would save little. The
    # first entry has no predecessor, so a list of n entries has n - 1 prefix lengths.
    body = [
        bytes([0, 0, 0]),  # version, no compression; height
        _varints([len(files)]),
        _lengths(files),
        bytes(len(files)),  # base path lengths of 0: no file is in another database
        *files,
        _varints([len(keys)]),
        _lengths(keys),
        *keys,
        _varints(len(loc) if isinstance(loc, bytes) else loc[2] for loc in locations),
        bytes(not isinstance(location, bytes) for location in locations),
        _varints(number[name] for name, _, _ in in_files),
        _varints(offset for _, offset, _ in in_files),
        *inline,
    ]
    content = b"".join(body)
    # Frame of every OCDBT object: magic (big-endian), total length (little-endian, including the 16
    # bytes of the frame), content, CRC-32C (little-endian) of all preceding bytes.
    whole = struct.pack(">I", _NODE) + struct.pack("<Q", 16 + len(content)) + content
    return whole + struct.pack("<I", crc32c(whole))


def _lengths(texts: Sequence[bytes]) -> bytes:
    """Encode the prefix lengths, which are all 0, and the suffix lengths of texts."""
    return bytes(max(0, len(texts) - 1)) + _varints(map(len, texts))


def _varints(numbers: Iterable[int]) -> bytes:
    """Encode integers as variable-length integers (LEB128)."""
    # Seven bits per byte, the lowest ones first; the highest bit of a byte: more bytes follow.
    encoded = bytearray()
    for number in numbers:
        while number > 0x7F:
            encoded.append(number & 0x7F | 0x80)
            number >>= 7
        encoded.append(number)
    return bytes(encoded)


def crc32c(data: bytes) -> int:
    """Return the CRC-32C of data (polynomial of Castagnoli, as in iSCSI)."""
    # Byte-wise and reflected: `_TABLE[b]` is the remainder of byte b followed by 32 zero bits.
    remainder = 0xFFFFFFFF
    for byte in data:
        remainder = _TABLE[(remainder ^ byte) & 0xFF] ^ remainder >> 8
    return remainder ^ 0xFFFFFFFF


# Table of the reflected polynomial 0x82F63B78: each round divides all 256 entries by one more bit.
_TABLE = list(range(256))
for _ in range(8):
    _TABLE = [entry >> 1 ^ (0x82F63B78 if entry & 1 else 0) for entry in _TABLE]
