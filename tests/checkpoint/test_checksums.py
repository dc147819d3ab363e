"""Checksums of saved arrays: equal on hosts and devices, and computed in the background."""

import concurrent.futures
import json
import sys
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxforge.checkpoint import checksums, layout
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.kernels.hashing import block_checksum
from jaxforge.state.checksum import checksum
from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from tests.helpers import setup
from tests.machine import PATIENCE
from torch_compat.formats.lazy import blocks, first_position

SPECS = [P(), P("a"), P(None, "a"), P("b", "a"), P(("a", "b")), P(None, None, "b")]


@pytest.mark.parametrize("shape", [(), (5,), (8, 16), (16, 8, 4), (4, 2048, 6), (8, 4, 4100)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
def test_host_checksum_equals_device_checksum_on_any_mesh(shape, dtype):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x = np.random.default_rng(0).integers(0, 200, shape).astype(jnp.dtype(dtype))
    whole = int(jax.jit(checksum)(x))
    for spec in SPECS:
        sharding = NamedSharding(mesh, spec)
        try:
            array = jax.device_put(x, sharding)
        except ValueError:  # too few dimensions, or not divisible
            assert spec != P()
            continue
        assert checksums.host_checksum(array) == whole, spec


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32", "uint8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (40_000,), (3, 4, 700), (2, 3, 16, 500)])
def test_block_checksums_sum_to_array_checksum(shape, dtype):
    x = np.random.default_rng(0).integers(0, 200, shape).astype(jnp.dtype(dtype))
    whole = int(checksum(jnp.asarray(x)))
    for limit in (1, 3000, 1 << 30):
        parts = blocks(shape, x.itemsize, limit)
        assert sum(block_checksum(x[i], first_position(i, shape)) for i in parts) % 2**32 == whole


def test_block_checksum_wraps_positions_at_32_bits():
    x = np.ones(3, np.float32)
    assert block_checksum(x, 2**32 - 1) == sum(
        block_checksum(x[:1], location) for location in (2**32 - 1, 0, 1)
    ) % 2**32  # fmt: skip


def test_device_hashes_equal_host_hashes(monkeypatch):
    program = setup(tiny_config(distributed={"dp_shard": 2, "tp": 2}))
    tree = layout.to_tree(program.state())
    of_host = checksums.begin(tree)()
    monkeypatch.setattr(checksums, "is_on_this_host", lambda leaf: False)
    assert checksums.begin(tree)() == of_host


def test_save_hashes_donated_state_in_background(tmp_path, monkeypatch):
    """Hashes are of the saved values even if the next update runs first."""
    may_hash, compute = threading.Event(), checksums.host_checksum

    def hash_later(*args):
        assert may_hash.wait(PATIENCE)
        return compute(*args)

    monkeypatch.setattr(checksums, "host_checksum", hash_later)
    program = setup(tiny_config())
    state = program.state()
    tree = layout.to_tree(state)
    want = {
        jax.tree_util.keystr(path, simple=True, separator="."): int(checksum(leaf))
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    saved = Checkpoints(tmp_path, program.config.checkpoint, program.model.axes)
    path = saved.save(Progress(step=0), state)
    jax.block_until_ready(jax.jit(_changed, donate_argnums=0)(state))
    assert not path.exists()
    may_hash.set()
    saved.wait()
    assert json.loads((path / "checksums" / "metadata").read_text()) == want
    with jax.set_mesh(program.mesh):
        starting_state(program, saved)
    saved.close()


def _changed(tree):
    return jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree)


def test_failed_hash_fails_save(tmp_path, monkeypatch):
    def fail(*args):
        raise OSError("no memory for it")

    monkeypatch.setattr(checksums, "host_checksum", fail)
    program = setup(tiny_config())
    saved = Checkpoints(tmp_path, program.config.checkpoint, program.model.axes)
    saved.save(Progress(step=1), program.state())
    with pytest.raises(Exception, match="no memory for it"):
        saved.wait()
    assert saved.latest() is None


def test_duplicate_shard_counts_once():
    array = jax.device_put(np.arange(12, dtype=np.float32).reshape(3, 4), jax.devices()[0])
    twice = types.SimpleNamespace(
        shape=array.shape, addressable_shards=[*array.addressable_shards] * 2
    )
    assert checksums.host_checksum(twice) == checksums.host_checksum(array)


def test_threads_see_all_shards_of_hashed_arrays():
    """A hash and a second reader of the shards, such as Orbax, are in different threads."""
    mesh = jax.make_mesh((8,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding, names = NamedSharding(mesh, P("a")), [str(i) for i in range(50)]
    compute = jax.jit(lambda x: {name: x + int(name) for name in names}, out_shardings=sharding)
    start, interval = threading.Barrier(2), sys.getswitchinterval()

    def listed(tree):
        start.wait(PATIENCE)
        return [len(leaf.addressable_shards) for leaf in tree.values()]

    sys.setswitchinterval(1e-6)  # threads take turns within the constructor of a list
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            for _ in range(20):
                tree = compute(jnp.arange(16.0))
                wait = checksums.begin(tree)
                counts = pool.submit(listed, tree)
                start.wait(PATIENCE)
                hashes = wait()
                assert counts.result(PATIENCE) == [8] * len(names)
                assert hashes == {n: int(v) for n, v in checksums._hash(tree).items()}
    finally:
        sys.setswitchinterval(interval)
