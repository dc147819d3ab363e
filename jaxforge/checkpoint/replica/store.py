"""Replicas on one host: files in a directory in memory (tmpfs), which outlives the processes.

    <replica_dir>/jaxforge_<uid>/<run>/<origin>/step_<n>.<attempt>/<sender>.data   bytes of shards
                                                                   <sender>.json   manifest

A sender is a process that saved. Its data are one file, and the manifest says where each shard is.
The host of the sender and its peer hold the same two files. Each file gets its name when it is
complete, the manifest last. A manifest holds the CRC-32 of every shard, and its own.
"""

import dataclasses
import json
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.storage import safe_files
from jaxforge.storage.seals import add_seal, remove_seal

BLOCK = 1 << 18
"""Bytes written and summed at a time: they stay in a core's cache."""

Inventory = list[tuple[str, int, list[int]]]
"""Name of each group on a host, the number of its senders, and the senders whose files are here."""

_GROUP = re.compile(r"step_(\d+)\.([0-9a-f]+-\d+)")
_PARTIAL = ".partial"


class Group(NamedTuple):
    """The files of all senders of one save.

    Attributes:
        step: the saved step.
        attempt: identifies the start of the job and the number of its rollbacks. Files of two
            attempts at a step may differ in their last bits, and are never combined.
    """

    step: int
    attempt: str

    @property
    def name(self) -> str:
        """Name of the directory."""
        return f"step_{self.step}.{self.attempt}"

    @classmethod
    def parse(cls, name: str) -> "Group | None":
        """Return the group of a directory name; None for other names."""
        match = _GROUP.fullmatch(name)
        return cls(int(match[1]), match[2]) if match else None


class Shard(NamedTuple):
    """Part of an array in the data of its sender.

    Attributes:
        array: name of the array.
        start: index of the first element in the array.
        shape: shape of the part.
        offset: first byte in the data.
        nbytes: number of bytes.
        crc: CRC-32 of the bytes.
    """

    array: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    crc: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Description of the data of one sender.

    Attributes:
        senders: number of processes that saved.
        arrays: shape and dtype of each array of the state.
        shards: the sender's parts of the arrays, in the order of their bytes.
        progress: sealed progress (`progress.seal_progress`).
    """

    senders: int
    arrays: dict[str, tuple[tuple[int, ...], str]]
    shards: list[Shard]
    progress: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of the data."""
        return sum(shard.nbytes for shard in self.shards)

    def encode(self) -> bytes:
        """Return the content of the file."""
        return json.dumps(add_seal(dataclasses.asdict(self))).encode()

    @classmethod
    def decode(cls, content: bytes) -> "Manifest":
        """Return the manifest of a file.

        Raises:
            ValueError: the content is damaged.
        """
        values = remove_seal(json.loads(content), "a manifest of a replica")
        arrays = {name: (tuple(shape), dtype) for name, (shape, dtype) in values["arrays"].items()}
        shards = [Shard(name, tuple(at), tuple(shape), *numbers)
                  for name, at, shape, *numbers in values["shards"]]  # fmt: skip
        return cls(**{**values, "arrays": arrays, "shards": shards})


class Store:
    """Replicas of a run on this host. Several processes of the host share the directory.

    Args:
        directory: the directory of the run, private to this user.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def open(self) -> None:
        """Create the directory; remove partial files, and replicas of other runs at its path.

        Raises:
            OSError: the directory cannot be used.
        """
        # Each level, because `/dev/shm` is open to all users: none may be a link of another user.
        parents = [self.directory.parents[1], self.directory.parent, self.directory]
        for path in parents:
            safe_files.private_directory(path)
        # Memory is scarce, and a run that has replaced this one at its path needs none of these.
        for path in self.directory.parent.iterdir():
            if path != self.directory:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.directory.rglob(f".*{_PARTIAL}"):
            path.unlink(missing_ok=True)

    def identity(self) -> str:
        """Return a name of the directory that is the same for all processes that share it."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            boot = os.uname().nodename
        # Containers of one machine share the boot id, but perhaps not the directory.
        status = self.directory.stat()
        return f"{boot}/{status.st_dev}/{status.st_ino}"

    def groups(self) -> list[Group]:
        """Return the groups with a directory, in order of steps."""
        names = (path.name for path in self.directory.iterdir())
        return sorted(group for name in names if (group := Group.parse(name)))

    def manifests(self, group: Group) -> Iterator[tuple[int, Manifest]]:
        """Yield the senders of a group with complete files, and their manifests."""
        for path in sorted((self.directory / group.name).glob("*.json")):
            try:
                sender = int(path.stem)
                manifest = Manifest.decode(path.read_bytes())
                # The size suffices here: shards are compared with their sums when they are read.
                is_whole = self.data_path(group, sender).stat().st_size == manifest.size
            except (OSError, ValueError):
                continue  # damaged: this copy does not count
            if is_whole:
                yield sender, manifest

    def inventory(self) -> Inventory:
        """Return the intact files on this host."""
        listed: Inventory = []
        for group in self.groups():
            senders = {sender: manifest.senders for sender, manifest in self.manifests(group)}
            if senders:
                listed.append((group.name, max(senders.values()), sorted(senders)))
        return listed

    def data_path(self, group: Group, sender: int) -> Path:
        """Return the path of a sender's data."""
        return self.directory / group.name / f"{sender}.data"

    def manifest_path(self, group: Group, sender: int) -> Path:
        """Return the path of a sender's manifest."""
        return self.directory / group.name / f"{sender}.json"

    def write(
        self, group: Group, sender: int, blocks: Iterable[memoryview], describe: Callable[[], bytes]
    ) -> None:
        """Write the two files of a sender.

        Args:
            group: the save.
            sender: the process that saved.
            blocks: the data, in order.
            describe: returns the content of the manifest; called after the last block.

        Raises:
            OSError: a file cannot be written; no partial file remains.
            ValueError: raised by `blocks`.
        """
        path = self.data_path(group, sender)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with safe_files.replacing(path) as file:
            file.writelines(blocks)
        # After the data: a manifest without data would count as a copy.
        with safe_files.replacing(self.manifest_path(group, sender)) as file:
            file.write(describe())

    def remove(self, is_obsolete: Callable[[Group], bool]) -> None:
        """Remove groups; another process of the host may remove the same ones."""
        for group in filter(is_obsolete, self.groups()):
            shutil.rmtree(self.directory / group.name, ignore_errors=True)

    def remove_all(self) -> None:
        """Remove the directory of the run."""
        shutil.rmtree(self.directory.parent, ignore_errors=True)


