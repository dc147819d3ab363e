"""Making the mesh."""

import jax
import pytest

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.parallel.mesh import make_mesh


def test_axes_that_do_not_fit_a_torus_are_the_users_mistake(monkeypatch):
    def refuse(*_, **__):
        raise NotImplementedError("Failed to find assignment for logical_axis_index 2 of size 4")

    monkeypatch.setattr(jax, "make_mesh", refuse)  # what it does for some shapes of v5p and v6e
    config = JobConfig.model_validate({"distributed": {"dp_shard": 4, "tp": 2}})
    with pytest.raises(UserError, match=r"dp_shard = 4, tp = 2 does not fit .* of size 4; choose"):
        make_mesh(config)
