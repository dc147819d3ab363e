"""Fewer points that look the same: what a long run's curve is made of on the page.

Deterministic: the same run gives the same page.
"""

import numpy as np

BUCKETS = 800  # more columns of pixels than a chart has on most screens
MEDIANS = 300  # positions of a moving median; it is smooth, so straight lines lie between them


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
    kept = {0, len(x) - 1}
    for part in split(x, buckets):
        good = part[np.isfinite(y[part])]
        kept |= {good[np.argmin(y[good])], good[np.argmax(y[good])]} if good.size else {part[0]}
    return np.array(sorted(kept))


def split(x: np.ndarray, buckets: int) -> list[np.ndarray]:
    """Indices of x by bucket, those that are not empty."""
    if not len(x):
        return []
    edges = np.linspace(x[0], x[-1], buckets + 1)[1:-1]
    parts = np.split(np.arange(len(x)), np.searchsorted(x, edges))
    return [part for part in parts if part.size]


def moving_median(
    x: np.ndarray, y: np.ndarray, positions: int = MEDIANS
) -> tuple[np.ndarray, np.ndarray, int]:
    """The median of the points around each of some positions.

    Unlike a mean it does not see spikes. Windows shrink towards the start, where curves are steep,
    and lose their later half towards the end. Points that are not finite are left out.

    Args:
        x: [n], increasing.
        y: [n].
        positions: most of them; straight lines lie between.

    Returns:
        x and median at each position, and the points in a window.
    """
    half = len(x) // 100
    centres = np.unique(np.linspace(0, len(x) - 1, positions).round().astype(int))
    medians = [_median(y[i - min(half, i) : i + min(half, i) + 1]) for i in centres]
    return x[centres], np.array(medians), 2 * half + 1


def _median(window: np.ndarray) -> float:
    finite = window[np.isfinite(window)]
    return float(np.median(finite)) if finite.size else np.nan
