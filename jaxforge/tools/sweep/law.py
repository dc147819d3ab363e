"""L(N) = E + A N^-α through the losses of several sizes (arXiv:2001.08361, arXiv:2203.15556)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

LEAST_SIZES = 4
"""Sizes that a law of three numbers takes, one of which tells whether it holds."""

_DELTA = 1e-3  # Huber's, relative to the loss, as in arXiv:2203.15556
_EXPONENTS = np.geomspace(0.01, 3.0, 40)
_FINER = np.geomspace(0.8, 1.25, 60)  # of the best of these, which are 1.16 apart
_ROUNDS = 30


class Law(NamedTuple):
    """Fitted scaling law.

    Attributes:
        e: the loss of an infinite model.
        a: factor of what size takes away.
        alpha: exponent.
        error: the mean of |L - L(N)| / L over the sizes.
    """

    e: float
    a: float
    alpha: float
    error: float

    def __call__(self, n: float) -> float:
        """The loss of a model of n parameters."""
        return self.e + self.a * n**-self.alpha


def fit(sizes: Sequence[float], losses: Sequence[float]) -> Law | None:
    """The law that is nearest to the losses in the sum of Huber's loss of relative errors.

    A point far off, of a run that diverged, counts hardly. E and A are not negative.

    Args:
        sizes: [n] parameters, > 0.
        losses: [n], > 0.

    Returns:
        None of fewer than `LEAST_SIZES` different sizes.
    """
    n, y = np.asarray(sizes, float), np.asarray(losses, float)
    if len(set(n.tolist())) < LEAST_SIZES:
        return None
    scale = np.exp(np.mean(np.log(n)))  # powers of a number near 1
    _, _, alpha = _best(n / scale, y, _EXPONENTS)
    e, a, alpha = _best(n / scale, y, alpha * _FINER)
    law = Law(e, float(a * scale**alpha), alpha, 0.0)
    errors = [abs(law(size) / loss - 1) for size, loss in zip(n, y, strict=True)]
    return law._replace(error=float(np.mean(errors)))


def next_size(sizes: Sequence[float]) -> float:
    """The size after the largest, as much larger as that is than the one before."""
    *_, before, last = sorted(set(sizes))
    return last * last / before


def _best(n: np.ndarray, y: np.ndarray, exponents: np.ndarray) -> tuple[float, float, float]:
    """E, A and α with one of these exponents."""
    fits = [(*_linear(n**-alpha, y), float(alpha)) for alpha in exponents]
    return min(
        fits, key=lambda candidate: _distance(candidate[0] + candidate[1] * n ** -candidate[2], y)
    )


def _linear(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """E and A of y = E + A x, by least squares that are weighted anew each round."""
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
