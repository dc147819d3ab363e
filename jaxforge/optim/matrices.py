"""Shapes of parameters as matrices per layer and expert."""

import math
from typing import TypeVar

from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.parallel.sharding import Axes

Size = TypeVar("Size", int, float)


def rows_shape(shape: tuple[int, ...], axes: Axes) -> tuple[int, ...]:
    """Return the first dimensions of a parameter, up to the rows of its matrices."""
    rows = next(i for i, axis in enumerate(axes) if axis not in (LAYERS, EXPERTS))
    return shape[: rows + 1]


def matrix_shape(shape: tuple[Size, ...], axes: Axes) -> tuple[Size, Size]:
    """Return rows and columns per layer or expert; all dimensions but the first are columns."""
    sizes = zip(shape, axes, strict=True)
    rows, *columns = (size for size, axis in sizes if axis not in (LAYERS, EXPERTS))
    return rows, math.prod(columns)
