"""Replicas of a run: saves in the background, and the replicas from which a run can start.

    step n      ... train ... | copy to host memory | train ...
    thread                      prune, write own files ── send to the peer ── all done? ── complete

Two steps at most are in memory: before a step is written, all but the newest complete step are
removed. A replica that fails on any process counts as absent on all, and training continues.
"""

import functools
import hashlib
import logging
import os
import secrets
import threading
import time
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.relayout import by_layer
from jaxforge.checkpoint.replica import transfer
from jaxforge.checkpoint.replica.reading import Replica
from jaxforge.checkpoint.replica.store import (
    Group,
    HostShard,
    Manifest,
    Shard,
    Store,
    blocks_of,
    complete_groups,
    copy_shards,
)
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import UserError
from jaxforge.parallel import agreement
from jaxforge.parallel.device_memory import gigabytes
from jaxforge.parallel.stages import Stack
from jaxforge.state.progress import Progress, seal_progress
from jaxforge.state.train_state import TrainState
from jaxforge.storage.seals import crc32

log = logging.getLogger(__name__)

_MEMORY = "/dev/shm"
_AGREE_SEC = 600  # time for the slowest process to finish a replica after the first one
_END_SEC, _ALONE_SEC = 60.0, 1.0  # time for a replica to finish in a job, or a process, that ends


class Replicas:
    """Replicas of a run on the hosts of the job. All processes open them together.

    Args:
        config: the `[checkpoint]` section.
        run: the run directory.
        origin: the recorded origin of the run, on process 0; None for a new run.
        resolved_config: the config, whose checksum is stored.
        stack: order of layers in states.

    Attributes:
        origin: identifies the run; recorded in the run directory.
        sources: the complete replicas of earlier processes, the newest first.

    Raises:
        UserError: the directory cannot be used.
    """

    def __init__(
        self,
        config: CheckpointConfig,
        run: Path,
        origin: str | None,
        resolved_config: dict[str, Any],
        stack: Stack,
    ) -> None:
        # Process 0's: all hosts must agree on the directory, on the names of groups and on the key.
        random = [origin or secrets.token_hex(8), secrets.token_hex(4), secrets.token_hex(32)]
        self.origin, self._attempt, secret = map(str, transfer.gather(random)[0])
        self._store, token = Store(_directory(config, run, self.origin)), bytes.fromhex(secret)
        self._config_crc32, self._stack = crc32(resolved_config), stack
        self._begun: Group | None = None
        self._complete: Group | None = None
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None
        self._took: dict[int, tuple[float, int]] = {}
        failure = None
        try:
            self._store.open()
        except OSError as error:
            failure = UserError(
                f"checkpoint.replica_dir: {error.filename}: {error.strerror}. Set "
                "checkpoint.replica_dir to a directory in memory (tmpfs)"
            )
        agreement.raise_on_all(failure)
        self._server: transfer.Server | None = None
        if jax.process_count() > 1:
            self._server = transfer.Server(self._store, transfer.address_in_job(), token)
        identity = self._store.identity()
        domain = os.environ.get(transfer.DOMAIN) or identity
        address = self._server.address if self._server else ("", 0)
        records = transfer.gather([identity, domain, address, self._store.inventory()])
        self._processes = [
            transfer.Process(host, name, transfer.Address(*at)) for host, name, at, _ in records
        ]
        self._peer = self._choose_peer()
        held = [inventory for _, _, _, inventory in records]
        self.sources = [
            Replica(group, senders, holders, self._store, self._processes, token)
            for group, senders, holders in complete_groups(held)
        ]

    def _choose_peer(self) -> int | None:
        """Return the process that holds the second copy of this process's files."""
        if self._server is None:
            return None
        peers, process = transfer.choose_peers(self._processes), jax.process_index()
        # Of nobody else, so that a confused process cannot fill this host's memory.
        self._server.accept([i for i, peer in enumerate(peers) if peer == process])
        if peers[process] is None and process == 0:
            log.warning(
                "replicas are only in the memory of this host: there is no host in another failure "
                "domain (%s)", self._processes[process].domain,
            )  # fmt: skip
        return peers[process]

    def note_start(self, step: int) -> Replica | None:
        """Remove replicas that are newer than the state from which this start continues.

        Args:
            step: the step at which this start begins.

        Returns:
            The replica from which the state was restored; None if it is from elsewhere.
        """
        restored = next((replica for replica in self.sources if replica.is_restored), None)
        self.sources = []
        self._complete = restored.group if restored else None
        # Later steps will be computed again, perhaps with other bits. They must not outlive a crash
        # before they are replaced.
        self._store.remove(lambda group: group.step > step)
        return restored

    def save(self, progress: Progress, state: TrainState) -> None:
        """Copy a state to host memory, and start to write and send it in the background.

        A step that was saved since the last rollback is not saved again.

        Args:
            progress: progress of the run, including the step.
            state: state of the step. It may be donated as soon as this returns.
        """
        group = Group(progress.step, f"{self._attempt}-{len(progress.rollbacks)}")
        if group == self._begun:
            return
        self.wait()  # memory may not suffice for copies of two states
        self._begun = group
        tree = layout.to_tree(by_layer(layout.stored_state(state), self._stack))
        shards = copy_shards(tree)
        arrays = {
            name: (tuple(leaf.shape), str(leaf.dtype))
            for name, leaf in flatten_dict(tree, sep=".").items()
        }
        sealed = seal_progress(progress, self._config_crc32)
        self._thread = threading.Thread(
            target=self._replicate, args=(group, shards, arrays, sealed), daemon=True
        )
        self._thread.start()

    def _replicate(
        self,
        group: Group,
        shards: list[HostShard],
        arrays: dict[str, tuple[tuple[int, ...], str]],
        progress: dict[str, Any],
    ) -> None:
        """Write and send the files of this process, and agree with the others on the result."""
        began, failure, size = time.monotonic(), "", 0
        try:
            # Other work would slow down the copies on CPUs, and the step that waits for them.
            jax.block_until_ready([shard.data for shard in shards])
            self._store.remove(functools.partial(self._is_obsolete, group))
            # `blocks_of` fills the list while the data are written; the manifest is encoded last.
            process, written = jax.process_index(), list[Shard]()
            manifest = Manifest(jax.process_count(), arrays, written, progress)
            blocks = blocks_of(shards, written)
            self._store.write(group, process, blocks, manifest.encode)
            size = manifest.size
            if self._peer is not None and self._server is not None:
                address = self._processes[self._peer].address
                transfer.put(address, self._server.token, group, process, self._store)
        except (OSError, jax.errors.JaxRuntimeError) as error:
            failure = f"process {jax.process_index()}: {error}"
        except Exception as error:  # raised by `check`
            self._failure = error
            failure = f"process {jax.process_index()}: {error}"
        # A group without the files of one process is useless to all, so either all keep it or none.
        failures = _agree(group, failure)
        if failures:
            self._store.remove(lambda other: other == group)
            log.warning("no replica of step %d: %s", group.step, "; ".join(failures[:3]))
            return
        self._complete = group
        self._took[group.step] = time.monotonic() - began, size

    def _is_obsolete(self, current: Group, group: Group) -> bool:
        """Return whether a group is removed before `current` is written.

        Processes of this host, or those whose peers are here, may already write a later step.
        """
        is_later = group.attempt == current.attempt and group.step >= current.step
        return group != self._complete and not is_later

    def newly_complete(self) -> dict[int, tuple[float, int]]:
        """Return step -> seconds and bytes of the replicas completed since the last call."""
        if self._thread and self._thread.is_alive():
            return {}
        took, self._took = self._took, {}
        return took

    def check(self) -> None:
        """Raise an unexpected error of the background thread; never block."""
        if self._failure:
            raise self._failure

    def wait(self) -> None:
        """Wait until the replica in progress is complete, or has failed."""
        if self._thread:
            self._thread.join()
        self.check()

    def discard_after(self, step: int) -> None:
        """Remove later replicas. Every process must call this function at the same point."""
        self.wait()
        self._store.remove(lambda group: group.step > step)
        if self._complete and self._complete.step > step:
            self._complete = None

    def close(self, *, together: bool, durable_step: int | None) -> None:
        """Stop the server. Remove the replicas if a checkpoint has replaced them.

        Args:
            together: whether all processes of the job call this.
            durable_step: step of the newest permanent checkpoint.
        """
        if self._thread:
            self._thread.join(_END_SEC if together else _ALONE_SEC)
        if self._server:
            self._server.close()
        # A run that ends early, or on its own, may need its replicas at the next start.
        # A replica newer than the last checkpoint is all that is left of its steps.
        newest = self._complete.step if self._complete else 0
        if together and durable_step is not None and durable_step >= newest:
            self._store.remove_all()
        self.check()


