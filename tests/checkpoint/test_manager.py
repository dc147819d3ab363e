"""Saving, restoring and retention of checkpoints."""

import contextlib
import dataclasses
import gc
import json
import shutil
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from jax.experimental import multihost_utils

from jaxforge.checkpoint import layout
from jaxforge.checkpoint.failures import is_storage_failure
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.paths import find
from jaxforge.checkpoint.restore import Saved, starting_state
from jaxforge.errors import StorageError, UserError
from jaxforge.state.progress import Progress
from jaxforge.supervision.processes import free_port
from tests.conftest import tiny_config
from tests.helpers import flip_bit, progress_of, random_batches, setup
from tests.machine import PATIENCE


def trained(config=None):
    program = setup(config or tiny_config())
    state, _ = program.run(program.state(), random_batches(program.config, 2))
    return program, state


def checkpoints(path, program, **keys):
    section = program.config.checkpoint.model_copy(update=keys)
    resolved = program.config.model_dump(mode="json")
    return Checkpoints(path, section, program.model.axes, resolved, stack=program.model.stack)


def delay_saves(saved):
    """Delay background work of saves until the returned event is set."""
    may_finish, finish = threading.Event(), saved._finish
    saved._finish = lambda *args: may_finish.wait(PATIENCE) and finish(*args)
    return may_finish


def start(saved, program):
    """Return the starting state of a run."""
    with jax.set_mesh(program.mesh):
        return starting_state(program, saved)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        pytest.param({}, {"dp_shard": 2, "tp": 2}, marks=pytest.mark.slow),
        ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {"dp_shard": 4}),
        # 6 does not divide the width.
        pytest.param({"dp_shard": 6}, {"dp_shard": 4}, marks=pytest.mark.slow),
        pytest.param({"dp_shard": 4}, {"dp_shard": 3, "tp": 2}, marks=pytest.mark.slow),
        pytest.param(
            {"dp_shard": 2, "cp": 2}, {"cp": 4, "cp_strategy": "ring"}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_restore_onto_another_mesh_is_bit_exact(tmp_path, source, target):
    program, state = trained(tiny_config(distributed={"dp_shard": 1, **source}))
    progress = dataclasses.replace(progress_of(state), best_metric=1.5)
    saved = checkpoints(tmp_path, program)
    saved.save(progress, state)
    saved.close()
    other_program = setup(tiny_config(distributed={"dp_shard": 1, **target}))
    result = checkpoints(tmp_path, other_program)
    assert result.latest() == 2
    restored, restored_progress = start(result, other_program)
    assert restored_progress == progress
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(s) for s in (state, restored)))
    want = other_program.abstract_state()
    assert jax.tree.map(lambda a: a.sharding, want) == jax.tree.map(lambda a: a.sharding, restored)


@pytest.mark.slow
def test_checkpoint_is_independent_of_pipeline_stages(tmp_path):
    """Saving on unequal stages and on chunks of stages does not change the state."""

    def layout(**axes):
        train = {"grad_accum_steps": 2, "batch_size": 4 // axes.get("dp_shard", 1)}
        return tiny_config(model={"n_layers": 5}, train=train, distributed={"dp_shard": 1, **axes})

    program, state = trained(layout())
    progress = progress_of(state)
    chunks = {"pp": 2, "pp_schedule": "interleaved_1f1b"}
    for i, axes in enumerate([{}, {"pp": 2, "tp": 2}, {**chunks, "dp_shard": 2}, {"pp": 4}, {}]):
        here = setup(layout(**axes)) if i else program
        if i:
            result = checkpoints(tmp_path / str(i - 1), here)
            restored, progress = start(result, here)
            result.close()
            want = here.abstract_state()
            assert jax.tree.map(lambda a: (a.shape, a.sharding), want) == jax.tree.map(
                lambda a: (a.shape, a.sharding), restored
            )
        saved = checkpoints(tmp_path / str(i), here)
        saved.save(progress, restored if i else state)
        saved.close()
    jax.tree.map(np.testing.assert_array_equal, *(jax.device_get(s) for s in (state, restored)))


def test_declined_save_raises(tmp_path):
    """After a rollback a later step exists, and Orbax answers False."""
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=20), state)
    saved.wait()
    saved._manager.save = lambda *_, **__: False
    saved.save(Progress(step=10), state)
    for reported in (saved.wait, saved.check, saved.close):
        with pytest.raises(RuntimeError, match="step 10 was not saved"):
            reported()


