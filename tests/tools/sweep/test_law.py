"""Scaling-law fits: recovery of known laws, and robustness to outliers."""

import numpy as np
import pytest

from jaxforge.tools.sweep.results import fit, next_size

SIZES = np.array([1e6, 3e6, 1e7, 3e7, 1e8, 3e8])
LOSSES = 1.7 + 400 * SIZES**-0.34


def test_fit_recovers_known_law():
    law = fit(SIZES, LOSSES)
    assert law.alpha == pytest.approx(0.34, rel=0.02)
    assert law.e == pytest.approx(1.7, rel=0.01)
    assert law(1e9) == pytest.approx(1.7 + 400 * 1e9**-0.34, rel=1e-3)
    assert law.error < 1e-3


def test_fit_is_robust_to_an_outlier():
    bent = LOSSES * np.where(SIZES == 1e7, 1.3, 1.0)
    plain = fit(SIZES, LOSSES)
    assert fit(SIZES, bent)(1e9) == pytest.approx(plain(1e9), rel=0.02)
    assert fit(SIZES, bent).error > 0.03


def test_fit_of_constant_losses_is_constant():
    law = fit(SIZES, np.full(6, 3.0))
    assert law(1e9) == pytest.approx(3.0)
    assert law.e >= 0
    assert law.a >= 0


def test_fit_requires_four_different_sizes():
    assert fit(SIZES[:3], LOSSES[:3]) is None
    assert fit(np.repeat(SIZES[:3], 2), np.repeat(LOSSES[:3], 2)) is None


def test_next_size_continues_last_ratio():
    assert next_size([1e6, 4e6, 2e6]) == 8e6