def describe_memory(config: CheckpointConfig, state: TrainState) -> str:
    """Describe the host memory of replicas; empty without them.

    The newest two steps are kept, each also by a peer, and another one during its copy.

    Args:
        config: the `[checkpoint]` section.
        state: the state, or its abstract values.
    """
    if not config.replica_interval:
        return ""
    leaves = jax.tree.leaves(layout.to_tree(state))  # without the base of adapters
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return (
        f"every {config.replica_interval:,} steps, 4 copies of the state (2 in a single process) "
        f"and 1 more during a save, {gigabytes(size)} each, divided among the hosts"
    )


def _directory(config: CheckpointConfig, run: Path, origin: str) -> Path:
    # The origin changes when a run starts afresh at the same path: it never meets old replicas.
    memory = Path(config.replica_dir or _MEMORY)
    digest = hashlib.sha256(str(run).encode()).hexdigest()[:16]
    return memory / f"jaxforge_{os.getuid()}" / f"{run.name}-{digest}" / origin


def _agree(group: Group, failure: str) -> list[str]:
    """Return the failures of all processes, once all have finished a replica.

    The coordination service is used because the training loop may be within a collective.
    """
    if jax.process_count() == 1:
        return [failure] if failure else []
    # Failures are published before the barrier: after it, every process reads the same list.
    client: Any = ocp.multihost.get_jax_distributed_client()
    prefix = f"jaxforge/replica/{group.name}/"
    try:
        if failure:
            client.key_value_set(f"{prefix}{jax.process_index()}", failure)
        client.wait_at_barrier(f"{prefix}done", _AGREE_SEC * 1000)
        return [text for _, text in client.key_value_dir_get(prefix)]
    except jax.errors.JaxRuntimeError as error:
        return [failure or f"the processes did not agree: {str(error)[:160]}"]
