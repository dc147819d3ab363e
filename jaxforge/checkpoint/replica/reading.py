"""Start from a complete replica: arrays with any sharding, from the hosts that hold them.

Every shard is compared with its checksum. A damaged copy is replaced by that of another host.
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

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.store import Bounds, Group, Shard, Store, overlap
from jaxforge.checkpoint.replica.transfer import Process, gather
from jaxforge.parallel.host_memory import in_own_memory
from jaxforge.state.progress import Progress, unseal_progress
from jaxforge.state.train_state import TrainState, with_counts

log = logging.getLogger(__name__)

_THREADS = 4  # arrays that are read at a time


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
        self._lock = threading.Lock()
        self.local_bytes = self.remote_bytes = 0
        self.damaged: dict[str, str] = {}

    def read(self, sender: int, shard: Shard) -> np.ndarray:
        """Return the bytes of a shard.

        Raises:
            ValueError: no copy is intact.
        """
        content = np.empty(shard.nbytes, np.uint8)
        for copy in self._copies[sender]:
            try:
                self._read_copy(copy, sender, shard, content.data)
            except OSError as error:
                self._note_damage(sender, copy, str(error))
                continue
            with self._lock:
                if copy.address is None:
                    self.local_bytes += shard.nbytes
                else:
                    self.remote_bytes += shard.nbytes
            if zlib.crc32(content.data) == shard.crc:
                return content
            self._note_damage(sender, copy, f"a part of {shard.array} is damaged")
        raise ValueError(f"no copy of the files of process {sender} is intact")

    def _read_copy(self, copy: Copy, sender: int, shard: Shard, target: memoryview) -> None:
        if copy.address is not None:
            transfer.get(copy.address, self._token, self._group, sender, shard.offset, target)
            return
        with self._store.data_path(self._group, sender).open("rb", buffering=0) as file:
            file.seek(shard.offset)
            while target:
                size = file.readinto(target)
                if not size:
                    raise OSError(f"{file.name} is shorter than its manifest says")
                target = target[size:]

    def _note_damage(self, sender: int, copy: Copy, reason: str) -> None:
        name = f"files of process {sender} on the host of process {copy.process}"
        with self._lock:
            self.damaged.setdefault(name, reason)


Index = Mapping[str, Sequence[tuple[int, Shard]]]
"""Array name -> sender and location of each shard."""


def read_tree(reader: Reader, index: Index, saved: PyTree, requested: PyTree) -> PyTree:
    """Return the arrays of a tree with the requested shardings and dtypes.

    Args:
        reader: reader of the data.
        index: locations of the shards.
        saved: abstract values of the saved arrays.
        requested: abstract values with shardings.

    Raises:
        ValueError: no copy of a part is intact.
    """
    dtypes = {name: leaf.dtype for name, leaf in flatten_dict(saved, sep=".").items()}

    def read(item: tuple[str, Any]) -> jax.Array:
        name, leaf = item
        return _read_array(reader, index[name], np.dtype(dtypes[name]), leaf)

    leaves = flatten_dict(requested, sep=".")
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as pool:
        arrays = list(pool.map(read, leaves.items()))
    return unflatten_dict(dict(zip(leaves, arrays, strict=True)), sep=".")


def _read_array(
    reader: Reader, shards: Sequence[tuple[int, Shard]], dtype: np.dtype, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """Return an array; each shard that this process needs is read once."""
    devices: dict[Bounds, list[jax.Device]] = {}
    sharding = leaf.sharding
    for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
        spans = [axis.indices(length) for axis, length in zip(index, leaf.shape, strict=True)]
        devices.setdefault(tuple((begin, end) for begin, end, _ in spans), []).append(device)
    regions = {bounds: np.empty([end - begin for begin, end in bounds], dtype)
               for bounds in devices}  # fmt: skip
    missing = {bounds: region.size for bounds, region in regions.items()}
    for sender, shard in shards:
        parts = [(bounds, part) for bounds in devices if (part := overlap(shard, bounds))]
        if not parts:
            continue
        content = reader.read(sender, shard).view(dtype).reshape(shard.shape)
        for bounds, part in parts:
            regions[bounds][part.in_region] = content[part.in_shard]
            missing[bounds] -= part.size
    # Shards of different senders are disjoint, so equal sizes mean that nothing is missing.
    if any(missing.values()):
        raise ValueError("a part of an array is in no copy")
    arrays = []
    for bounds, holders in devices.items():
        region = regions.pop(bounds).astype(leaf.dtype, copy=False)
        for device in holders:
            target = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            arrays.append(jax.device_put(region, target))
    # Bounds the host memory to the arrays of `_THREADS`: their regions are free only now.
    jax.block_until_ready(arrays)
    return in_own_memory(jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays))


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

    @property
    def groups(self) -> int:
        """Number of groups whose states the replica holds; 0 if devices trained together."""
        return layout.saved_groups(self._saved_tree())

    def restore(self, like: TrainState) -> tuple[TrainState, Progress]:
        """Restore state and progress, with the shardings of `like`.

        Raises:
            ReplicaError: no intact copy of a part is left.
            UserError: the replica is of another model or optimizer.
        """
        progress, saved = self.progress(), self._saved_tree()
        requested = layout.drop_unsaved(layout.to_tree(like), saved)
        layout.check_model(requested, saved, self.path)
        layout.check_optimizer(requested, saved, self.path)
        layout.log_average_changes(like, saved, self.path)
        state = layout.from_tree(self._read(saved, requested), like)
        return with_counts(state, progress), progress

    def restore_model(self, like: PyTree) -> PyTree:
        """Restore the model's part of the state (`layout.model_tree`).

        Raises:
            ReplicaError: no intact copy of a part is left.
            UserError: the replica is of another model.
        """
        saved = self._saved_tree()
        like = layout.drop_unsaved({k: part for k, part in like.items() if k in saved}, saved)
        layout.check_model(like, {name: saved[name] for name in like}, self.path)
        return self._read(saved, like)

    def _descriptions(self) -> list[dict[str, Any]]:
        """Return what the manifest of each sender says.

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
                            "arrays": manifest.arrays,
                            "progress": manifest.progress,
                        }
            merged = {int(k): value for part in gather(published) for k, value in part.items()}
            self._exchanged = [merged[sender] for sender in range(self._senders)]
        return self._exchanged

    def _saved_tree(self) -> layout.Tree:
        arrays = self._descriptions()[0]["arrays"].items()
        return unflatten_dict(
            {name: jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
             for name, (shape, dtype) in arrays}, sep=".",
        )  # fmt: skip

    def _read(self, saved: layout.Tree, requested: layout.Tree) -> PyTree:
        """Read arrays. If a process cannot read its parts, all processes raise."""
        reader = Reader(self.group, self._store, self._token, self._copies())
        index: dict[str, list[tuple[int, Shard]]] = {}
        for sender, description in enumerate(self._descriptions()):
            for name, start, shape, *numbers in description["shards"]:
                shard = Shard(name, tuple(start), tuple(shape), *numbers)
                index.setdefault(name, []).append((sender, shard))
        tree, failure = None, ""
        try:
            tree = read_tree(reader, index, saved, requested)
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
        log.info(
            "restored step %d from memory: %.1f MB from the processes' own hosts, %.1f MB from "
            "other hosts", self.step, *(sum(result[i] for result in results) / 1e6 for i in (1, 2)),
        )  # fmt: skip
        self.is_restored = True
        return tree

    def _copies(self) -> dict[int, list[Copy]]:
        """Return the copies of each sender's files: this host's first, then those of others."""
        this = jax.process_index()
        copies: dict[int, list[Copy]] = {}
        for sender, holders in self._holders.items():
            hosts: dict[str, list[int]] = {}
            for process in holders:
                hosts.setdefault(self._processes[process].host, []).append(process)
            local = hosts.pop(self._processes[this].host, None)
            # Processes are distributed over the copies, and over the processes of a host.
            remote = [members[this % len(members)] for members in hosts.values()]
            remote = remote[this % len(remote) :] + remote[: this % len(remote)] if remote else []
            copies[sender] = [Copy(this, None)] if local else []
            copies[sender] += [
                Copy(process, self._processes[process].address) for process in remote
            ]
        return copies
