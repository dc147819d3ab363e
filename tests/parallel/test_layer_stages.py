"""Order of layers in stages, and layers that differ between stages."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from jaxforge.checkpoint.relayout import by_layer, by_stage
from jaxforge.parallel.layer_switch import arrays_of_layer, change_if, run_layer
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.stages import Stack
from tests.conftest import tiny_config

DEEPSEEK = ("dense_layers",) * 3 + ("moe_layers",) * 6
LAYERS = Stack(9, 2, 2, DEEPSEEK)  # virtual stages: d d d, m m, m m, m m


def test_each_stack_has_equal_rows_on_all_virtual_stages():
    dense, moe = map(LAYERS.of, LAYERS.stack_names)
    assert dense.rows().reshape(2, 2, 3).tolist() == [[[0, 1, 2], [-1] * 3], [[-1] * 3] * 2]
    assert moe.rows().reshape(2, 2, 2).tolist() == [[[-1, -1], [2, 3]], [[0, 1], [4, 5]]]
    assert not LAYERS.has_equal_stages
    assert not LAYERS.is_checkpoint_order


def test_locations_of_parameters_follow_rows():
    stack, row = (column.reshape(2, 2, 3).tolist() for column in LAYERS.locations())
    assert stack == [[[0, 0, 0], [1, 1, 2]], [[1, 1, 2], [1, 1, 2]]]
    assert row == [[[0, 1, 2], [0, 1, 0]], [[0, 1, 0], [0, 1, 0]]]


@pytest.mark.parametrize("stack", [LAYERS, Stack(9, 3, 1, DEEPSEEK), Stack(9, 1, 1, DEEPSEEK)])
def test_rows_of_stack_follow_its_layers(stack):
    """The rows of auxiliary outputs, and those of parameters, belong to the same layers."""
    by_row = jnp.asarray(stack.rows() + 1.0)  # 0: no layer
    for name, first in (("dense_layers", 1), ("moe_layers", 4)):
        rows = stack.rows_of_stack(name, by_row)
        layers = stack.of(name).rows()
        np.testing.assert_array_equal(rows, np.where(layers < 0, 0, layers + first))


def test_stacks_of_different_stages_are_rearranged_for_checkpoints():
    mesh = make_mesh(tiny_config(distributed={"pp": 2, "dp_shard": 2}), jax.devices()[:4])
    sharding = jax.NamedSharding(mesh, jax.P("pp", "dp_shard"))
    values = {name: np.arange(n * 4.0).reshape(n, 4) for name, n in (
        ("dense_layers", 3), ("moe_layers", 6))}  # fmt: skip
    staged = {
        name: jax.device_put(LAYERS.of(name).stack(jnp.asarray(value)), sharding)
        for name, value in values.items()
    }
    saved = by_layer({"params": staged}, LAYERS)["params"]
    jax.tree.map(np.testing.assert_array_equal, saved, values)
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), staged)
    restored = by_stage(saved, LAYERS, like)
    jax.tree.map(np.testing.assert_array_equal, restored, staged)
    assert restored["moe_layers"].sharding == sharding


def test_devices_run_different_layers():
    """Device 0 doubles, device 1 shifts and reduces over `tp`, device 2 has no layer."""
    kinds = (AxisType.Auto,) * 2
    mesh = jax.make_mesh((3, 2), ("pp", "tp"), axis_types=kinds, devices=jax.devices()[:6])
    wide, narrow = jnp.zeros((2, 3)), jnp.zeros(2)

    def double(x):
        return 2 * x, ([wide + 1, narrow + 2], jnp.float32(5))

    def shift(x):
        return jax.lax.psum(x, "tp") + 1, ([narrow + 3, narrow + 4], jnp.float32(6))

    def run(x, total):
        index = jax.lax.axis_index("pp")
        layers = [functools.partial(double, x), functools.partial(shift, x)]
        y, (shared, out) = run_layer(index, layers, x, frozenset({"pp", "tp"}))
        assert [array.shape for array in shared] == [(2, 3), (2,), (2,)]
        first, second = arrays_of_layer(shared, [narrow, narrow])
        total = change_if(index == 1, lambda total: total + first + 10 * second, total)
        return y, total, out[None]

    split, wholly = jax.P(("pp", "tp")), jax.P("pp")
    y, total, out = jax.jit(
        jax.shard_map(
            run, mesh=mesh, in_specs=(split, wholly), out_specs=(split, wholly, split),
            check_vma=False,
        )
    )(jnp.arange(6.0), jnp.ones(6))  # fmt: skip
    assert y.tolist() == [0, 2, 6, 6, 4, 5]
    assert total.tolist() == [1, 1, 44, 44, 1, 1]
    assert out.tolist() == [5, 5, 6, 6, 0, 0]
