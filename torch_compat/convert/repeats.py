"""Detection of constant tensors and of copies of other tensors, which broken conversions leave."""

import itertools
from collections.abc import Iterator, Mapping

import numpy as np

from torch_compat.formats.lazy import LazyTensor, blocks, equal
from torch_compat.names.translation import summarize_names

Tensors = Mapping[str, LazyTensor]

_SAMPLE = 1024  # values that are compared before whole tensors
_BLOCK = 4 << 20  # bytes
_MAX_CANDIDATES = 8  # tensors with one sample that are read whole; moments of unused rows are many
_FLOATS = "fV"  # kinds of NumPy's floats, and of those of ml_dtypes


class ValueIndex:
    """Index of tensors by shape and by a sample of their values.

    Whole tensors are read only if their samples are equal.
    """

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._names: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
        for name, tensor in tensors.items():
            if tensor.dtype.kind in _FLOATS:
                self._names.setdefault(_key(tensor), []).append(name)

    def copies(self, tensor: LazyTensor, excluded: str = "") -> Iterator[str]:
        """Yield the names of tensors with the same values, in any dtype.

        Args:
            tensor: the tensor, of these or of another checkpoint.
            excluded: a name that is not yielded.
        """
        if tensor.dtype.kind not in _FLOATS:
            return
        names = (name for name in self._names.get(_key(tensor), ()) if name != excluded)
        for name in itertools.islice(names, _MAX_CANDIDATES):
            if has_values_of(self._tensors[name], tensor):
                yield name

    def repeated(self) -> Iterator[tuple[str, str]]:
        """Yield each tensor that is bitwise equal to an earlier one, and the earlier one."""
        for first, *later in self._names.values():
            yield from ((n, first) for n in later if equal(self._tensors[n], self._tensors[first]))


def has_values_of(a: LazyTensor, b: LazyTensor) -> bool:
    """Return whether two tensors have the same values, whatever their dtypes are."""
    kind = np.dtype(np.float64 if np.float64 in (a.dtype, b.dtype) else np.float32)
    return equal(a.cast(kind), b.cast(kind))


def constant(tensor: LazyTensor) -> float | None:
    """Return the value that all elements have; None if elements differ or do not exist."""
    if tensor.dtype.kind not in _FLOATS or 0 in tensor.shape:
        return None
    sample = _sample(tensor)
    value = sample.reshape(-1)[0]
    reads = (tensor.read(index) for index in blocks(tensor.shape, tensor.dtype.itemsize, _BLOCK))
    return (
        float(value) if all((x == value).all() for x in itertools.chain([sample], reads)) else None
    )


def suspicions(params: Tensors) -> list[str]:
    """Return notes about matrices that are zero, or equal to another matrix.

    Vectors are left out, because norms and biases are often constant.
    """
    matrices = {name: tensor for name, tensor in params.items() if len(tensor.shape) > 1}
    zeros = [name for name, tensor in matrices.items() if constant(tensor) == 0]
    notes = [f"all values are zero: {summarize_names(zeros)}"] if zeros else []
    for name in zeros:
        del matrices[name]
    copies = list(ValueIndex(matrices).repeated())
    if copies:
        pairs = summarize_names(f"{name} of {original}" for name, original in copies)
        notes.append(f"exact copies of other matrices: {pairs}")
    reason = "Check how they were written, unless they were initialised in this way"
    return [f"{note}. {reason}" for note in notes]


def _key(tensor: LazyTensor) -> tuple[tuple[int, ...], bytes]:
    return tensor.shape, _sample(tensor).astype(np.float32).tobytes()


def _sample(tensor: LazyTensor) -> np.ndarray:
    """Return consecutive values from the middle, as first rows may belong to padding."""
    if not tensor.shape or 0 in tensor.shape:
        return tensor.all()
    *outer, last = tensor.shape
    middle = (slice(n // 2, n // 2 + 1) for n in outer)
    return tensor.read((*middle, slice(0, min(last, _SAMPLE))))
