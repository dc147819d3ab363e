"""Runs of groups that train apart: what they save, how they resume, and who reads them."""

import contextlib
import json

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import Saved, start_from
from jaxforge.config.resolution import shrink
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.inference.trained import open_run
from jaxforge.step.losses import register_loss
from jaxforge.training import launch
from jaxforge.training.callbacks.callback import Callback
from tests.conftest import tiny_config
from tests.helpers import cli, counts_of, devices_here, random_batches, save_checkpoint, setup
from tests.step.test_diloco import loss_with_poison
from torch_compat.checkpoint.orbax_store import open_orbax


def config_of(directory, groups, *, interval=4, **sections):
    train = {"max_steps": 12, "outer_interval": interval, "batch_size": 2, "ema_decay": 0.9}
    return tiny_config(
        train=train | sections.pop("train", {}),
        distributed={"dp_replicate": groups, **sections.pop("distributed", {})},
        checkpoint={"dir": str(directory), "interval": 6},
        outer_optimizer={"fragments": 2, "overlap": 1},
        **sections,
    )


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of two groups without interruption."""
    run = tmp_path_factory.mktemp("diloco") / "whole"
    with devices_here(2):
        assert launch.fit(config_of(run, 2)) is Exit.COMPLETED
    return run


def test_run_resumes_bit_exactly_between_exchanges(whole, tmp_path):
    with devices_here(2):
        assert launch.fit(config_of(tmp_path, 2, train={"exit_interval": 7})) is Exit.INTERVAL
        assert launch.fit(config_of(tmp_path, 2)) is Exit.COMPLETED
    assert losses(tmp_path) == losses(whole)


def test_checkpoint_holds_every_group(whole):
    names = json.loads((whole / "checkpoints/step_12/checksums/metadata").read_text())
    own = {name.removeprefix("groups.") for name in names if name.startswith("groups.")}
    params = {name for name in names if name.startswith("params.")}
    assert params == {name for name in own if name.startswith("params.")}
    assert {name.replace("params.", "optimizer.mu.", 1) for name in params} <= own
    assert {name.replace("params.", "optimizer.trace.", 1) for name in params} <= set(names)


def test_inference_and_exports_take_the_global_weights(whole, tmp_path):
    program = setup(config_of(whole, 2))
    section = program.config.checkpoint
    with contextlib.closing(Checkpoints(whole, section, read_only=True)) as saved:
        state, _ = start_from(Saved(saved, 12), program)
    with open_run(whole).in_use() as params:
        jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(state.params))
    assert cli(["convert", str(whole), str(tmp_path / "dcp"), "--to=dcp"]) == 0
    checkpoint, _ = open_orbax(whole)
    table = "token_embedding.embedding.weight"
    np.testing.assert_array_equal(
        checkpoint.params[table].all(), state.params["token_embedding"]["embedding"]["weight"]
    )
    own = state.groups.opt_state
    (mu,) = [x.mu for x in own if hasattr(x, "mu")]
    np.testing.assert_array_equal(
        checkpoint.moments["mu"][table].all(), mu["token_embedding"]["embedding"]["weight"][0]
    )
    assert int(checkpoint.scalars["updates"]) == 12


def regrouped(tmp_path, before, after):
    """Return a state after three updates of `before` groups, and the one that `after` start from.

    0 groups train together.
    """
    programs = [
        setup(config_of("unused", max(n, 1), interval=4 if n else 0)) for n in (before, after)
    ]
    state, _ = programs[0].run(programs[0].state(), random_batches(programs[0].config, 3))
    save_checkpoint(programs[0], state, tmp_path)
    section = programs[1].config.checkpoint
    with contextlib.closing(Checkpoints(tmp_path, section, read_only=True)) as saved:
        restored, progress = start_from(Saved(saved, 3), programs[1])
    assert counts_of(restored) == counts_of(state)
    assert int(restored.step) == progress.step == 3
    batches = random_batches(programs[1].config, 2)
    copy = jax.tree.map(lambda x: x.copy(), restored)  # the step donates it
    _, metrics = programs[1].run(copy, batches)
    assert np.isfinite(metrics["loss"]).all()
    return jax.device_get((state, restored))


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


def row(tree, i):
    return jax.tree.map(lambda x: x[i], tree)


def test_more_groups_begin_with_the_global_weights(tmp_path):
    before, after = regrouped(tmp_path, 2, 4)
    assert_equal(row(after.groups, slice(2)), before.groups)
    for new in (2, 3):
        assert_equal(row(after.groups.params, new), before.params)
        assert_equal(row(after.groups.opt_state, new), row(before.groups.opt_state, new - 2))
    assert_equal((after.params, after.opt_state), (before.params, before.opt_state))


def test_fewer_groups_are_the_first(tmp_path):
    before, after = regrouped(tmp_path, 4, 2)
    assert_equal(after.groups, row(before.groups, slice(2)))
    assert_equal((after.params, after.opt_state), (before.params, before.opt_state))


def test_run_of_devices_together_goes_on_in_groups(tmp_path):
    before, after = regrouped(tmp_path, 0, 2)
    for group in range(2):
        assert_equal(row(after.groups.params, group), before.params)
        assert_equal(row(after.groups.opt_state, group), before.opt_state)
    assert_equal((after.params, after.ema), (before.params, before.ema))


def test_groups_go_on_together(tmp_path):
    before, after = regrouped(tmp_path, 2, 0)
    assert after.groups is None
    assert_equal((after.params, after.ema), (before.params, before.ema))
    assert_equal(after.opt_state, row(before.groups.opt_state, 0))


def test_average_is_that_of_the_global_weights(whole):
    program = setup(config_of("unused", 2))
    batches = random_batches(program.config, 6)
    state = program.state()
    average = jax.device_get(state.params)
    for batch in batches:
        state, _ = program.run(state, [batch])
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * np.asarray(p), average, state.params)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.ema, average)


def test_lost_groups_take_their_batches_with_them():
    config = config_of(
        "unused", 4, train={"global_batch_size": 32, "batch_size": 1},
        distributed={"elastic_processes": 4, "dp_shard": 2},
    )  # fmt: skip
    fewer = shrink(config, 8, 6)
    assert fewer.distributed.dp_replicate == 3
    assert fewer.train.global_batch_size == 24
    with pytest.raises(UserError, match="requires whole groups of 2 devices"):
        shrink(config, 8, 5)


def test_callback_reads_means_and_sums_over_groups(tmp_path):
    read = []

    class Reader(Callback):
        def on_step_end(self, context):
            read.append((context.loss, context.tokens_seen, context.lr))

    with devices_here(2):
        launch.fit(config_of(tmp_path, 2, train={"max_steps": 3}), [Reader()])
    assert [loss for loss, _, _ in read] == pytest.approx(list(losses(tmp_path).values()))
    assert [tokens for _, tokens, _ in read] == [128, 256, 384]


def test_growing_batches_are_shared_by_the_groups(tmp_path):
    ramp = [{"start": 0, "grad_accum_steps": 1}, {"start": 2, "grad_accum_steps": 2}]
    train = {"max_steps": 4, "grad_accum_steps": 2, "batch_ramp": ramp}
    with devices_here(2):
        assert launch.fit(config_of(tmp_path, 2, train=train)) is Exit.COMPLETED
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    tokens = [line["train/tokens"] for line in lines if "train/tokens" in line]
    assert tokens == [128, 256, 512, 768]


def test_replay_refuses_groups(whole):
    with pytest.raises(UserError, match="replay does not support groups that train apart"):
        cli(["replay", str(whole), "--step=3"])


@pytest.mark.usefixtures("own_names")
def test_run_ends_after_too_many_bad_updates_of_any_group(tmp_path):
    register_loss("poison")(loss_with_poison)
    train = {"loss_fn": "poison", "nan_consecutive_max": 1, "max_steps": 60}
    with devices_here(2):
        assert launch.fit(config_of(tmp_path, 2, train=train)) is Exit.NON_FINITE
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    skipped = [line["train/skipped_steps"] for line in lines if "train/skipped_steps" in line]
    assert skipped[-1] in (1, 2)
    assert skipped[0] == 0
