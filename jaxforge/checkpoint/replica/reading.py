"""Reading of a replica: its arrays with any sharding, from the hosts that hold them.

Every byte is compared with its checksum. A damaged copy is replaced by that of another host.
"""

import concurrent.futures
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.shards import blocks_in, overlap, runs_of
from jaxforge.checkpoint.replica.store import BLOCK, Group, Manifest, Shard, Store

_THREADS = 4  # arrays that are read at a time

Region = tuple[slice, ...]


class ReplicaError(RuntimeError):
    """A replica that cannot be restored; every process of the job raises the same message."""


class Copy(NamedTuple):
    """A place with the files of a sender.

    Attributes:
        process: a process that serves them.
        address: its address; None for a copy on this host.
    """

    process: int
    address: transfer.Address | None


class Reader:
    """Reader of the data of a group.

    Args:
        group: the save.
        store: the replicas of this host.
        token: secret of the job.
        copies: the copies of each sender's files, in the order in which they are tried.

    Attributes:
        local_bytes: bytes read from this host.
        remote_bytes: bytes read from other hosts.
        damaged: names of copies that were not used.
    """

    def __init__(
        self, group: Group, store: Store, token: bytes, copies: Mapping[int, Sequence[Copy]]
    ) -> None:
        self._group, self._store, self._token, self._copies = group, store, token, copies
        self._manifests: dict[int, Manifest] = {}
        self._lock = threading.Lock()
        self.local_bytes = self.remote_bytes = 0
        self.damaged: dict[str, str] = {}

    def read(self, sender: int, shard: Shard, box: Region, dtype: np.dtype) -> np.ndarray:
        """Return a box of a shard.

        Raises:
            ValueError: no copy is intact.
        """
        manifest = self._manifest(sender)
        blocks = blocks_in(shard, box, dtype.itemsize)
        first, last = int(blocks[0]) * BLOCK, min((int(blocks[-1]) + 1) * BLOCK, manifest.size)
        buffer = np.empty(last - first, np.uint8)  # pages of blocks that are not read stay unused
        self._fill(buffer, first, sender, manifest, blocks)
        # The buffer begins at a block, and may begin or end within the shard.
        size = int(np.prod(shard.shape)) * dtype.itemsize
        begin, end = max(first, shard.offset), min(last, shard.offset + size)
        if (begin, end) == (shard.offset, shard.offset + size):
            content = buffer[begin - first : end - first]
        else:
            content = np.empty(size, np.uint8)
            content[begin - shard.offset : end - shard.offset] = buffer[begin - first : end - first]
        return content.view(dtype).reshape(shard.shape)[box]

    def _manifest(self, sender: int) -> Manifest:
        with self._lock:
            if sender in self._manifests:
                return self._manifests[sender]
        for copy in self._copies[sender]:
            try:
                if copy.address is None:
                    path = self._store.manifest_path(self._group, sender)
                    manifest = Manifest.decode(path.read_bytes())
                else:
                    manifest = transfer.get_manifest(copy.address, self._token, self._group, sender)
            except (OSError, ValueError) as error:
                self._note_damage(sender, copy, error)
                continue
            with self._lock:
                return self._manifests.setdefault(sender, manifest)
        raise ValueError(f"no copy of the files of process {sender} can be read")

    def _fill(
        self, buffer: np.ndarray, first: int, sender: int, manifest: Manifest, blocks: np.ndarray
    ) -> None:
        """Read blocks into a buffer that begins at byte `first` of the data."""
        missing = blocks
        for copy in self._copies[sender]:  # each reads only what the copies before it did not have
            runs = runs_of(missing.tolist(), manifest.size)
            view = buffer.data
            parts = [(begin, view[begin - first : end - first]) for begin, end in runs]
            try:
                self._read_parts(copy, sender, parts)
            except OSError as error:
                self._note_damage(sender, copy, error)
                continue
            total, before = sum(end - begin for begin, end in runs), missing
            missing = np.array([b for b in missing if not _is_intact(view, first, b, manifest)])
            with self._lock:
                if copy.address is None:
                    self.local_bytes += total
                else:
                    self.remote_bytes += total
            if not missing.size:
                return
            self._note_damage(
                sender, copy, ValueError(f"{missing.size} of {before.size} blocks are damaged")
            )
        raise ValueError(f"no copy of the files of process {sender} is intact")

    def _read_parts(self, copy: Copy, sender: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        if copy.address is not None:
            transfer.get(copy.address, self._token, self._group, sender, parts)
            return
        with Path(self._store.data_path(self._group, sender)).open("rb", buffering=0) as file:
            for begin, target in parts:
                file.seek(begin)
                while target:
                    size = file.readinto(target)
                    if not size:
                        raise OSError(f"{file.name} is shorter than its manifest says")
                    target = target[size:]

    def _note_damage(self, sender: int, copy: Copy, error: Exception) -> None:
        name = f"files of process {sender} on the host of process {copy.process}"
        with self._lock:
            self.damaged.setdefault(name, str(error))


def _is_intact(view: memoryview, first: int, block: int, manifest: Manifest) -> bool:
    begin = block * BLOCK - first
    return zlib.crc32(view[begin : begin + BLOCK]) == manifest.block_crcs[block]


Index = Mapping[str, Sequence[tuple[int, Shard]]]
"""Array name -> sender and location of each shard."""


def read_tree(reader: Reader, index: Index, saved: PyTree, wanted: PyTree) -> PyTree:
    """Return the arrays of a tree with the requested shardings and dtypes.

    Args:
        reader: reader of the data.
        index: locations of the shards.
        saved: abstract values of the saved arrays.
        wanted: abstract values with shardings.

    Raises:
        ValueError: no copy of a part is intact.
    """
    dtypes = {name: leaf.dtype for name, leaf in flatten_dict(saved, sep=".").items()}

    def read(item: tuple[str, Any]) -> jax.Array:
        name, leaf = item
        return _read_array(reader, index[name], np.dtype(dtypes[name]), leaf)

    leaves = flatten_dict(wanted, sep=".")
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        arrays = list(pool.map(read, leaves.items()))
    return unflatten_dict(dict(zip(leaves, arrays, strict=True)), sep=".")


def _read_array(
    reader: Reader, shards: Sequence[tuple[int, Shard]], dtype: np.dtype, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """Return an array; each distinct region of this process is read once."""
    devices: dict[tuple[tuple[int, int], ...], list[jax.Device]] = {}
    sharding = leaf.sharding
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        spans = [axis.indices(length) for axis, length in zip(index, leaf.shape, strict=True)]
        devices.setdefault(tuple((begin, end) for begin, end, _ in spans), []).append(device)
    arrays = []
    for bounds, holders in devices.items():
        region = _read_region(reader, shards, dtype, bounds).astype(leaf.dtype, copy=False)
        for device in holders:
            target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(region, target, may_alias=False))
        # Bounds the host memory to one region for each of `_THREADS`.
        jax.block_until_ready(arrays)  # before the memory of the region is used again
    return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)


def _read_region(
    reader: Reader,
    shards: Sequence[tuple[int, Shard]],
    dtype: np.dtype,
    spans: Sequence[tuple[int, int]],
) -> np.ndarray:
    start = [begin for begin, _ in spans]
    shape = [end - begin for begin, end in spans]
    region, read = np.empty(shape, dtype), 0
    for sender, shard in shards:
        # Shards of different senders are disjoint, so equal sizes mean that nothing is missing.
        if common := overlap(shard, start, shape):
            region[common.in_region] = reader.read(sender, shard, common.in_shard, dtype)
            read += common.size
    if read != region.size:
        raise ValueError("a part of an array is in no copy")
    return region
