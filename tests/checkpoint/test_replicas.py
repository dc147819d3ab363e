"""Replicas of one process: bits, retention, damage, and what a start takes them from."""

import dataclasses
import os
import resource

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.checkpoint.replica.store import Shard, overlap
from jaxforge.checkpoint.restore import starting_state
from jaxforge.errors import UserError
from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from tests.helpers import flip_bit, progress_of, random_batches, setup


def open_replicas(path, program, origin=None):
    """Return the replicas as a new process finds them."""
    section = program.config.checkpoint.model_copy(
        update={"replica_interval": 1, "replica_dir": str(path / "memory")}
    )
    resolved = program.config.model_dump(mode="json")
    return Replicas(section, path / "run", origin, resolved, program.model.stack)


def initial(**distributed):
    program = setup(tiny_config(distributed={"dp_shard": 1, **distributed}))
    return program, program.state()


def saved_steps(path, program, state, *steps):
    """Save replicas of one state under several steps; return their origin."""
    replicas = open_replicas(path, program)
    for step in steps:
        replicas.save(Progress(step=step), state)
    replicas.wait()
    return replicas.origin


def start(path, program, replicas):
    checkpoints = Checkpoints(path / "run", program.config.checkpoint, program.model.axes)
    with jax.set_mesh(program.mesh):
        result = starting_state(program, checkpoints, replicas=replicas.sources)
    checkpoints.close()
    return result


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 3}),  # divides no width
        pytest.param({}, {"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 6}, {"pp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_replica_restores_bits_onto_another_mesh(tmp_path, source, target):
    keys = {"train": {"grad_accum_steps": 2, "batch_size": 4}} if "pp" in target else {}
    program = setup(tiny_config(distributed={"dp_shard": 1, **source}, **keys))
    state, _ = program.run(program.state(), random_batches(program.config, 2))
    progress = dataclasses.replace(progress_of(state), best_metric=1.5)
    expected = jax.device_get(state)
    replicas = open_replicas(tmp_path, program)
    replicas.save(progress, state)
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as the next step does
    replicas.wait()
    assert [*replicas.newly_complete()] == [2]
    other_program = setup(tiny_config(distributed={"dp_shard": 1, **target}, **keys))
    result = open_replicas(tmp_path, other_program, replicas.origin)
    restored, restored_progress = start(tmp_path, other_program, result)
    assert restored_progress == progress
    jax.tree.map(np.testing.assert_array_equal, expected, jax.device_get(restored))
    want = other_program.abstract_state()
    assert jax.tree.map(lambda a: a.sharding, want) == jax.tree.map(lambda a: a.sharding, restored)
    assert result.note_start(2).step == 2


def test_replica_keeps_two_newest_steps(tmp_path):
    program, state = initial()
    origin = saved_steps(tmp_path, program, state, 1, 2, 3)
    assert [source.step for source in open_replicas(tmp_path, program, origin).sources] == [3, 2]


def test_same_step_is_saved_again_only_after_rollback(tmp_path):
    program, state = initial()
    replicas = open_replicas(tmp_path, program)
    rolled_back = Progress(step=1, rollbacks=[{"from": 3, "to": 0, "samples": 1}])
    for progress, names in (
        (Progress(step=1), ["step_1"]), (Progress(step=1), []), (rolled_back, ["step_1"])
    ):  # fmt: skip
        replicas.save(progress, state)
        replicas.wait()
        assert [f"step_{step}" for step in replicas.newly_complete()] == names
        replicas.discard_after(1)
    replicas.discard_after(0)
    assert not [*tmp_path.rglob("0.data")]


def test_start_uses_newest_intact_source(tmp_path, messages):
    """A flipped bit in the newest replica, then in both: the checkpoint is used."""
    program, state = initial()
    saved = Checkpoints(tmp_path / "run", program.config.checkpoint, program.model.axes)
    saved.save(Progress(step=1), state)
    saved.close()
    origin = saved_steps(tmp_path, program, state, 1, 2, 3)
    for damaged, expected in ((3, 2), (2, 1)):
        (data,) = tmp_path.rglob(f"step_{damaged}.*/0.data")
        flip_bit(data)
        replicas = open_replicas(tmp_path, program, origin)
        assert start(tmp_path, program, replicas)[1].step == expected
        assert f"replica of step {damaged} in the memory of the hosts cannot be" in messages.text
        assert "files of process 0 on the host of process 0 (a part of " in messages.text


def test_start_after_older_step_removes_newer_replicas(tmp_path):
    program, state = initial()
    origin = saved_steps(tmp_path, program, state, 1, 2)
    replicas = open_replicas(tmp_path, program, origin)
    assert replicas.note_start(1) is None
    assert [source.step for source in open_replicas(tmp_path, program, origin).sources] == [1]


@pytest.mark.parametrize("name", ["0.json", "0.data"])
def test_damaged_file_makes_replica_absent(tmp_path, name):
    program, state = initial()
    origin = saved_steps(tmp_path, program, state, 1)
    (path,) = tmp_path.rglob(name)
    path.write_bytes(path.read_bytes()[:-1] + b" " * (name == "0.json"))
    assert not open_replicas(tmp_path, program, origin).sources


def test_new_run_ignores_and_removes_replicas_of_old_run(tmp_path):
    program, state = initial()
    origin = saved_steps(tmp_path, program, state, 1)
    assert not open_replicas(tmp_path, program, origin=None).sources
    assert not [path for path in tmp_path.rglob("*") if path.name == origin]


def test_replica_without_memory_is_absent_and_reported(tmp_path, messages):
    program, state = initial()
    replicas = open_replicas(tmp_path, program)
    replicas.save(Progress(step=1), state)
    replicas.wait()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        replicas.save(Progress(step=2), state)
        replicas.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "no replica of step 2: process 0: [Errno 27] File too large" in messages.text
    assert [*replicas.newly_complete()] == [1]
    assert [path.parent.name[:6] for path in tmp_path.rglob("0.*")] == ["step_1", "step_1"]


def test_close_removes_replicas_that_a_checkpoint_replaces(tmp_path):
    program, state = initial()
    for durable, is_left in ((1, True), (None, True), (2, False)):
        replicas = open_replicas(tmp_path, program)
        replicas.save(Progress(step=2), state)
        replicas.wait()
        replicas.close(together=True, durable_step=durable)
        assert bool([*tmp_path.rglob("0.data")]) == is_left


def test_replica_of_another_model_is_refused(tmp_path):
    program, state = initial()
    origin = saved_steps(tmp_path, program, state, 1)
    other_program = setup(tiny_config(model={"dim": 32}))
    with pytest.raises(UserError, match=r"step_1\..* does not fit \[model\]"):
        start(tmp_path, other_program, open_replicas(tmp_path, other_program, origin))


def test_directory_of_another_user_is_refused(tmp_path):
    program, _ = initial()
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / f"jaxforge_{os.getuid()}").symlink_to(tmp_path)
    with pytest.raises(UserError, match=r"checkpoint\.replica_dir: .*not a private directory"):
        open_replicas(tmp_path, program)


def test_overlap_of_shard_and_region():
    shard = Shard("x", (2, 0), (4, 8), 0, 128, 0)
    common = overlap(shard, ((4, 14), (2, 5)))
    assert common == ((slice(2, 4), slice(2, 5)), (slice(0, 2), slice(0, 3)), 6)
    assert overlap(shard, ((6, 7), (0, 1))) is None
    assert overlap(Shard("x", (), (), 0, 4, 0), ()) == ((), (), 1)
