"""Dequantization of jaxforge's 8-bit moments, whose format no other framework has."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.config.train import EIGHT_BIT
from jaxforge.errors import UserError
from torch_compat.checkpoint.state import CheckpointState
from torch_compat.formats.lazy import Index, LazyTensor

_SCALES = "_scales"
_MAX_CODE = {np.dtype(np.int8): 127, np.dtype(np.uint8): 255}


def dequantize_moments(leaves: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return the arrays of a checkpoint, with 8-bit moments as float32 and without scales."""
    arrays = dict(leaves)
    for name, scales in leaves.items():
        section, _, remaining = name.partition(".")
        field, _, parameter = remaining.partition(".")
        if section == "optimizer" and field.endswith(_SCALES):
            moment = f"{section}.{field.removesuffix(_SCALES)}.{parameter}"
            arrays[moment] = _dequantize(leaves[moment], scales)
            del arrays[name]
    return arrays


def check_moment_dtype(checkpoint: CheckpointState, config: JobConfig, where: str) -> None:
    """Check that a run can take float32 moments of a checkpoint.

    Raises:
        UserError: the config asks for 8-bit moments.
    """
    if checkpoint.moments is not None and config.train.opt_state_dtype == EIGHT_BIT:
        raise UserError(
            f'{where}: its moments are float32, but train.opt_state_dtype = "8bit": '
            'change it to "float32", or take the weights alone (--weights-only; in a run, '
            'checkpoint.exclude_from_loading = ["optimizer"])'
        )


def _dequantize(values: LazyTensor, scales: LazyTensor) -> LazyTensor:
    """Dequantize a tensor; see `optim.eight_bit` for the formats."""
    # values [..., rows, columns] int8 (signed) or uint8 (square roots of second moments);
    # scales [..., rows / block, columns]: exponent bits of a float32 power of two per block.
    block = values.shape[-2] // scales.shape[-2]
    step = np.float32(1 / _MAX_CODE[values.dtype])

    def read(index: Index) -> np.ndarray:
        *outer, rows, columns = index
        first = rows.start // block
        scale_rows = slice(first, -(-rows.stop // block))
        exponents = scales.read((*outer, scale_rows, columns)).astype(np.uint32)
        in_blocks = slice(rows.start - first * block, rows.stop - first * block)
        # Bits 23 to 30 of a float32 are its exponent: the shifted value is a power of two.
        powers = np.repeat((exponents << 23).view(np.float32), block, axis=-2)[..., in_blocks, :]
        q = values.read(index).astype(np.float32) * step
        x = q * np.abs(q) * powers
        return x if values.dtype == np.int8 else np.square(x)

    return dataclasses.replace(values, dtype=np.dtype(np.float32), read=read)