def test_same_step_is_saved_once(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    assert saved.save(Progress(step=2), state) == tmp_path / "checkpoints" / "step_2"
    assert saved.save(Progress(step=2), state) is None
    saved.close()


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_newly_durable_reports_each_save_once(tmp_path, mode):
    program, state = trained()
    saved = checkpoints(tmp_path, program, async_mode=mode)
    began = time.time()
    for step in (2, 3):
        saved.save(Progress(step=step), state)
    saved.wait()
    may_finish = delay_saves(saved)
    saved.save(Progress(step=4), state)
    assert saved.newly_durable() == {}
    may_finish.set()
    saved.wait()
    saved._manager.delete(3)
    took = time.time() - began
    durable = saved.newly_durable()
    assert durable.keys() == {2, 4}
    assert 0 < durable[2] < took - durable[4]  # a save waits for the one before it
    assert saved.newly_durable() == {}
    saved.close()


def steps(path):
    return sorted(int(p.name.removeprefix("step_")) for p in (path / "checkpoints").glob("step_*"))


@pytest.mark.parametrize("distributed", [{}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_saved_state_may_be_donated(tmp_path, distributed):
    """The save copies the values first and does everything else in the background."""
    program, state = trained(tiny_config(distributed={"dp_shard": 1, **distributed}))
    before = addresses(state)
    want = jax.device_get(jax.tree.map(jnp.copy, state))  # a copy, since the state is donated
    saved, progress = checkpoints(tmp_path, program), Progress(step=2, samples=16)
    may_finish = delay_saves(saved)
    saved.save(progress, state)
    progress.step, progress.samples = 3, 24
    negated = jax.jit(lambda tree: jax.tree.map(jnp.negative, tree), donate_argnums=0)(state)
    assert addresses(negated) == before
    may_finish.set()
    saved.wait()
    restored, reported = saved.restore(program.abstract_state(), 2)
    assert (reported.step, reported.samples) == (2, 16)
    saved.close()
    for part in ("params", "opt_state", "guard"):
        jax.tree.map(np.testing.assert_array_equal, getattr(restored, part), getattr(want, part))


def test_saves_to_two_directories_begin_one_at_a_time(tmp_path):
    """Otherwise the signals of one save would create and clear directories of the other."""
    program, state = trained()
    managers = [checkpoints(tmp_path / location, program) for location in "ab"]
    both, met = threading.Barrier(2, None, 0.5), []
    for saved in managers:

        def save(*args, begin=saved._manager.save, **options):
            with contextlib.suppress(threading.BrokenBarrierError):
                met.append(both.wait())
            return begin(*args, **options)

        saved._manager.save = save
        saved.save(Progress(step=2), state)
    for saved in managers:
        saved.close()
    assert not met


def addresses(tree):
    """Return the set of addresses of all arrays; XLA may exchange arrays of equal shape."""
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


def test_state_is_split_into_data_files(tmp_path, monkeypatch):
    program = setup(tiny_config())
    monkeypatch.setattr(layout, "LEAST", 4096)
    tree = layout.to_tree(program.state())
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    assert layout.file_bytes(tree) == nbytes // 16
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    assert layout.file_bytes(tree) == nbytes // 64
    monkeypatch.undo()
    assert layout.file_bytes(tree) == 64 << 20  # small states have few files

    monkeypatch.setattr(layout, "LEAST", 4096)
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(), program.state())
    saved.close()
    data = (tmp_path / "checkpoints" / "step_0" / "state").glob("ocdbt.process_0/d/*")
    sizes = [path.stat().st_size for path in data]
    assert len(sizes) >= 8
    assert max(sizes) < nbytes // 4


def test_retention_keeps_last_and_best(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program, keep_last_n=2, keep_best_n=1)
    for step, loss in ((10, 3.0), (20, 1.0), (30, 2.0), (40, float("nan")), (50, 2.5)):
        saved.save(Progress(step=step), state, {"eval/loss": loss})
    saved.close()
    assert steps(tmp_path) == [20, 40, 50]


def test_best_checkpoint_survives_restart(tmp_path):
    program, state = trained()
    for saves in (((10, 1.0), (20, 2.0)), ((30, 3.0), (40, None)), ((50, 2.5),)):
        saved = checkpoints(tmp_path, program, keep_last_n=1, keep_best_n=2)
        for step, loss in saves:
            saved.save(Progress(step=step), state, loss and {"eval/loss": loss})
        saved.close()
    assert steps(tmp_path) == [10, 20, 50]


@pytest.mark.parametrize("damaged", ['{"eval/loss": 3.0, "crc32": 1}', '{"eval/loss"', "[1"])
def test_damaged_metrics_raise(tmp_path, damaged):
    program, state = trained()
    saved = checkpoints(tmp_path, program, keep_best_n=1)
    saved.save(Progress(step=10), state, {"eval/loss": 1.0})
    saved.close()
    path = tmp_path / "checkpoints" / "step_10" / "metrics" / "metrics"
    assert json.loads(path.read_text())["eval/loss"] == 1.0
    path.write_text(damaged)
    with pytest.raises(UserError, match=r"step_10 is damaged .* remove that file"):
        checkpoints(tmp_path, program, keep_best_n=1)
    path.unlink()
    checkpoints(tmp_path, program, keep_best_n=1).close()


def test_checkpoint_without_metric_is_never_best(tmp_path):
    """Neither a checkpoint with another metric nor one with NaN is the best."""
    program, state = trained()
    saved = checkpoints(tmp_path, program, keep_last_n=1, keep_best_n=1, best_metric="eval/a/loss")
    for step, a in ((10, None), (20, 5.0), (30, float("nan")), (40, 6.0)):
        metrics = {"eval/loss": 1.0} if a is None else {"eval/loss": 1.0, "eval/a/loss": a}
        saved.save(Progress(step=step), state, metrics)
    saved.close()
    assert steps(tmp_path) == [20, 40]


@pytest.mark.parametrize(
    ("metric", "mode", "retained"),
    [
        ("eval/tasks/piqa/acc", "auto", [20, 40]),
        ("eval/tasks/piqa/acc", "min", [10, 40]),
        ("eval/own", "max", [20, 40]),
        ("eval/own", "min", [10, 40]),
    ],
)
def test_best_checkpoints_follow_direction_of_metric(tmp_path, metric, mode, retained):
    program, state = trained()
    keys = {"keep_last_n": 1, "keep_best_n": 1, "best_metric": metric, "best_mode": mode}
    saved = checkpoints(tmp_path, program, **keys)
    for step, value in ((10, 0.1), (20, 0.5), (30, float("nan")), (40, 0.3)):
        saved.save(Progress(step=step), state, {metric: value})
    saved.close()
    assert steps(tmp_path) == retained


def test_keep_last_n_zero_keeps_all(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program, keep_last_n=0)
    for step in range(1, 6):
        saved.save(Progress(step=step), state)
    saved.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_incomplete_save_is_ignored_and_removed(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=2), state)
    saved.close()
    complete = tmp_path / "checkpoints" / "step_2"
    incomplete = tmp_path / "checkpoints" / "step_3.orbax-checkpoint-tmp"
    shutil.copytree(complete, incomplete)
    (incomplete / "commit_success.txt").unlink()
    assert find(tmp_path) == (tmp_path, 2)
    again = checkpoints(tmp_path, program)
    assert again.latest() == 2
    again.save(Progress(step=3), state)
    again.close()
    assert steps(tmp_path) == [2, 3]
    assert not incomplete.exists()


def test_progress_and_config_are_stored_as_json(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=2, tokens=77), state)
    saved.close()
    step = tmp_path / "checkpoints" / "step_2"
    assert json.loads((step / "progress" / "metadata").read_text())["tokens"] == 77
    assert json.loads((step / "config" / "metadata").read_text())["model"]["dim"] == 64


