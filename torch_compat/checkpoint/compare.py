"""Two checkpoints side by side, a block at a time."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from jaxforge.errors import StorageError
from torch_compat.formats.lazy import LazyTensor, blocks


@dataclasses.dataclass(frozen=True)
class Difference:
    """How one tensor of two checkpoints differs.

    Attributes:
        name: its name.
        what: "missing" (only in the first), "unexpected" (only in the second), "shape", "values".
        largest: the largest absolute difference; inf where one is not finite and the other is.
        note: shapes or dtypes, where they differ.
    """

    name: str
    what: str
    largest: float = 0.0
    note: str = ""


def compare(
    a: Mapping[str, LazyTensor],
    b: Mapping[str, LazyTensor],
    block: int,
    advance: Callable[[int], None] = lambda nbytes: None,
) -> list[Difference]:
    """Every tensor that is not the same in both, in the order of the names.

    Values count, not dtypes: a bfloat16 tensor equals its float32 copy, and a note says so where
    the values differ.

    Args:
        a: one checkpoint.
        b: the other.
        block: bytes of each to hold at a time.
        advance: called with the bytes of `a` that have been compared.
    """
    found = []
    for name in sorted(a.keys() | b.keys()):
        if name not in b:
            found.append(Difference(name, "missing", note="only in A"))
        elif name not in a:
            found.append(Difference(name, "unexpected", note="only in B"))
        elif a[name].shape != b[name].shape:
            shapes = f"{list(a[name].shape)} and {list(b[name].shape)}"
            found.append(Difference(name, "shape", float("inf"), shapes))
        else:
            largest = _largest_difference(a[name], b[name], block, advance)
            if largest:
                kinds = {a[name].dtype.name, b[name].dtype.name}
                note = " and ".join(sorted(kinds)) if len(kinds) > 1 else ""
                found.append(Difference(name, "values", largest, note))
    return found


def check_written(
    found: Mapping[str, LazyTensor], written: Mapping[str, LazyTensor], where: str
) -> None:
    """Looks whether what was written is there: every name, with its shape and dtype.

    Args:
        found: what was opened.
        written: what was to be written.
        where: the checkpoint, for the message.

    Raises:
        StorageError: it is not.
    """
    forms = [{n: (t.shape, t.dtype) for n, t in each.items()} for each in (found, written)]
    if wrong := sorted(name for name, _ in forms[0].items() ^ forms[1].items()):
        raise StorageError(f"{where}: {wrong[0]} does not read as it was written")


def _largest_difference(
    a: LazyTensor, b: LazyTensor, block: int, advance: Callable[[int], None]
) -> float:
    largest = 0.0
    itemsize = max(a.dtype.itemsize, b.dtype.itemsize)
    for index in blocks(a.shape, itemsize, block):
        x, y = a.read(index), b.read(index)
        advance(x.nbytes)
        if x.dtype == y.dtype and x.dtype.kind in "biu":
            largest = max(largest, float(np.count_nonzero(x != y) > 0))
            continue
        wide = np.float64 if np.float64 in (x.dtype, y.dtype) else np.float32
        x, y = np.asarray(x, wide), np.asarray(y, wide)
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        if not same.all():
            with np.errstate(invalid="ignore"):
                distance = np.abs(x - y)[~same]
            largest = max(largest, float(np.where(np.isfinite(distance), distance, np.inf).max()))
    return largest
