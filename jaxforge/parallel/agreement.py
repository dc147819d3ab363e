"""Comparison of the processes of one job, before they train together.

Gradients are averaged over processes. So another learning rate, seed or data path on one of them
trains to the end on a wrong curve, and another interval waits for ever in a collective that the
others never reach. All processes compare what they start with, and either all go on or none does.
"""

import hashlib
import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxforge.errors import UserError

Facts = Mapping[str, Any]
"""Name -> JSON, the same in all processes of a job."""

_MOST_FACTS, _MOST_PROCESSES = 10, 4
"""Differing facts, and processes that have the same value, that a message names."""


def check(facts: Facts) -> None:
    """Compare the facts of all processes of the job; every process has to call this.

    Costs one gather of 32 bytes from each process where all agree. A process on its own agrees.

    Args:
        facts: those of this process.

    Raises:
        UserError: on every process, if some fact differs; it names the fact, values and hosts.
    """
    if jax.process_count() == 1:
        return
    text = json.dumps(facts, sort_keys=True).encode()
    digests = multihost_utils.process_allgather(_bytes(hashlib.sha256(text).digest()))
    if (digests == digests[0]).all():
        return
    everyone = gather(json.dumps([socket.gethostname(), facts]))
    message = differences([(host, of_host) for host, of_host in map(json.loads, everyone)])
    jax.distributed.shutdown()  # all leave here, together: none is taken for lost
    raise UserError(message)


def raise_on_all(failure: UserError | None) -> None:
    """Raise on every process what one of them found; every process has to call this.

    Args:
        failure: what this process found, if anything.

    Raises:
        UserError: some process found one.
    """
    texts = [str(failure or "")]
    if jax.process_count() > 1:
        texts = gather(texts[0])
        if any(texts):
            jax.distributed.shutdown()
    if text := next(filter(None, texts), ""):
        raise failure or UserError(text)


def differences(processes: Sequence[tuple[str, Facts]]) -> str:
    """Describe the facts that differ, one line for each.

    Args:
        processes: host and facts of each process, in order.
    """
    names = dict.fromkeys(name for _, facts in processes for name in facts)
    lines = []
    for name in names:
        holders: dict[str, list[str]] = {}
        for number, (host, facts) in enumerate(processes):
            holders.setdefault(json.dumps(facts.get(name)), []).append(f"{number} ({host})")
        if len(holders) > 1:
            values = "; ".join(f"{value} on {_named(those)}" for value, those in holders.items())
            lines.append(f"{name} differs between the processes of this job: {values}")
    if more := len(lines) - _MOST_FACTS:
        lines[_MOST_FACTS:] = [f"and {more} more differ"] if more > 0 else []
    return "\n".join([*lines, "start all processes with the same command, config, code and data"])


def _named(processes: Sequence[str]) -> str:
    shown = ", ".join(processes[:_MOST_PROCESSES])
    more = len(processes) - _MOST_PROCESSES
    label = "process" if len(processes) == 1 else "processes"
    return f"{label} {shown}" + (f" and {more} more" if more > 0 else "")


def gather(text: str) -> list[str]:
    """Return the text of each process, in order; every process has to call this."""
    own = text.encode()
    sizes = multihost_utils.process_allgather(np.array([len(own)], np.int32)).reshape(-1)
    padded = _bytes(own.ljust(int(sizes.max()) + 1, b"\0"))
    rows = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def _bytes(text: bytes) -> np.ndarray:
    return np.frombuffer(text, np.uint8)
