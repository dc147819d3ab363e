"""Matrices of 8-bit numbers with a float32 scale per block, as in DeepSeek-V3's files.

A weight W of [rows, columns] is stored as Q in e4m3 with one scale per block of 128 x 128:

    NAME.weight             Q [rows, columns]
    NAME.weight_scale_inv   S [ceil(rows / 128), ceil(columns / 128)]
    W[i, j] = Q[i, j] · S[i // 128, j // 128]

Blocks at the edges are smaller. Scales are floats, or powers of two in one byte: e8m0, which some
files call U8. The scale of a block is its largest absolute value over 448, the largest number of
e4m3 (DeepSeek-V3, arXiv:2412.19437, section 3.3.2). Both directions are lazy: a part of a tensor is
computed when it is read.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from jaxforge.errors import UserError
from torch_compat.formats.lazy import DTYPES, Index, LazyTensor, relative_to

BLOCK = (128, 128)
"""Rows and columns of a block that are written."""
SCALE = "_scale_inv"
"""Suffix that a weight's name has in the name of its scales."""
_FP8, _BF16, _F32 = (DTYPES[name] for name in ("float8_e4m3fn", "bfloat16", "float32"))
_E8M0 = DTYPES["float8_e8m0fnu"]
_FLOATS = {*(DTYPES[name] for name in ("float32", "bfloat16", "float16")), _E8M0}
_LARGEST = 448.0  # of e4m3
_NUMBERS = np.arange(256, dtype=np.uint8).view(_FP8).astype(np.float32)
"""Value of each of the 256 numbers of e4m3."""

Block = tuple[int, int]


def quantization_config(block: Block = BLOCK) -> dict[str, Any]:
    """Return the `quantization_config` of a `config.json` of such files."""
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(block),
    }


def dequantize(
    tensors: Mapping[str, LazyTensor], block: Block, where: str
) -> dict[str, LazyTensor]:
    """Return the tensors with products of 8-bit weights and scales, in bfloat16.

    Args:
        tensors: tensors of a checkpoint by name, with the scales.
        block: rows and columns of a block.
        where: path of the checkpoint, for messages.

    Raises:
        UserError: a weight has no scales or scales of another shape or dtype, or scales have no
            weight. Reading raises it if a scale is not finite.
    """
    result = {}
    for name, tensor in tensors.items():
        if tensor.dtype == _FP8:
            result[name] = _dequantized(name, tensor, tensors.get(name + SCALE), block, where)
        elif not name.endswith(SCALE):
            result[name] = tensor
        elif (weight := tensors.get(name.removesuffix(SCALE))) is None or weight.dtype != _FP8:
            raise UserError(f"{where}: {name} are scales of no 8-bit weight")
    return result


def quantize(tensors: Mapping[str, LazyTensor], names: Collection[str]) -> dict[str, LazyTensor]:
    """Return the tensors with matrices of these names in 8 bits, each followed by its scales.

    Values are rounded to nearest, relative to the scale of their block. Other tensors are the same.
    """
    result: dict[str, LazyTensor] = {}
    for name, tensor in tensors.items():
        if name in names:
            result[name], result[name + SCALE] = _quantized(tensor, BLOCK)
        else:
            result[name] = tensor
    return result


def _dequantized(
    name: str, weight: LazyTensor, scales: LazyTensor | None, block: Block, where: str
) -> LazyTensor:
    if scales is None:
        raise UserError(f"{where}: {name} is in 8 bits, but {name}{SCALE} does not exist")
    expected = _number_of_blocks(weight.shape, block) if len(weight.shape) == 2 else None
    if scales.shape != expected:
        raise UserError(
            f"{where}: {name}{SCALE} is {list(scales.shape)}, but {name} of {list(weight.shape)} "
            + (f"has {list(expected)} blocks of {list(block)}" if expected else "is not a matrix")
        )

    # Files that declare e8m0 as U8 store the same bytes, so that a view suffices.
    is_e8m0 = scales.dtype == DTYPES["uint8"]
    if scales.dtype not in _FLOATS and not is_e8m0:
        raise UserError(
            f"{where}: {name}{SCALE} is in {scales.dtype.name}. Scales must be in float32, "
            "bfloat16, float16 or e8m0"
        )

    def read(index: Index) -> np.ndarray:
        stored = scales.read(_blocks_of(index, block))
        factors = (stored.view(_E8M0) if is_e8m0 else stored).astype(np.float32)
        if not np.isfinite(factors).all():
            raise UserError(f"{where}: {name}{SCALE} has a scale that is not finite")
        values = _NUMBERS[weight.read(index).view(np.uint8)]  # half the time of a cast
        _scale(np.multiply, values, factors, index, block)
        return values.astype(_BF16)

    return dataclasses.replace(weight, dtype=_BF16, read=read)


