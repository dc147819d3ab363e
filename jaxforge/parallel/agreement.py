"""Comparison of the processes of one job, before they train together.

Gradients are averaged over processes. If one process has another learning rate, seed or data path,
the whole job trains on a wrong curve. If one has another interval, it waits forever in a collective
that the others never reach. All processes compare their settings, and either all continue or none.
"""

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxforge.errors import StorageError, UserError

Facts = Mapping[str, Any]
"""JSON values by name, which must be equal in all processes of a job."""

_MAX_FACTS, _MAX_PROCESSES = 10, 4  # that a message lists


def check(facts: Facts) -> None:
    """Compare the facts of all processes of the job. Every process must call this function.

    If all facts agree, the cost is one gather of 32 bytes from each process. A job of one process
    always agrees.

    Args:
        facts: facts of this process.

    Raises:
        UserError: a fact differs. Every process raises, and names the fact, its values and hosts.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(facts, sort_keys=True).encode()
    # Texts are exchanged only after digests differ: the usual start moves 32 bytes per process.
    digests = multihost_utils.process_allgather(_bytes(hashlib.sha256(text).digest()))
    if (digests == digests[0]).all():
        return
    texts = gather(json.dumps([socket.gethostname(), facts]))
    message = differences([(host, facts) for host, facts in map(json.loads, texts)])
    jax.distributed.shutdown()  # all processes end together, so that none is reported as lost
    raise UserError(message)


def raise_on_all(failure: UserError | StorageError | None) -> None:
    """Raise the error of any process on all processes. Every process must call this function.

    Args:
        failure: error of this process; None: no error.

    Raises:
        UserError, StorageError: some process has an error. Processes without one raise the first
            process's.
    """
    texts = ["" if failure is None else f"{type(failure).__name__} {failure}"]
    if jax.process_count() > 1:
        texts = gather(texts[0])
        # Together, so that no process is reported as lost by another.
        if any(texts):
            jax.distributed.shutdown()
    if text := next(filter(None, texts), ""):
        kind, _, message = text.partition(" ")
        raise failure or (StorageError if kind == StorageError.__name__ else UserError)(message)


def call_on_first(function: Callable[[], object]) -> None:
    """Call a function on process 0. Every process must call this, and raises its error.

    Raises:
        UserError, StorageError: raised by the function.
    """
    failure = None
    if jax.process_index() == 0:
        try:
            function()
        except (UserError, StorageError) as error:
            failure = error
    raise_on_all(failure)


def differences(processes: Sequence[tuple[str, Facts]]) -> str:
    """Describe the facts that differ, one line for each.

    Args:
        processes: host and facts of each process, in the order of processes.
    """
    names = dict.fromkeys(name for _, facts in processes for name in facts)
    lines = []
    for name in names:
        holders: dict[str, list[str]] = {}
        for number, (host, facts) in enumerate(processes):
            holders.setdefault(json.dumps(facts.get(name)), []).append(f"{number} ({host})")
        if len(holders) > 1:
            values = "; ".join(f"{value} on {_list(group)}" for value, group in holders.items())
            lines.append(f"{name} differs between the processes of this job: {values}")
    if (more := len(lines) - _MAX_FACTS) > 0:
        lines[_MAX_FACTS:] = [f"and {more} more differ"]
    return "\n".join([*lines, "start all processes with the same command, config, code and data"])


def _list(processes: Sequence[str]) -> str:
    shown = ", ".join(processes[:_MAX_PROCESSES])
    more = len(processes) - _MAX_PROCESSES
    label = "process" if len(processes) == 1 else "processes"
    return f"{label} {shown}" + (f" and {more} more" if more > 0 else "")


def index_on_host() -> int:
    """Return the number of processes of this host before this one. Every process must call this."""
    if jax.process_count() == 1:
        return 0
    hosts = gather(socket.gethostname())
    return hosts[: jax.process_index()].count(hosts[jax.process_index()])


def gather(text: str) -> list[str]:
    """Return the text of each process, in order. Every process must call this function."""
    encoded = text.encode()
    sizes = multihost_utils.process_allgather(np.array([len(encoded)], np.int32)).reshape(-1)
    # Texts are padded to equal lengths. The additional byte avoids an array of size 0.
    padded = _bytes(encoded.ljust(int(sizes.max()) + 1, b"\0"))
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)
