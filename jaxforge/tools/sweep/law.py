"""Fit of a scaling law, L(N) = E + A N^-α, to the losses of several model sizes.

References: arXiv:2001.08361, arXiv:2203.15556.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_SIZES = 4
"""Fewest sizes for a fit: one more than the parameters, so that its error means something."""

_DELTA = 1e-3  # of Huber's loss, relative to L, as in arXiv:2203.15556
_EXPONENTS = np.geomspace(0.01, 3.0, 40)
_FINER = np.geomspace(0.8, 1.25, 60)  # around the best exponent; their ratio is 1.16
_ROUNDS = 30


class Law(NamedTuple):
    """Fitted scaling law.

    Attributes:
        e: E, the loss of an infinite model.
        a: A, the factor of the power of size.
        alpha: α, the exponent.
        error: mean of |L - L(N)| / L over the sizes.
    """

    e: float
    a: float
    alpha: float
    error: float

    def __call__(self, n: float) -> float:
        """Return the loss of a model with n parameters."""
        return self.e + self.a * n**-self.alpha


def fit(sizes: Sequence[float], losses: Sequence[float]) -> Law | None:
    """Fit the law that minimizes the sum of Huber's loss of relative errors.

    Outliers, such as diverged runs, have little weight. E and A are nonnegative.

    Args:
        sizes: [n] numbers of parameters, > 0.
        losses: [n], > 0.

    Returns:
        The law; None with fewer than `LEAST_SIZES` different sizes.
    """
    # E and A are linear for a fixed exponent: a grid over α, coarse and then fine, with a robust
    # linear fit for each.
    n, y = np.asarray(sizes, float), np.asarray(losses, float)
    if len(set(n.tolist())) < LEAST_SIZES:
        return None
    scale = np.exp(np.mean(np.log(n)))  # sizes relative to their mean keep powers near 1
    _, _, alpha = _best(n / scale, y, _EXPONENTS)
    e, a, alpha = _best(n / scale, y, alpha * _FINER)
    law = Law(e, float(a * scale**alpha), alpha, 0.0)
    errors = [abs(law(size) / loss - 1) for size, loss in zip(n, y, strict=True)]
    return law._replace(error=float(np.mean(errors)))


def next_size(sizes: Sequence[float]) -> float:
    """Extrapolate the sizes by one: the ratio of the two largest sizes continues."""
    *_, before, last = sorted(set(sizes))
    return last * last / before


def _best(n: np.ndarray, y: np.ndarray, exponents: np.ndarray) -> tuple[float, float, float]:
    """Return E, A and α of the best of these exponents."""
    fits = [(*_linear(n**-alpha, y), float(alpha)) for alpha in exponents]
    return min(
        fits, key=lambda candidate: _distance(candidate[0] + candidate[1] * n ** -candidate[2], y)
    )


def _linear(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Fit y = E + A x by iteratively reweighted least squares; return E and A."""
    weights, columns = 1 / y, np.stack([np.ones_like(x), x], axis=1)
    e = a = 0.0
    for _ in range(_ROUNDS):
        (e, a), *_ = np.linalg.lstsq(columns * weights[:, None], y * weights, rcond=None)
        if e < 0:
            e, a = 0.0, float(np.sum(weights**2 * x * y) / np.sum((weights * x) ** 2))
        if a < 0:
            e, a = float(np.average(y, weights=weights**2)), 0.0
        errors = np.abs(e + a * x - y) / y
        weights = np.sqrt(_DELTA / np.maximum(errors, _DELTA)) / y
    return float(e), float(a)


def _distance(fitted: np.ndarray, y: np.ndarray) -> float:
    errors = np.abs(fitted - y) / y
    small = np.minimum(errors, _DELTA)
    return float(np.sum(small * (errors - small / 2)))
