"""Downsampling of long curves that keeps their appearance.

It is deterministic: the same run gives the same page.
"""

import numpy as np
from numpy.typing import ArrayLike

BUCKETS = 1000  # about the number of pixel columns of a chart on most screens
_ENOUGH = 64  # points of a bucket that enter its median


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> np.ndarray:
    """Return indices of the points to draw: the lowest and the highest of each bucket along x.

    No spike is lost. A bucket without finite values keeps one point, which is a gap in the curve.
    Short curves keep all points.

    Args:
        x: [n], increasing.
        y: [n].
        buckets: number of intervals of equal width into which the range of x is split.
    """
    if len(x) <= 2 * buckets:
        return np.arange(len(x))
    starts, _ = _split(x, buckets)
    ends: list[ArrayLike] = [[0], _lowest(y, starts), _lowest(-y, starts), [len(x) - 1]]
    return np.unique(np.concatenate(ends))


def bucket_medians(
    x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of the median of each bucket's finite points, for a smooth curve.

    Unlike a mean, a median ignores spikes. Large buckets are subsampled. Buckets without finite
    values are left out.

    Args:
        x: [n], increasing.
        y: [n].
        buckets: number of buckets, as in `thin`.
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
    """Return the first index, and one past the last index, of each nonempty bucket."""
    edges = np.linspace(x[0], x[-1], buckets + 1)[1:-1]
    starts = np.unique(np.concatenate([[0], np.searchsorted(x, edges)]))
    starts = starts[starts < len(x)]
    return starts, np.append(starts[1:], len(x))


def _lowest(y: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the index of the lowest value of each bucket; of its first if none is finite."""
    ends = np.append(starts[1:], len(y))
    values = np.where(np.isfinite(y), y, np.inf)
    lowest = np.repeat(np.minimum.reduceat(values, starts), ends - starts)
    hits = np.flatnonzero(values == lowest)
    return hits[np.searchsorted(hits, starts)]
