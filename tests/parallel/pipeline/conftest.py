"""Pipelined steps, compiled by the dozen."""

import pytest


@pytest.fixture(autouse=True)
def compiled_sooner(loops_over_layers):
    pass
