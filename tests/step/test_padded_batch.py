"""One program for all sizes of a batch ramp, against a program for each size."""

import json

import jax
import numpy as np
import pytest

from jaxforge import program as program_module
from jaxforge.config.batch_ramp import SampleRamp
from jaxforge.parallel import compilation
from jaxforge.program import Program
from jaxforge.step.padded_batch import MAX_PROGRAMS, pad_batch, reciprocal
from jaxforge.step.train_step import Controls
from jaxforge.tools.replay.capsule import capsule_of, verify
from jaxforge.tools.replay.steps import replayed
from jaxforge.training import launch
from tests.conftest import tiny_config
from tests.helpers import devices_here, new_setup, random_batches

MODEL = {"n_layers": 1, "dim": 32, "n_heads": 2, "n_kv_heads": 2, "vocab_size": 64}
STAGES = [{"start": i, "grad_accum_steps": i + 1} for i in range(8)]
TRAIN = {"seq_len": 16, "batch_size": 2, "max_steps": 8, "grad_accum_steps": 8,
         "batch_ramp": STAGES}  # fmt: skip
FSDP_TP = {"dp_shard": 4, "tp": 2}
LOGGED = ("train/loss", "train/grad_norm", "train/tokens")


def ramp_of(n_sizes, *, keys=(), **sections):
    """A config with batches of 1 to `n_sizes` microbatches, and more `keys` of [train]."""
    ramp = {"grad_accum_steps": n_sizes, "batch_ramp": STAGES[:n_sizes]}
    return tiny_config(model=MODEL, train=TRAIN | ramp | dict(keys), **sections)


def same_bits(a, b):
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in leaves)


def results_of(job, batches):
    """Metrics of updates and the state after them."""
    state, metrics = job.state(), []
    with job.context():
        for batch in batches:
            state, result = job.step(state, batch, Controls())
            metrics.append(jax.device_get(result))
    return metrics, jax.device_get(state)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("grad_sync", "sizes"),
    [("update", (1, 2, 5, 8)), ("microbatch", (1, 3))],
)
def test_sharded_ramp_is_bit_equal_to_a_program_per_size(grad_sync, sizes):
    """All metrics and the whole state after a ramp on fsdp 4 x tp 2."""
    job = new_setup(ramp_of(8, distributed=FSDP_TP, keys={"grad_sync": grad_sync}))
    batches = [
        job.put({name: x[:n] for name, x in batch.items()})
        for n, batch in zip(sizes, random_batches(job.config, len(sizes)), strict=True)
    ]
    padded = [job.padded(batch) for batch in batches]
    assert {batch["labels"].shape[0] for batch in padded} == {8}
    for name, x in batches[0].items():
        assert padded[0][name].sharding == x.sharding
    expected = results_of(job, batches)
    assert job.step._cache_size() == len(sizes)
    assert same_bits(results_of(job, padded), expected)
    assert job.step._cache_size() == len(sizes) + 1