def test_stacked_arrays_are_chunked_by_layer(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=2), state)
    saved.close()
    base = f"file://{tmp_path}/checkpoints/step_2/state/"
    for path in ("params", "optimizer.mu", "optimizer.nu"):
        name = f"{path}.layers.attention.q_proj.weight"
        kvstore = {"driver": "ocdbt", "base": base, "path": f"{name}/"}
        array = ts.open({"driver": "zarr", "kvstore": kvstore}).result()
        assert array.shape == (2, 64, 64)
        assert array.chunk_layout.read_chunk.shape == (1, 64, 64)
        leaf = state.params["layers"]["attention"]["q_proj"]["weight"]
        if path == "params":
            np.testing.assert_array_equal(array[1].read().result(), leaf[1])


def test_load_path_restores_except_excluded_parts(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path / "source", program)
    saved.save(Progress(step=2, samples=16, tokens=512, run_id="theirs"), state)
    saved.close()

    def load(*excluded):
        section = {"load_path": str(tmp_path / "source"), "exclude_from_loading": excluded}
        mine = setup(tiny_config(checkpoint=section))
        own = checkpoints(tmp_path / "own", mine)
        result = start(own, mine)
        own.close()
        return result

    loaded, progress = load()
    assert (progress.step, progress.samples, int(loaded.opt_state[1].updates)) == (2, 16, 2)
    assert progress.run_id != "theirs"
    loaded, progress = load("optimizer", "progress")
    assert (progress.step, progress.samples, int(loaded.step)) == (0, 0, 0)
    assert int(loaded.opt_state[1].updates) == 0
    jax.tree.map(np.testing.assert_array_equal, loaded.params, jax.device_get(state.params))
    assert steps(tmp_path / "source") == [2]
    loaded, progress = load("model")
    assert (progress.step, int(loaded.opt_state[1].updates)) == (2, 2)
    new, _ = load("model", "optimizer")
    assert (int(new.step), int(new.opt_state[1].updates)) == (2, 0)
    initial = jax.device_get(setup(tiny_config()).init().params)
    for fresh in (loaded, new):
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(fresh.params), initial)
    moments = jax.device_get(state.opt_state)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(loaded.opt_state), moments)


