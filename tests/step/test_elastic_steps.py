"""Steps of an elastic job on fewer devices, against those of the whole job."""

import itertools

import jax
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.checkpoint.restore import starting_state
from jaxforge.config import resolution, rules
from jaxforge.config.axes import data_parallel
from jaxforge.data import loader, sources
from jaxforge.errors import UserError
from jaxforge.step.train_step import Controls
from jaxforge.training.training_data import batch_ramp
from tests.conftest import tiny_config
from tests.helpers import new_setup, progress_of, underway

MODEL = {"n_layers": 1, "dim": 48, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 251}
EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 32, "moe_aux_loss_weight": 0.0}
FULL, BATCH = 4, 16


@pytest.fixture
def tokens(tmp_path):
    np.save(tmp_path / "x.npy", (np.arange(200 * 17) ** 2 % 251).astype(np.uint16))
    return tmp_path


def whole_job(tokens, **sections):
    """A job of four processes with a device each, and 16 sequences per update."""
    train = {
        "batch_size": BATCH // FULL,
        "seq_len": 16,
        "ema_decay": 0.9,
        **sections.pop("train", {}),
    }
    axes = {"dp_shard": FULL, "elastic_processes": FULL, **sections.pop("distributed", {})}
    model = MODEL | sections.pop("model", {})
    data = {"dataset_path": str(tokens), "num_workers": 1, **sections.pop("data", {})}
    return tiny_config(model=model, train=train, distributed=axes, data=data, **sections)


def updates(config, n_updates=3, first=0):
    """Return the results of updates from the initial state, and the state after them."""
    program = new_setup(config)
    state, metrics = program.state(), []
    batches = loader.training_batches(
        config, program.mesh, sources.open_training_data(config), first, n_updates
    )
    with jax.set_mesh(program.mesh):
        for batch in batches:
            state, result = program.step(state, batch, Controls())
            metrics.append(jax.device_get(result))
    return metrics, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "sections"),
    [
        pytest.param(3, {}, marks=pytest.mark.slow),
        pytest.param(
            2, {"data": {"pack_sequences": True, "eos_token_id": 4}}, marks=pytest.mark.slow
        ),
        pytest.param(1, {"train": {"grad_sync": "microbatch"}}, marks=pytest.mark.slow),
        pytest.param(3, {"model": EXPERTS}, id="3-experts"),
    ],
    ids=str,
)
def test_updates_on_fewer_devices_equal_those_of_the_whole_job(tokens, devices, sections):
    whole = whole_job(tokens, **sections)
    expected, expected_state = updates(whole)
    results, state = updates(resolution.shrink(whole, FULL, devices))
    for name in ("loss", "grad_norm", "valid_tokens"):
        np.testing.assert_allclose(
            [result[name] for result in results], [result[name] for result in expected], rtol=1e-6
        )
    assert state.counts == expected_state.counts
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=2e-5),
        (state.params, state.ema),
        (expected_state.params, expected_state.ema),
    )


@pytest.mark.slow
def test_average_survives_loss_and_return_of_devices(tokens, tmp_path):
    whole = whole_job(tokens)
    jobs = [whole, resolution.shrink(whole, FULL, 3), whole]
    expected = state = underway(new_setup(whole), 2)
    for i, (job, other) in enumerate(itertools.pairwise(jobs)):
        state = jax.device_get(restored(tmp_path / str(i), job, other, state))
    jax.tree.map(np.testing.assert_array_equal, state.ema, expected.ema)


def restored(path, job, other, state):
    """Save a state of the host as a job does; return it as another job restores it."""
    program, target = new_setup(job), new_setup(other)
    state = jax.tree.map(jax.device_put, state, program.shardings)
    saved = Checkpoints(path, job.checkpoint, program.model.axes, stack=program.model.stack)
    saved.save(progress_of(state), state)
    saved.close()
    with jax.set_mesh(target.mesh):
        return starting_state(target, Checkpoints(path, other.checkpoint, read_only=True))[0]


def test_padding_rows_are_read_as_padding(tokens):
    config = resolution.shrink(whole_job(tokens, data={"shuffle": False}), FULL, 3)
    mesh = new_setup(config).mesh
    batches = loader.training_batches(config, mesh, sources.open_training_data(config), BATCH, 2)
    first, second = ({name: np.asarray(x) for name, x in batch.items()} for batch in batches)
    assert first["labels"].shape == (2, 9, 16)  # 18 rows for 16 sequences
    assert (first["is_padding"] == np.repeat([0, 1], [16, 2]).reshape(2, 9, 1)).all()
    assert (first["labels"][1, 7:] == -100).all()
    starts = np.concatenate([x["input_ids"].reshape(18, 16)[:16, 0] for x in (first, second)])
    positions = np.arange(BATCH, 3 * BATCH)
    np.testing.assert_array_equal(starts, (positions * 17) ** 2 % 251)