def _quantized(weight: LazyTensor, block: Block) -> tuple[LazyTensor, LazyTensor]:
    """Return the 8-bit numbers and the scales of a matrix."""

    def read_values(index: Index) -> np.ndarray:
        blocks = _blocks_of(index, block)
        # A scale depends on all elements of its block: a part of a block needs the whole.
        values, scales = _read_blocks(weight, blocks, block)
        inside = relative_to(index, [part.start * n for part, n in zip(blocks, block, strict=True)])
        relative = values[inside]
        _scale(np.divide, relative, scales, index, block)
        # e4m3fn has no infinity: a quotient beyond its range would become NaN.
        return np.clip(relative, -_LARGEST, _LARGEST, out=relative).astype(_FP8)

    def read_scales(index: Index) -> np.ndarray:
        rows, columns = index
        # One row of blocks at a time: all elements of the matrix would not fit into memory.
        parts = [
            _read_blocks(weight, (slice(row, row + 1), columns), block)[1]
            for row in range(rows.start, rows.stop)
        ]
        return np.concatenate(parts or [np.empty((0, columns.stop - columns.start), np.float32)])

    shape = _number_of_blocks(weight.shape, block)
    scales = LazyTensor(shape, _F32, read_scales, weight.source)
    return dataclasses.replace(weight, dtype=_FP8, read=read_values), scales


def _read_blocks(weight: LazyTensor, blocks: Index, block: Block) -> tuple[np.ndarray, np.ndarray]:
    """Read whole blocks in float32, and return their elements and their scales.

    Raises:
        UserError: a value is not finite.
    """
    index = tuple(
        slice(part.start * n, min(part.stop * n, size))
        for part, n, size in zip(blocks, block, weight.shape, strict=True)
    )
    values: np.ndarray = weight.read(index).astype(np.float32)
    largest = np.abs(values)
    # The last block of an axis may be smaller, which `reduceat` allows.
    for axis, n in enumerate(block):
        largest = np.maximum.reduceat(largest, np.arange(0, values.shape[axis], n), axis=axis)
    if not np.isfinite(largest).all():
        raise UserError(f"{weight.source}: values that are not finite cannot be scaled to 8 bits")
    # A block of zeros has the scale 1, since 0 / 0 is NaN.
    return values, np.where(largest == 0, 1.0, largest / _LARGEST).astype(np.float32)


def _number_of_blocks(shape: tuple[int, ...], block: Block) -> tuple[int, int]:
    rows, columns = (-(-size // n) for size, n in zip(shape, block, strict=True))
    return rows, columns


def _blocks_of(index: Index, block: Block) -> Index:
    """Return the index of the blocks that have elements of an index."""
    return tuple(
        slice(part.start // n, -(-part.stop // n)) for part, n in zip(index, block, strict=True)
    )


def _scale(
    operation: np.ufunc, values: np.ndarray, factors: np.ndarray, index: Index, block: Block
) -> None:
    """Apply an operation in place to the elements of an index and the factors of their blocks."""
    rows, columns = index
    block_of_column = np.arange(columns.start, columns.stop) // block[1]
    block_of_column -= columns.start // block[1]
    first = rows.start // block[0]
    for row, of_blocks in enumerate(factors, start=first):
        # The rows of the index in one row of blocks, which share the factors of their columns.
        start, stop = max(row * block[0], rows.start), min((row + 1) * block[0], rows.stop)
        part = values[start - rows.start : stop - rows.start]
        operation(part, of_blocks[block_of_column], out=part)
