"""Sharding rules: mesh axes of logical axes, divisibility, and constraints."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxforge.config.axes import AXES
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model
from jaxforge.parallel.mesh import data_parallel_size, make_mesh
from jaxforge.parallel.sharding import RULES, constrain, param_shardings, partition_spec
from tests.conftest import tiny_config


def mesh_of(**distributed):
    return make_mesh(tiny_config(distributed={"dp_shard": 1, **distributed}))


def test_every_rule_names_mesh_axes():
    for rule in RULES.values():
        axes = (rule,) if isinstance(rule, str) else rule or ()
        assert set(axes) <= set(AXES)


def test_mesh_axes_are_in_order():
    mesh = mesh_of(dp_replicate=2, dp_shard=-1, tp=2)
    assert tuple(mesh.axis_names) == AXES
    assert data_parallel_size(mesh) == 4
    assert mesh.devices.reshape(4, 2)[0].tolist() == jax.devices()[:2]  # tp: neighbours


@pytest.mark.parametrize(
    ("model", "distributed", "message"),
    [
        (
            {"dim": 36, "n_heads": 2, "n_kv_heads": 1},
            {"dp_shard": 8},
            r"k_proj\.weight: dimension 2 \(embed, size 36\) does not divide by dp_shard = 8\. "
            r"Change model\.dim or distributed\.dp_shard",
        ),
        (
            {"dim": 36, "n_heads": 2, "n_kv_heads": 1},
            {"tp": 8},
            r"k_proj\.weight: dimension 1 \(kv_heads, size 18\).*tp = 8\. Change model\.n_kv_heads",
        ),
    ],
)
def test_indivisible_dimension_raises(model, distributed, message):
    model = build_model(tiny_config(model=model))
    with pytest.raises(UserError, match=message):
        param_shardings(model.abstract, model.axes, mesh_of(**distributed))


def test_constrain_without_mesh_is_identity():
    x = jnp.ones((2, 4, 8))
    assert constrain(x, "batch", "seq", None) is x


def test_constrain_ignores_manual_axes():
    mesh = mesh_of(dp_shard=4, tp=2)
    with jax.set_mesh(mesh):
        y = jax.jit(lambda x: constrain(x, "batch", "seq", None))(jnp.ones((4, 4, 8)))
        assert y.sharding.shard_shape(y.shape) == (1, 2, 8)

        def constrain_local(x):
            assert x.shape == (1, 4, 8)
            return constrain(x, "batch", "seq", None)

        spec = P(("dp_replicate", "dp_shard"))
        manual = jax.shard_map(constrain_local, mesh=mesh, in_specs=spec, out_specs=spec,
                               axis_names={"dp_replicate", "dp_shard"})  # fmt: skip
        assert jax.jit(manual)(jnp.ones((4, 4, 8))).shape == (4, 4, 8)


def test_layers_are_split_over_stages():
    assert partition_spec(("layers", "mlp", "embed")) == P("pp", "tp", ("dp_shard", "cp", "ep"))
