"""Detection of replicas of parameters that differ."""

import dataclasses
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxforge.exit_codes import Exit
from jaxforge.state.checksum import checksum
from jaxforge.training.callbacks.weight_hash import WeightHashes, make_hasher
from tests.training.callbacks.contexts import after

SPECS = {
    "embedding": {"weight": PartitionSpec(None, "tp")},  # four replicas of each half
    "norm": {"weight": PartitionSpec()},  # eight replicas
    "head": {"weight": PartitionSpec(("dp", "tp"))},  # one replica of each eighth
}


@dataclasses.dataclass
class State:
    params: dict


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("dp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.fixture(scope="module")
def check(mesh):
    return WeightHashes(10, mesh)


@pytest.fixture
def params(mesh):
    rng = np.random.default_rng(0)
    values = {
        "embedding": {"weight": rng.standard_normal((8, 6)).astype(np.float32)},
        "norm": {"weight": np.array([1, np.nan, -0.0, np.inf, 1e-40, 3], jnp.bfloat16)},
        "head": {"weight": np.zeros((16, 2), np.float32)},
    }
    return jax.tree.map(lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec)), values, SPECS)


def with_copy_changed(array, device, change):
    """Return the array with changed bits on one device."""
    shards = []
    for shard in array.addressable_shards:
        data = np.array(shard.data)
        if shard.device == device:
            change(data)
        shards.append(jax.device_put(data, shard.device))
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, shards)


def flip_lowest_bit(data):
    data.view(np.uint8)[0] ^= 1


def swap_first_two(data):
    data[:2] = data[[1, 0]]


def test_equal_replicas_match(check, params, messages):
    with messages.at_level(logging.INFO, "jaxforge"):
        assert check.on_interval(after(20, State(params))) is None
    assert ">>> Weight hashes match after 20 iterations..." in messages.messages


@pytest.mark.parametrize("change", [flip_lowest_bit, swap_first_two])
@pytest.mark.parametrize("name", ["embedding", "norm"])
def test_differing_replica_is_named_with_its_device(check, mesh, params, messages, name, change):
    device = mesh.devices[2, 1]
    params[name]["weight"] = with_copy_changed(params[name]["weight"], device, change)
    assert check.on_interval(after(30, State(params))) is Exit.UNHEALTHY
    [message] = {m for m in messages.messages if "not matching" in m}
    assert message == (
        f"Parameter hashes not matching across DP replicas: at step 30, {device} (process 0) "
        f"differs from the others in 1 parameters: {name}.weight"
    )


def test_shards_without_replicas_are_not_compared(check, mesh, params):
    head = params["head"]["weight"]
    params["head"]["weight"] = with_copy_changed(head, mesh.devices[0, 1], flip_lowest_bit)
    assert check.on_interval(after(40, State(params))) is None


def test_each_device_hashes_its_own_shard(mesh, params):
    params["norm"]["weight"] = with_copy_changed(
        params["norm"]["weight"], mesh.devices[3, 0], flip_lowest_bit
    )
    table = np.asarray(make_hasher(params, mesh)(params))
    assert table.shape == (8, 3)
    expected = [
        [int(checksum(jnp.asarray(np.array(shard.data)))) for shard in leaf.addressable_shards]
        for leaf in (params["embedding"]["weight"], params["norm"]["weight"])
    ]
    assert table[:, [0, 2]].T.tolist() == expected  # the keys of dicts are sorted


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checksum_depends_on_every_element_and_position(dtype):
    x = np.arange(24).reshape(2, 3, 4).astype(jnp.dtype(dtype))
    x[0, 0] = 7
    seen = {int(checksum(jnp.asarray(x)))}
    for location in np.ndindex(x.shape):
        changed = x.copy()
        changed[location] += 1
        seen.add(int(checksum(jnp.asarray(changed))))
    seen.add(int(checksum(jnp.asarray(x[::-1]))))
    assert len(seen) == 1 + x.size + 1