def test_mismatched_model_raises(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=2), state)
    saved.close()
    wider = setup(tiny_config(model={"dim": 128}))
    with pytest.raises(UserError, match=r"step_2 does not fit \[model\]: layers\.attention"):
        start(checkpoints(tmp_path, wider), wider)


@pytest.fixture
def collected():
    """Collect the objects of a failed read, which warn when they are collected."""
    yield
    gc.collect()


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("damage", "message"),
    [(cut, ""), (Path.unlink, ""), (flip_bit, r"not what was saved: \w+[\w.]+")],
)
@pytest.mark.usefixtures("collected")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_damaged_checkpoint_error_names_previous_step(tmp_path, damage, message):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    for step in (1, 2):
        saved.save(Progress(step=step), state)
    saved.close()
    files = (tmp_path / "checkpoints" / "step_2" / "state").rglob("d/*")
    damage(max(files, key=lambda path: path.stat().st_size))
    pattern = rf"step_2 is damaged \(.*{message}.*remove it .* step 1, or"
    with pytest.raises(UserError, match=pattern):
        start(checkpoints(tmp_path, program), program)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_unreadable_checkpoint_is_not_called_damaged(tmp_path):
    """Address 0 of a process' memory cannot be read, and the system says EIO, as of a bad disk."""
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=1), state)
    saved.close()
    metadata = tmp_path / "checkpoints" / "step_1" / "progress" / "metadata"
    metadata.unlink()
    metadata.symlink_to("/proc/self/mem")
    with pytest.raises(StorageError, match=r"step_1 could not be read \(Input/output error"):
        start(checkpoints(tmp_path, program), program)


def test_unreachable_bucket_is_a_storage_failure():
    retries = {"max_retries": 1, "initial_delay": "1ms", "max_delay": "1ms"}
    spec = {"driver": "s3", "bucket": "bucket", "path": "key", "aws_region": "us-east-1",
            "endpoint": f"http://127.0.0.1:{free_port('127.0.0.1')}",
            "aws_credentials": {"type": "anonymous"}, "s3_request_retries": retries}  # fmt: skip
    with pytest.raises(ValueError, match="Could not connect") as raised:
        ts.KvStore.open(spec).result().read("").result()
    assert is_storage_failure(raised.value)
    local = ValueError("UNKNOWN: Failed to read from file [os_error_code='5'] [source locations]")
    assert is_storage_failure(Exception("outer")) is False
    assert is_storage_failure(local)
    assert not is_storage_failure(ValueError("DATA_LOSS: CRC-32C mismatch"))


def test_restore_model_checks_weights_and_casts(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    saved.save(Progress(step=2), state)
    saved.close()
    result = checkpoints(tmp_path, program)

    def load(dtype):
        like = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), state.params
        )
        return result.restore_model({"params": like}, 2)["params"]

    load(np.float32), load(jax.numpy.bfloat16)
    files = (tmp_path / "checkpoints" / "step_2" / "checksums").glob("metadata")
    for path in files:
        hashes = json.loads(path.read_text())
        path.write_text(json.dumps({name: value ^ 1 for name, value in hashes.items()}))
    with pytest.raises(UserError, match=r"not what was saved: params\."):
        load(np.float32)
    load(jax.numpy.bfloat16)


def save_and_poll(saved, state):
    saved.save(Progress(step=2), state)
    for _ in range(6000):
        saved.check()
        time.sleep(0.01)


