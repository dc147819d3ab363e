"""Checksums of arrays: comparison of a restore with what was saved, bit by bit.

Storage does not tell: tensorstore has checksums of its index, not of the numbers, and a bit that
flips on the way to the disk, on it, or on the way back would be trained on. So each array is hashed
where it lies before it is saved, and again when it is back. The hash goes by places in the whole
array: meshes do not matter.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.checkpoint import host_checksum
from jaxforge.state.checksum import checksum

Checksums = dict[str, int]
"""Array -> its hash."""

_hash = jax.jit(lambda tree: jax.tree.map(checksum, tree))


def begin(tree: PyTree) -> Callable[[], Checksums]:
    """Begins to hash each array.

    Devices hash on their own while the host goes on: at once afterwards they may be given away.
    What lies in this host's memory is hashed there, by whoever asks for the result (in the
    background, if in the background), and has to stay until then.

    Returns:
        What waits for the hashes, by the paths of their arrays.
    """
    leaves = {name: jnp.asarray(leaf) for name, leaf in flatten_dict(tree, sep=".").items()}
    if not is_on_this_host(leaves):
        hashes = _hash(leaves)
        return lambda: {name: int(value) for name, value in jax.device_get(hashes).items()}
    return lambda: {name: host_checksum.checksum(leaf) for name, leaf in leaves.items()}


def check(tree: PyTree, saved: Mapping[str, int], dtypes: Mapping[str, object]) -> None:
    """Raise ValueError if some array is not what was saved, or has no hash.

    Args:
        tree: what was read, or a part of it.
        saved: hashes of what was saved.
        dtypes: of what was saved; an array that was read as another type cannot be compared.
    """
    leaves = flatten_dict(tree, sep=".")
    changed = [
        name
        for name, value in begin(tree)().items()
        if leaves[name].dtype == dtypes[name] and value != saved.get(name)
    ]
    if changed:
        others = f" and {len(changed) - 1} more arrays" if changed[1:] else ""
        raise ValueError(f"not what was saved: {changed[0]}{others}")


class ChecksumsHandler(ocp.JsonCheckpointHandler):
    """Writes hashes when they are there, in the background; reads them as any JSON."""

    async def async_save(
        self, directory: Path, item: None = None, args: "ChecksumsSave | None" = None
    ) -> list[ocp.future.Future]:
        """Returns the write, which has begun."""
        assert args is not None

        async def save() -> None:
            hashes = args.wait()
            if jax.process_index() == 0:
                (directory / "metadata").write_text(json.dumps(hashes))

        return [ocp.future.CommitFutureAwaitingContractedSignals(save(), name="checksums")]


@ocp.args.register_with_handler(ChecksumsHandler, for_save=True)
@dataclasses.dataclass
class ChecksumsSave(ocp.args.CheckpointArgs):
    """Pending save of checksums, started by `begin`."""

    wait: Callable[[], Checksums]


def is_on_this_host(tree: PyTree) -> bool:
    """Return whether all arrays are in memory of this process that its devices share."""
    return all(
        leaf.is_fully_addressable and all(device.platform == "cpu" for device in leaf.devices())
        for leaf in jax.tree.leaves(tree)
    )