def complete_groups(
    inventories: Sequence[Inventory],
) -> list[tuple[Group, int, dict[int, list[int]]]]:
    """Return the groups with every sender's files on some host of the job, the newest first.

    Args:
        inventories: inventory of each process.

    Returns:
        For each group, the number of senders, and the processes whose host has each sender's files.
    """
    holders: dict[Group, dict[int, list[int]]] = {}
    counts: dict[Group, int] = {}
    for process, inventory in enumerate(inventories):
        for name, count, senders in inventory:
            group = Group.parse(name)
            assert group is not None
            # From the manifests, not from this job: it may have another number of processes.
            counts[group] = count
            for sender in senders:
                # Processes of one host list the same files, and each of them can serve these.
                holders.setdefault(group, {}).setdefault(sender, []).append(process)
    return [
        (group, counts[group], holders[group])
        for group in sorted(holders, reverse=True)
        if holders[group].keys() >= set(range(counts[group]))
    ]


class HostShard(NamedTuple):
    """Copy of a shard in host memory.

    Attributes:
        array: name of the array.
        start: index of the first element in the array.
        data: the elements, an array of NumPy or JAX.
    """

    array: str
    start: tuple[int, ...]
    data: Any


def copy_shards(tree: PyTree) -> list[HostShard]:
    """Copy the shards that this process saves to host memory.

    Each element of an array is saved by exactly one process. Copies of accelerators are complete on
    return, copies on CPUs are only requested: the next step waits for them before it overwrites
    the state.
    """
    shards = [
        HostShard(name, tuple(axis.start or 0 for axis in shard.index), shard.data)
        for name, leaf in flatten_dict(tree, sep=".").items()
        for shard in leaf.addressable_shards
        if shard.replica_id == 0
    ]
    if all(device.platform == "cpu" for device in jax.local_devices()):
        # The runtime orders the next step's writes after these copies, so nobody waits here.
        return [s._replace(data=jax.device_put(s.data, may_alias=False)) for s in shards]
    for shard in shards:  # all transfers are under way before the first is awaited
        shard.data.copy_to_host_async()
    return [shard._replace(data=np.asarray(shard.data)) for shard in shards]


def blocks_of(shards: list[HostShard], written: list[Shard]) -> Iterator[memoryview]:
    """Yield the bytes of shards in order, in blocks of at most `BLOCK` bytes.

    Args:
        shards: the shards. The list is emptied, so that the memory of each is free once written.
        written: receives the location and checksum of each shard.
    """
    shards.reverse()  # `pop` frees the end of a list
    offset = 0
    while shards:
        shard = shards.pop()
        array, crc = np.ascontiguousarray(np.asarray(shard.data)), 0
        view = array.reshape(-1).view(np.uint8).data
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            crc = zlib.crc32(block, crc)
            yield block
        written.append(
            Shard(shard.array, shard.start, tuple(shard.data.shape), offset, len(view), crc)
        )
        offset += len(view)


Bounds = tuple[tuple[int, int], ...]
"""First index and end of a region of an array, for each axis."""


class Overlap(NamedTuple):
    """Common part of a shard and a region of the same array.

    Attributes:
        in_shard: index within the shard.
        in_region: index within the region.
        size: number of elements.
    """

    in_shard: tuple[slice, ...]
    in_region: tuple[slice, ...]
    size: int


def overlap(shard: Shard, region: Bounds) -> Overlap | None:
    """Return the part of a shard within a region of its array; None if there is none."""
    start = [begin for begin, _ in region]
    first = [max(pair) for pair in zip(shard.start, start, strict=True)]
    ends = zip(shard.start, shard.shape, region, strict=True)
    stop = [min(begin + length, end) for begin, length, (_, end) in ends]
    sizes = [last - begin for begin, last in zip(first, stop, strict=True)]
    if any(size <= 0 for size in sizes):
        return None

    def relative(origin: Sequence[int]) -> tuple[slice, ...]:
        return tuple(slice(a - o, b - o) for a, b, o in zip(first, stop, origin, strict=True))

    return Overlap(relative(shard.start), relative(start), math.prod(sizes))
