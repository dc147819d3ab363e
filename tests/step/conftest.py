"""Fixtures for tests that compile many steps of small models."""

import pytest


@pytest.fixture(autouse=True)
def fast_compilation(loops_over_layers):
    pass
