"""Whether what was read from a checkpoint is what was saved, bit for bit.

Storage does not tell: tensorstore has checksums of its index, not of the numbers, and a bit that
flips on the way to the disk, on it, or on the way back would be trained on. So each array is hashed
on the devices that hold it before it is saved, and again when it is back. The hash goes by places
in the whole array: meshes do not matter.
"""

from collections.abc import Mapping

import jax
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.training.weight_hash import checksum

Checksums = dict[str, int]
"""Array -> its hash."""

_hash = jax.jit(lambda tree: jax.tree.map(checksum, tree))


def checksums_of(tree: PyTree) -> Checksums:
    """The hash of each array, by its path."""
    hashes = flatten_dict(jax.device_get(_hash(tree)), sep=".")
    return {name: int(value) for name, value in hashes.items()}


def check(tree: PyTree, saved: Mapping[str, int], dtypes: Mapping[str, object]) -> None:
    """Raises ValueError if some array is not what was saved.

    Args:
        tree: what was read, or a part of it.
        saved: hashes of what was saved.
        dtypes: of what was saved; an array that was read as another type cannot be compared.
    """
    leaves = flatten_dict(tree, sep=".")
    changed = [
        name
        for name, value in checksums_of(tree).items()
        if name in saved and leaves[name].dtype == dtypes[name] and value != saved[name]
    ]
    if changed:
        others = f" and {len(changed) - 1} more arrays" if changed[1:] else ""
        raise ValueError(f"not what was saved: {changed[0]}{others}")