def test_failed_save_raises_before_next_save(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    (tmp_path / "checkpoints").rmdir()
    (tmp_path / "checkpoints").touch()  # a file, so that no directory can be created in it
    with pytest.raises(StorageError, match=r"could not be written .* \(N\w+( \w+)* directory: /"):
        save_and_poll(saved, state)


def test_close_alone_waits_for_own_save(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    may_finish = delay_saves(saved)
    saved.save(Progress(step=2), state)
    threading.Timer(0.1, may_finish.set).start()
    saved.close(together=False)
    assert steps(tmp_path) == [2]


def test_saves_do_not_query_preemption_service(tmp_path, monkeypatch):
    queries = []

    def service(step):
        queries.append(step)
        return False

    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", service)
    program, state = trained()
    saved = checkpoints(tmp_path, program)
    for step in (1, 2):
        saved.save(Progress(step=step), state)
    saved.close()
    assert not queries


@pytest.mark.parametrize("name", ["a[1]", "a*b", "a\\b", "what?"])
def test_directory_with_pattern_characters_raises(tmp_path, name):
    config = tiny_config().checkpoint
    with pytest.raises(UserError, match=r"could not be read again: .* give a directory without"):
        Checkpoints(tmp_path / name, config)
    assert not list(tmp_path.iterdir())
    Checkpoints(tmp_path / name, config, read_only=True).close()  # existing runs may be there


def test_find_without_checkpoint_raises(tmp_path):
    with pytest.raises(UserError, match="no checkpoint at"):
        find(tmp_path)
    with pytest.raises(UserError, match="no checkpoint at"):
        find(tmp_path / "checkpoints" / "step_7")


def test_progress_ignores_unknown_fields():
    progress = Progress.from_json({"step": 3, "from_the_future": 1})
    assert progress == dataclasses.replace(Progress(step=3), run_id=progress.run_id)


@pytest.mark.parametrize("is_higher_better", [False, True])
def test_best_metric_follows_direction_and_is_never_nan(is_higher_better):
    progress, sign = Progress(), -1 if is_higher_better else 1
    values = (float("nan"), 3.0, 3.0, float("nan"), 4.0, 2.0)
    noted = [
        progress.note_metric("eval/x", sign * value, is_higher_better=is_higher_better)
        for value in values
    ]
    assert noted == [False, True, False, False, False, True]
    assert progress.note_metric("eval/y", sign * 9.0, is_higher_better=is_higher_better)
    assert (progress.best_name, progress.best_metric) == ("eval/y", sign * 9.0)


def test_other_optimizer_raises_unless_excluded(tmp_path):
    program, state = trained()
    saved = checkpoints(tmp_path / "source", program)
    saved.save(Progress(step=2, samples=16, tokens=512), state)
    saved.close()
    lion = setup(tiny_config(optimizer={"name": "lion"}))
    with pytest.raises(UserError, match=r"another optimizer.*holds mu, nu, updates"):
        start(checkpoints(tmp_path / "source", lion), lion)
    section = {
        "load_path": str(tmp_path / "source"),
        "exclude_from_loading": ("optimizer",),
    }
    lion = setup(tiny_config(optimizer={"name": "lion"}, checkpoint=section))
    own = checkpoints(tmp_path / "own", lion)
    loaded, progress = start(own, lion)
    own.close()
    assert (progress.step, progress.samples, int(loaded.step)) == (2, 16, 2)
    assert int(loaded.opt_state[1].updates) == 0
    jax.tree.map(np.testing.assert_array_equal, loaded.params, jax.device_get(state.params))


@pytest.mark.parametrize("marker", [".metadata", "pp0/.metadata"])
def test_pytorch_checkpoints_in_directory_raise(tmp_path, marker):
    path = tmp_path / "checkpoints" / "step_10" / marker
    path.parent.mkdir(parents=True)
    path.touch()
    with pytest.raises(UserError, match=r"step_10 is a checkpoint of PyTorch: give another"):
        checkpoints(tmp_path, setup(tiny_config()))
    assert path.exists()


def test_restored_state_shares_no_memory_with_numpy(tmp_path, monkeypatch):
    """JAX cannot donate such arrays: the first step would need the memory of the state twice."""
    program, memory = setup(tiny_config()), []

    def restore(self, like, step):
        def shared(leaf):
            buffer = np.zeros(leaf.nbytes + 64, np.uint8)
            start = -buffer.ctypes.data % 64  # JAX copies what is not aligned
            values = buffer[start : start + leaf.nbytes].view(leaf.dtype).reshape(leaf.shape)
            memory.append(values)  # an address is used again once it is free
            return jax.device_put(values, leaf.sharding)

        return jax.tree.map(shared, program.state()), Progress()

    monkeypatch.setattr(Checkpoints, "restore", restore)
    own = checkpoints(tmp_path, program)
    state, _ = Saved(own, 1).restore(program.abstract_state())
    own.close()
    addresses = {values.ctypes.data for values in memory}
    assert not {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)} & addresses
