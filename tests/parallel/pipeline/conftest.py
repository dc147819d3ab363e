"""Faster compilation of the many pipelined steps."""

import pytest


@pytest.fixture(autouse=True)
def compiled_sooner(loops_over_layers):
    pass
