"""Moments of jaxforge's in eight bits, read as float32: no other framework has their format."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.train import EIGHT_BIT
from jaxforge.errors import UserError
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.formats.lazy import Index, LazyTensor

_SCALES = "_scales"
_TOPS = {np.dtype(np.int8): 127, np.dtype(np.uint8): 255}


def dequantize_moments(leaves: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """The arrays of a checkpoint, moments with scales as the numbers that they stand for."""
    wide = dict(leaves)
    for name, scales in leaves.items():
        section, _, remaining = name.partition(".")
        field, _, parameter = remaining.partition(".")
        if section == "optimizer" and field.endswith(_SCALES):
            whose = f"{section}.{field.removesuffix(_SCALES)}.{parameter}"
            wide[whose] = _unpacked(leaves[whose], scales)
            del wide[name]
    return wide


def check_moment_dtype(checkpoint: CheckpointState, config: JobConfig, where: str) -> None:
    """Looks whether a run can take moments as others have them.

    Raises:
        UserError: it would have them in eight bits.
    """
    if checkpoint.moments is not None and config.train.opt_state_dtype == EIGHT_BIT:
        raise UserError(
            f'{where}: its moments are wide, and train.opt_state_dtype = "8bit" would have others: '
            'change it to "float32", or take the weights alone (--weights-only; in a run, '
            'checkpoint.exclude_from_loading = ["optimizer"])'
        )


def _unpacked(values: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Formats and names: `optim.eight_bit`."""
    block = values.shape[-2] // scales.shape[-2]
    top = np.float32(1 / _TOPS[values.dtype])

    def read(index: Index) -> np.ndarray:
        *outer, rows, columns = index
        first = rows.start // block
        of_rows = slice(first, -(-rows.stop // block))
        exponents = scales.read((*outer, of_rows, columns)).astype(np.uint32)
        own = slice(rows.start - first * block, rows.stop - first * block)
        powers = np.repeat((exponents << 23).view(np.float32), block, axis=-2)[..., own, :]
        q = values.read(index).astype(np.float32) * top
        x = q * np.abs(q) * powers
        return x if values.dtype == np.int8 else np.square(x)

    return dataclasses.replace(values, dtype=np.dtype(np.float32), read=read)