@pytest.mark.parametrize("has_padding", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_padding_contributes_to_no_loss_statistic_or_count(has_padding):
    """Experts, padding tokens, datasets, auxiliary losses, and the mean of microbatch means."""
    job = new_setup(
        tiny_config(
            model=MODEL | {"num_experts": 4, "moe_router": "sigmoid_topk",
                           "moe_sequence_aux_loss_weight": 0.1, "moe_aux_loss_weight": 0.1},
            train=TRAIN | {"loss_norm": "microbatch", "z_loss_weight": 0.1},
        )
    )  # fmt: skip
    [batch] = random_batches(job.config, 1)
    batch = {name: x[:3] for name, x in batch.items()}
    is_padding = np.zeros_like(batch["labels"])
    is_padding[1, :, 10:] = 1
    batch["labels"] = np.where(is_padding, -100, batch["labels"])
    batch = job.put(batch | ({"is_padding": is_padding} if has_padding else {}))
    expected, state = results_of(job, [batch])
    assert same_bits(results_of(job, [job.padded(batch)]), (expected, state))
    assert int(state.counts.samples) == 3 * 2
    assert int(state.counts.padding) == has_padding * 2 * 6


def run_in(directory, **train_keys):
    """Train on one device with five sizes of the batch; return the number of compiled steps."""
    compiled, compile_step = [], compilation.compile_step
    config = ramp_of(
        5, checkpoint={"dir": str(directory), "interval": 100}, metrics={"log_interval": 1},
        data={"dataset_path": str(directory.parent / "data")}, keys=train_keys,
    )  # fmt: skip
    with devices_here(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            compilation, "compile_step",
            lambda program, flags: compiled.append(program) or compile_step(program, flags),
        )  # fmt: skip
        launch.fit(config)
    return len(compiled)


def logged(directory):
    """Loss, gradient norm and tokens so far of each step."""
    lines = map(json.loads, (directory / "metrics.jsonl").read_text().splitlines())
    return [tuple(x[name] for name in LOGGED) for x in lines if "train/loss" in x]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run directory of a ramp whose sizes share one program, and the number of compiled steps."""
    directory = tmp_path_factory.mktemp("ramp") / "run"
    (directory.parent / "data").mkdir()
    tokens = np.random.default_rng(0).integers(0, MODEL["vocab_size"], 40 * 17)
    np.save(directory.parent / "data" / "x.npy", tokens.astype(np.uint16))
    return directory, run_in(directory)


def test_run_compiles_once_and_is_bit_equal_to_a_program_per_size(run, monkeypatch):
    directory, n_programs = run
    assert n_programs == 1
    monkeypatch.setattr(program_module, "MAX_PROGRAMS", 5)
    assert run_in(directory.with_name("sized")) == 5
    assert logged(directory) == logged(directory.with_name("sized"))
    tokens = np.cumsum([1, 2, 3, 4, 5, 5, 5, 5]) * 2 * 16
    assert [x[2] for x in logged(directory)] == tokens.tolist()


def test_resume_within_ramp_is_bit_exact(run):
    resumed = run[0].with_name("resumed")
    assert run_in(resumed, exit_interval=3) == 1
    assert len(logged(resumed)) == 3
    assert run_in(resumed) == 1
    assert logged(resumed) == logged(run[0])


@pytest.mark.slow
def test_replay_and_capsule_of_ramp_match_log_bit_exactly(run):
    with devices_here(1):
        assert [(x.step, x.difference) for x in replayed(run[0], 4, 7)] == [
            (step, 0.0) for step in range(4, 8)
        ]
        capsule = capsule_of(run[0])
        result = verify(capsule, 3)
        assert result.is_exact
        assert [step.step for step in result.steps] == [1, 2, 3]


@pytest.mark.parametrize(
    ("n_sizes", "mesh", "pads"),
    [(MAX_PROGRAMS, {}, False), (MAX_PROGRAMS + 1, {"dp_shard": 8}, True), (8, FSDP_TP, True)],
)
def test_ramp_of_many_sizes_has_one_program(n_sizes, mesh, pads):
    program = Program(ramp_of(n_sizes, distributed=mesh))
    assert program.pads_batches == pads
    assert program.sizes == tuple(range(1, n_sizes + 1))


def test_megatron_ramp_of_64_sizes_has_one_program():
    stages = [
        {"start": step, "global_batch_size": size}
        for step, size in SampleRamp(16, 16, 10**5).stages(1024)
    ]
    keys = {"grad_accum_steps": 64, "global_batch_size": 1024, "batch_ramp": stages}
    keys |= {"seq_len": 16, "batch_size": 2}
    program = Program(tiny_config(model=MODEL, train=keys, distributed={"dp_shard": 8}))
    assert program.sizes == tuple(range(1, 65))
    assert list(program.lower_sizes()) == [64]


def test_pipeline_has_a_program_per_size():
    sizes = [{"start": i, "grad_accum_steps": i + 2} for i in range(7)]
    config = tiny_config(
        model={"n_layers": 2}, distributed={"pp": 2, "dp_shard": 4},
        train=TRAIN | {"batch_ramp": sizes},
    )  # fmt: skip
    assert not Program(config).pads_batches


def test_padding_keeps_microbatches_and_ignores_others():
    job = new_setup(ramp_of(8))
    batch = {"labels": np.ones((2, 2, 4)), "other": np.ones((2, 2))}
    padded = jax.device_get(pad_batch(job.put(batch), largest=3, mesh=job.mesh))
    assert padded["n_microbatches"] == 2
    np.testing.assert_array_equal(padded["labels"][:, 0, 0], [1, 1, -100])
    np.testing.assert_array_equal(padded["other"][:, 0], [1, 1, 0])


def test_reciprocals_of_known_and_traced_counts_have_the_same_bits():
    size = 2**23 + 5  # times 3, it is no float32
    traced = jax.jit(lambda n: reciprocal(n, 64, size))
    for n in (1, 3, 5, 64):
        assert np.float32(reciprocal(n, 64, size)) == traced(n)
