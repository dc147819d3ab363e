"""The average of the parameters in checkpoints and replicas, and in runs that resume."""

import dataclasses
import logging
import random
import signal
import time

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.replica.replicas import Replicas
from jaxforge.checkpoint.restore import starting_state
from jaxforge.commands import train
from jaxforge.exit_codes import Exit
from jaxforge.program import Program
from tests.conftest import tiny_config
from tests.helpers import (
    devices_here,
    open_checkpoints,
    progress_of,
    random_batches,
    setup,
    underway,
)
from tests.processes.conftest import Run

SMALL = {"n_layers": 2, "dim": 16, "n_heads": 2, "n_kv_heads": 1, "vocab_size": 32}
STEPS = 6


def config(model=SMALL, distributed=None, **section):
    axes = {"dp_shard": 1, **(distributed or {})}
    keys = {"ema_decay": 0.9, "batch_size": 4, "grad_accum_steps": 2, **section}
    return tiny_config(model=model, train=keys, distributed=axes)


def saved(path, job, steps=2):
    """Save a random state; return it on the host."""
    state = jax.tree.map(jax.device_put, underway(job, steps), job.shardings)
    store = open_checkpoints(path, job)
    store.save(progress_of(state), state)
    store.close()
    return jax.device_get(state)


def restored(path, job, replicas=()):
    store = open_checkpoints(path, job)
    with jax.set_mesh(job.mesh):
        state, _ = starting_state(job, store, replicas=replicas)
    store.close()
    return state


def assert_equal(result, expected):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(result), expected)


STAGES = {"pp": 2, "pp_schedule": "interleaved_1f1b", "dp_shard": 2}
LAYERS = {**SMALL, "n_layers": 4}
EXPERTS = {**LAYERS, "num_experts": 4, "moe_top_k": 2}


@pytest.mark.parametrize(
    ("model", "source", "target"),
    [
        (LAYERS, STAGES, {"dp_shard": 4, "tp": 2}),
        pytest.param(LAYERS, {"dp_replicate": 2, "tp": 2}, STAGES, marks=pytest.mark.slow),
        pytest.param(SMALL, {"dp_shard": 6}, {"cp": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param(
            EXPERTS, {"ep": 2, "dp_shard": 2}, {"pp": 2, "ep": 2, "tp": 2}, marks=pytest.mark.slow
        ),
    ],
)
def test_average_restores_onto_another_mesh(tmp_path, model, source, target):
    state = saved(tmp_path, setup(config(model, source)))
    other_program = setup(config(model, target))
    result = restored(tmp_path, other_program)
    of_layer = by_layer(other_program, result.ema)
    assert_equal(of_layer, by_layer(setup(config(model, source)), state.ema))
    assert shardings(result.ema) == shardings(other_program.abstract_state().ema)


def by_layer(job, params):
    """Return parameters with the layers in order, whatever the stages."""
    of = job.model.stack.of
    stacks = job.config.model.stacks
    return {
        name: jax.tree.map(lambda x, s=name: of(s).unstack(x), part) if name in stacks else part
        for name, part in jax.device_get(params).items()
    }


def lines(messages):
    return [text for text in messages.messages if "average of the" in text]


def shardings(tree):
    return [leaf.sharding for leaf in jax.tree.leaves(tree)]


def test_average_restores_from_replica(tmp_path):
    job = setup(config(distributed={"dp_shard": 2, "tp": 2}))
    state = jax.tree.map(jax.device_put, underway(job, 2), job.shardings)
    section = job.config.checkpoint.model_copy(
        update={"replica_interval": 1, "replica_dir": str(tmp_path / "memory")}
    )
    resolved = job.config.model_dump(mode="json")
    replicas = Replicas(section, tmp_path, None, resolved, job.model.stack)
    replicas.save(progress_of(state), state)
    replicas.wait()
    other_program = setup(config(distributed={"dp_shard": 3}))
    again = Replicas(section, tmp_path, replicas.origin, resolved, other_program.model.stack)
    assert_equal(restored(tmp_path, other_program, again.sources).ema, jax.device_get(state.ema))


@pytest.mark.slow
def test_average_starts_from_parameters_of_checkpoint_without_one(tmp_path, messages):
    messages.set_level(logging.INFO, "jaxforge")
    state = saved(tmp_path, setup(config(LAYERS, ema_decay=0.0)))
    job = setup(config(LAYERS, STAGES))
    result = restored(tmp_path, job)
    assert_equal(by_layer(job, result.ema), state.params)
    assert shardings(result.ema) == shardings(job.abstract_state().ema)
    assert lines(messages) == [
        f"{tmp_path}/checkpoints/step_2 has no average of the parameters: train.ema_decay starts "
        "it from them"
    ]
    job.run(result, random_batches(job.config, 1))  # no buffer is donated twice


def test_average_is_dropped_when_switched_off(tmp_path, messages):
    messages.set_level(logging.INFO, "jaxforge")
    state = saved(tmp_path, setup(config()))
    result = restored(tmp_path, setup(config(ema_decay=0.0)))
    assert result.ema == {}
    assert_equal(result, dataclasses.replace(state, ema={}))
    assert lines(messages) == [
        f"the average of the parameters in {tmp_path}/checkpoints/step_2 is dropped: "
        "train.ema_decay = 0"
    ]


def test_average_restores_in_another_dtype(tmp_path):
    state = saved(tmp_path, setup(config()))
    result = restored(tmp_path, setup(config(ema_dtype="bfloat16")))
    assert_equal(result.ema, jax.tree.map(lambda x: x.astype("bfloat16"), state.ema))


def test_new_parameters_start_a_new_average(tmp_path):
    job = setup(config())
    saved(tmp_path / "old", job)
    keys = {"load_path": str(tmp_path / "old"), "exclude_from_loading": ("model",)}
    section = job.config.checkpoint.model_copy(update=keys)
    other_program = setup(job.config.model_copy(update={"checkpoint": section}))
    result = restored(tmp_path / "new", other_program)
    assert_equal(result.ema, jax.device_get(result.params))


SETTINGS = [
    f"--train.max_steps={STEPS}", "--train.ema_decay=0.8", "--train.ema_interval=2",
    "--checkpoint.interval=3", "--checkpoint.keep_last_n=0", "--model.n_layers=1",
]  # fmt: skip


def finish(run, *settings, code=0):
    with devices_here(1):
        run.finish_here(*SETTINGS, *settings, code=code)


def last_state(run):
    job = train.parse_command_line(run.command(*SETTINGS)[3:]).known
    with devices_here(1):
        return jax.device_get(restored(run.directory, Program(job)))


def test_resumed_run_has_average_of_whole_run(tmp_path):
    whole, resumed = (Run(tmp_path, name) for name in ("whole", "resumed"))
    finish(whole)
    expected = last_state(whole)
    assert expected.step == STEPS
    different = jax.tree.map(lambda a, b: bool((a != b).any()), expected.ema, expected.params)
    assert all(jax.tree.leaves(different))
    finish(resumed, "--train.exit_interval=3", code=Exit.INTERVAL.code)
    finish(resumed)
    assert_equal(last_state(resumed), expected)


@pytest.mark.slow  # quick: test_resumed_run_has_average_of_whole_run
def test_killed_run_has_average_of_undisturbed_run(tmp_path):
    undisturbed, killed = (Run(tmp_path, name) for name in ("undisturbed", "killed"))
    finish(undisturbed)
    process = killed.start(*SETTINGS)
    killed.wait_for_step(3, process)
    time.sleep(random.Random(0).uniform(0, 0.1))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finish(killed)
    assert_equal(last_state(killed), last_state(undisturbed))
