"""Start from a complete replica: arrays with any sharding, from the hosts that hold them.

Every byte is compared with its checksum. A damaged copy is replaced by that of another host.
"""

import concurrent.futures
import logging
import threading
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint import layout, validation
from jaxforge.checkpoint.checksums import check
from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.store import (
    BLOCK,
    Group,
    Manifest,
    Shard,
    Store,
    blocks_in,
    overlap,
    runs_of,
)
from jaxforge.checkpoint.replica.transfer import Process, gather
from jaxforge.checkpoint.sealed_progress import unseal_progress
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts

log = logging.getLogger(__name__)

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


class Replica:
    """Complete replica of a step, as a `checkpoint.restore.Source`.

    Every process of the job must call the same methods.

    Args:
        group: the save.
        senders: number of processes that saved.
        holders: processes whose host has the files of each sender.
        store: the replicas of this host.
        processes: the processes of the job.
        token: secret of the job.

    Attributes:
        is_restored: True once arrays were restored from this replica.
    """

    has_optimizer = True

    def __init__(
        self,
        group: Group,
        senders: int,
        holders: Mapping[int, Sequence[int]],
        store: Store,
        processes: Sequence[Process],
        token: bytes,
    ) -> None:
        self.group, self._senders, self._holders = group, senders, holders
        self._store, self._processes, self._token = store, processes, token
        self._exchanged: list[dict[str, Any]] | None = None
        self.is_restored = False

    @property
    def step(self) -> int:
        """The saved step."""
        return self.group.step

    @property
    def path(self) -> Path:
        """Directory of the replica on this host."""
        return self._store.directory / self.group.name

    @property
    def name(self) -> str:
        """Step and origin, for the log."""
        return f"the replica of step {self.step} in the memory of the hosts"

    def progress(self) -> Progress:
        """Return the progress of the step.

        Raises:
            ReplicaError: the progress is damaged.
        """
        try:
            return unseal_progress(self._descriptions()[0]["progress"], self.step)
        except ValueError as error:
            raise ReplicaError(f"{self.name} is damaged ({error})") from error

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress, with the shardings of `like`.

        Raises:
            ReplicaError: no intact copy of a part is left.
            UserError: the replica is of another model or optimizer.
        """
        progress, saved = self.progress(), self._saved_tree()
        wanted = layout.drop_unsaved(layout.to_tree(like), saved)
        validation.check_model(wanted, saved, self.path)
        validation.check_optimizer(wanted["optimizer"], saved["optimizer"], self.path)
        layout.log_average_changes(like, saved, self.path)
        state = layout.from_tree(self._read(saved, wanted), like)
        return with_counts(state, progress), progress

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state (`layout.model_tree`).

        Raises:
            ReplicaError: no intact copy of a part is left.
            UserError: the replica is of another model.
        """
        saved = self._saved_tree()
        like = layout.drop_unsaved({k: part for k, part in like.items() if k in saved}, saved)
        validation.check_model(like, {name: saved[name] for name in like}, self.path)
        return self._read(saved, like)

    def _descriptions(self) -> list[dict[str, Any]]:
        """Return what the manifest of each sender says, without checksums of blocks.

        A sender's manifest is published by the first process that has it.
        """
        if self._exchanged is None:
            published: dict[int, dict[str, Any]] = {}
            for sender, manifest in self._store.manifests(self.group):
                # One publisher each: the manifests of a large job together are many megabytes.
                if min(self._holders.get(sender, ())) == jax.process_index():
                    published[sender] = {"shards": manifest.shards}
                    if sender == 0:
                        published[sender] |= {
                            "arrays": manifest.arrays, "progress": manifest.progress,
                            "checksums": manifest.checksums,
                        }  # fmt: skip
            merged = {int(k): value for part in gather(published) for k, value in part.items()}
            self._exchanged = [merged[sender] for sender in range(self._senders)]
        return self._exchanged

    def _saved_tree(self) -> layout.Tree:
        arrays = self._descriptions()[0]["arrays"].items()
        return unflatten_dict(
            {name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
             for name, (shape, dtype) in arrays}, sep=".",
        )  # fmt: skip

    def _read(self, saved: layout.Tree, wanted: layout.Tree) -> PyTree:
        """Read arrays. If a process cannot read its parts, all processes raise."""
        reader = Reader(self.group, self._store, self._token, self._copies())
        index: dict[str, list[tuple[int, Shard]]] = {}
        for sender, description in enumerate(self._descriptions()):
            for name, start, shape, offset in description["shards"]:
                shard = Shard(name, tuple(start), tuple(shape), offset)
                index.setdefault(name, []).append((sender, shard))
        tree, failure = None, ""
        try:
            tree = read_tree(reader, index, saved, wanted)
        except (OSError, ValueError) as error:
            failure = f"process {jax.process_index()}: {error}"
        # Every process must reach this point, also after a failure: the others wait for its result.
        results = gather([failure, reader.local_bytes, reader.remote_bytes, reader.damaged])
        damaged = {name: why for result in results for name, why in result[3].items()}
        if damaged:
            log.warning("damaged copies of the replica of step %d: %s", self.step,
                        "; ".join(f"{name} ({why})" for name, why in damaged.items()))  # fmt: skip
        if failures := [failure for failure, *_ in results if failure]:
            raise ReplicaError(f"{self.name} cannot be used ({failures[0]})")
        # Blocks were compared with their CRC-32. This also finds errors of the copy to the devices.
        dtypes = {name: leaf.dtype for name, leaf in flatten_dict(saved, sep=".").items()}
        try:
            check(tree, self._descriptions()[0]["checksums"], dtypes)
        except ValueError as error:
            raise ReplicaError(f"{self.name} is damaged ({error})") from error
        log.info(
            "restored step %d from memory: %.1f MB from the processes' own hosts, %.1f MB from "
            "other hosts", self.step, *(sum(result[i] for result in results) / 1e6 for i in (1, 2)),
        )  # fmt: skip
        self.is_restored = True
        return tree

    def _copies(self) -> dict[int, list[Copy]]:
        """Return the copies of each sender's files: this host's first, then those of others."""
        own = jax.process_index()
        copies: dict[int, list[Copy]] = {}
        for sender, holders in self._holders.items():
            hosts: dict[str, list[int]] = {}
            for process in holders:
                hosts.setdefault(self._processes[process].host, []).append(process)
            local = hosts.pop(self._processes[own].host, None)
            # Processes are distributed over the copies, and over the processes of a host.
            others = [members[own % len(members)] for members in hosts.values()]
            others = others[own % len(others) :] + others[: own % len(others)] if others else []
            copies[sender] = [Copy(own, None)] if local else []
            copies[sender] += [
                Copy(process, self._processes[process].address) for process in others
            ]
        return copies
