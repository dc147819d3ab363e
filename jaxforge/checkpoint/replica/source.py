"""A complete replica as the checkpoint from which a run starts."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint import layout, validation
from jaxforge.checkpoint.checksums import check
from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.peers import Process, gather
from jaxforge.checkpoint.replica.reading import Copy, Reader, ReplicaError, read_tree
from jaxforge.checkpoint.replica.store import Group, Shard, Store
from jaxforge.checkpoint.sealed_progress import unseal_progress
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import TrainState, with_counts

log = logging.getLogger(__name__)


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
                Copy(process, transfer.Address(*self._processes[process].address))
                for process in others
            ]
        return copies
