"""Fewer points that look the same: what a long run's curve is made of on the page.

Deterministic: the same run gives the same page.
"""

import numpy as np
from numpy.typing import ArrayLike

BUCKETS = 1000  # about the columns of pixels that a chart has on most screens
_ENOUGH = 64  # points of a bucket that a median is taken of


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Indices of the points to draw: the lowest and the highest of each bucket along x.

    So no spike is lost. A bucket with nothing finite keeps one point: a gap in the curve. Short
    curves are kept whole.

    Args:
        x: [n], increasing.
        y: [n].
        buckets: parts of equal width that the range of x is cut into.
    """
    if len(x) <= 2 * buckets:
        return np.arange(len(x))
    starts, _ = _split(x, buckets)
    ends: list[ArrayLike] = [[0], _lowest(y, starts), _lowest(-y, starts), [len(x) - 1]]
    return np.unique(np.concatenate(ends))


def bucket_medians(
    x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS
) -> tuple[np.ndarray, np.ndarray]:
    """The median of each bucket's finite points, and where it lies: what a smooth curve follows.

    Unlike a mean it does not see spikes. Of full buckets some points are enough. Buckets with
    nothing finite are left out.

    Args:
        x: [n], increasing.
        y: [n].
        buckets: as of `thin`.
    """
    finite = np.flatnonzero(np.isfinite(y))
    some = finite[:: max(1, len(finite) // (buckets * _ENOUGH))]
    x, y = x[some], y[some]
    if not len(x):
        return x, y
    starts, ends = _split(x, buckets)
    numbers = np.repeat(np.arange(len(starts)), ends - starts)
    in_order = y[np.lexsort((y, numbers))]
    low, high = starts + (ends - starts - 1) // 2, starts + (ends - starts) // 2
    return (x[starts] + x[ends - 1]) / 2, (in_order[low] + in_order[high]) / 2


def _split(x: np.ndarray, buckets: int) -> tuple[np.ndarray, np.ndarray]:
    """First and one past the last index of each bucket that is not empty."""
    edges = np.linspace(x[0], x[-1], buckets + 1)[1:-1]
    starts = np.unique(np.concatenate([[0], np.searchsorted(x, edges)]))
    starts = starts[starts < len(x)]
    return starts, np.append(starts[1:], len(x))


def _lowest(y: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Index of the lowest of each part; of its first point where none is finite."""
    ends = np.append(starts[1:], len(y))
    values = np.where(np.isfinite(y), y, np.inf)
    lowest = np.repeat(np.minimum.reduceat(values, starts), ends - starts)
    hits = np.flatnonzero(values == lowest)
    return hits[np.searchsorted(hits, starts)]
