"""Adapters of fused tensors, which hold several of jaxforge's matrices (GPT-2, GPT-NeoX, Phi-3).

jaxforge adapts each of the n parts, and PEFT the whole tensor. Adapters of rank r of all parts are
one adapter of rank n r with the same factor, for instance with three parts:

                              | B1 0  0  |
    A = [A1; A2; A3]      B = | 0  B2 0  |
                              | 0  0  B3 |

The rows of B are in the order of the fused tensor, and a part without an adapter has zeros in both
matrices. In the other direction, any adapter of the tensor is an adapter of each part, with the
whole A and the part's rows of B. Only matrices of the form above are separated again.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from torch_compat.formats.lazy import LazyTensor, interleave_rows, zeros


class Adapter(NamedTuple):
    """Matrices of an adapter.

    Attributes:
        a: A [rank, in].
        b: B [out, rank].
    """

    a: LazyTensor
    b: LazyTensor


def fuse(parts: Mapping[int, Adapter], rows: Sequence[np.ndarray]) -> Adapter:
    """Return the adapter of a fused tensor.

    Args:
        parts: adapters of the parts, all of one rank.
        rows: rows of each part in the fused tensor (`names.table.Layout`).
    """
    any_a = next(iter(parts.values())).a
    (rank, inp), dtype, n = any_a.shape, any_a.dtype, len(rows)
    slots, all_a, all_b = _slots(n, rank), [], []
    for part, own_rows in enumerate(rows):
        out = len(own_rows)
        no_adapter = Adapter(zeros((rank, inp), dtype), zeros((out, rank), dtype))
        a, b = parts.get(part, no_adapter)
        # Columns of B that multiply the A of other parts are zero in this part's rows.
        free = np.delete(np.arange(n * rank), slots[part])
        columns = [b.transposed(), zeros((len(free), out), dtype)]
        all_a.append(a)
        all_b.append(interleave_rows(columns, [slots[part], free]).transposed())
    return Adapter(interleave_rows(all_a, slots), interleave_rows(all_b, rows))


def split(adapter: Adapter, rows: Sequence[np.ndarray], rank: int) -> dict[int, Adapter]:
    """Return the adapters of the parts of a fused tensor.

    Args:
        adapter: adapter of the fused tensor.
        rows: rows of each part in the fused tensor.
        rank: rank of the adapters of other tensors. `fuse` multiplies it by the number of parts.
    """
    a, parts = adapter.a, [adapter.b.rows(own_rows) for own_rows in rows]
    slots = _slots(len(rows), rank)
    if a.shape[0] != len(rows) * rank or not _is_block_diagonal(parts, slots):
        return {part: Adapter(a, b) for part, b in enumerate(parts)}
    return {
        part: Adapter(a.rows(slot), b.transposed().rows(slot).transposed())
        for part, (b, slot) in enumerate(zip(parts, slots, strict=True))
        # `fuse` writes zeros for a part without an adapter.
        if a.rows(slot).all().any()
    }


def _slots(n: int, rank: int) -> list[np.ndarray]:
    """Return the rows of A, and columns of B, of each part."""
    return list(np.arange(n * rank).reshape(n, rank))


def _is_block_diagonal(parts: Sequence[LazyTensor], slots: Sequence[np.ndarray]) -> bool:
    pairs = zip(parts, slots, strict=True)
    return not any(np.delete(b.all(), slot, axis=1).any() for b, slot in pairs)