@pytest.mark.parametrize(
    ("axes", "accum", "full", "now", "expected"),
    [  # dp_replicate, dp_shard, microbatches, rows of a microbatch
        ({"dp_shard": 8}, 1, 8, 6, (1, 6, 2, 18)),
        ({"dp_shard": 8}, 1, 8, 4, (1, 4, 2, 16)),
        ({"dp_shard": 8}, 3, 8, 7, (1, 7, 4, 28)),
        ({"dp_shard": 4, "dp_replicate": 2}, 1, 8, 4, (1, 4, 2, 16)),
        ({"dp_shard": 2, "dp_replicate": 4}, 1, 8, 6, (3, 2, 2, 18)),
        ({"dp_shard": 4, "dp_replicate": 2}, 1, 8, 6, (1, 6, 2, 18)),
        ({"dp_shard": 4, "tp": 2}, 1, 8, 6, (1, 3, 2, 9)),
        ({"dp_shard": -1, "cp": 2}, 1, 8, 2, (1, 1, 4, 4)),
        ({"dp_shard": 4, "pp": 2}, 5, 8, 4, (1, 2, 10, 8)),
        ({"dp_shard": 2, "pp": 2, "pp_schedule": "interleaved_1f1b"}, 2, 4, 2, (1, 1, 4, 4)),
    ],
)  # fmt: skip
def test_shrink_keeps_sequences_and_model_parallelism(tokens, axes, accum, full, now, expected):
    config = tiny_config(
        model={"n_layers": 4}, distributed={"elastic_processes": full, **axes},
        train={"batch_size": 4, "grad_accum_steps": accum},
    )  # fmt: skip
    dp = data_parallel(rules.mesh_shape(config, full))
    shrunk = resolution.shrink(config, full, now)
    rules.check(shrunk, now)
    left = data_parallel(rules.mesh_shape(shrunk, now))
    section, train = shrunk.distributed, shrunk.train
    rows = train.microbatch_size(left)
    assert (section.dp_replicate, section.dp_shard, train.grad_accum_steps, rows) == expected
    assert train.ramp(left).samples(7) == config.train.ramp(dp).samples(7)
    assert shrunk.eval_batch_size(left) == config.eval_batch_size(dp)
    assert rows // left <= 4  # no more memory per device


def test_ramp_keeps_sequences_of_each_stage(tokens):
    ramp = [{"start": 0, "grad_accum_steps": 1}, {"start": 10, "grad_accum_steps": 3}]
    config = whole_job(tokens, train={"batch_ramp": ramp, "grad_accum_steps": 3, "batch_size": 6})
    shrunk = resolution.shrink(config, FULL, 3)
    rules.check(shrunk, 3)
    stages = [(start, accum * shrunk.train.microbatch_size(3)) for start, accum in
              shrunk.train.stages()]  # fmt: skip
    assert stages == [(0, 24), (10, 72)]


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ({"data": {"order": "torch"}}, "data.order"),
        ({"train": {"loss_norm": "microbatch"}}, "train.loss_norm"),
        ({"train": {"batch_ramp": [{"start": 0, "grad_accum_steps": 1},
                                   {"start": 9, "grad_accum_steps": 2}],
                    "grad_accum_steps": 2}}, "batch ramp"),
    ],
)  # fmt: skip
def test_job_that_cannot_shrink_is_refused_before_it_starts(tokens, sections, named):
    config = whole_job(tokens, **sections)
    with pytest.raises(UserError, match=f"cannot shrink to 3 processes.*{named}"):
        resolution.check_shrinkable(config, FULL)


def test_incomplete_groups_are_refused(tokens):
    config = tiny_config(distributed={"dp_shard": 4, "tp": 2, "elastic_processes": 8})
    resolution.check_shrinkable(config, 8)  # tp of two processes: they leave together
    with pytest.raises(UserError, match=r"5 of 8 devices .* distributed.tp = 2"):
        resolution.shrink(config, 8, 5)


def test_number_of_processes_is_checked(tokens):
    config = whole_job(tokens, distributed={"elastic_min_processes": 2})
    assert resolution.full_devices(config, 6, 3) == 8
    assert batch_ramp(config, new_setup(config).mesh).rows == BATCH
    for count in (1, 5):
        with pytest.raises(UserError, match="do not allow this number"):
            resolution.full_devices(config, count, count)
