"""Auxiliary outputs of layers and losses, and non-trainable state, on several meshes."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.launch import fit as run_all
from tests.conftest import tiny_config
from tests.helpers import random_batches, restore_checkpoint, save_checkpoint, setup
from tests.step import aux_model

# A leading layer, two repetitions of a period of two layers, and a remaining layer.
PATTERN = ("full", "full", "sliding", "full", "sliding", "full")
SHAPE = {"model_type": "with_aux", "dim": 32, "vocab_size": 64, "ffn_hidden_dim": 48}
MODEL = {**SHAPE, "n_layers": 6, "sliding_window": 5, "attention_pattern": PATTERN}
UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
INTERLEAVED = {"pp_schedule": "interleaved_1f1b"}
FULL = {"activation_checkpointing": "full"}


@pytest.fixture(autouse=True)
def registered(own_names):
    aux_model.register()


def config(groups=1, train=None, **distributed):
    return tiny_config(
        model=MODEL,
        train={
            "seq_len": 16, "batch_size": 4 // groups, "grad_accum_steps": 4, "loss_fn": "with_aux",
            **(train or {}),
        },
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


def run(job):
    """Return metrics of three updates, and parameters and model state by layer."""
    program = setup(job)
    batches = random_batches(job, 3)
    for batch in batches:
        batch["labels"][0, :, :8] = -100
    state, metrics = program.run(program.state(), batches)
    unstack = functools.partial(jax.tree.map, lambda x: np.asarray(program.model.stack.unstack(x)))
    return metrics, unstack(jax.device_get(state.params["layers"])), unstack(state.model_state)


@functools.cache
def on_one_device():
    return run(config())


def test_terms_add_up_to_loss_and_layers_are_ordered():
    metrics, _, state = on_one_device()
    assert metrics["losses"].keys() == {"nats", "lse", "size"}
    np.testing.assert_allclose(sum(metrics["losses"].values()), metrics["loss"], rtol=1e-6)
    assert metrics["side"]["size"].shape == (3, 6)
    sizes = metrics["side"]["size"] * 0.1
    np.testing.assert_allclose(sizes.sum(axis=1), metrics["losses"]["size"], rtol=1e-5)
    assert np.all(metrics["side"]["peak"] ** 2 > metrics["side"]["size"])
    assert np.all(state["layers"]["drift"].std(axis=1) > 0)


MESHES = [
    (4, {"dp_replicate": 2, "dp_shard": 2, "tp": 2}, {**MICROBATCH, **FULL}),
    # 2, 2, 1 and 1 layers
    pytest.param(1, {"pp": 4}, {**MICROBATCH, **FULL}, marks=pytest.mark.slow),
    pytest.param(
        4, {"pp": 2, "dp_shard": 4, **INTERLEAVED}, {**UPDATE, **FULL}, marks=pytest.mark.slow
    ),
    pytest.param(
        1, {"pp": 2, "tp": 2, "pp_schedule": "gpipe"}, {"activation_checkpointing": "none"},
        marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("groups", "axes", "train"), MESHES)
def test_results_do_not_depend_on_the_mesh(groups, axes, train):
    expected, result = on_one_device(), run(config(groups, train, **axes))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
    for key in ("loss", "grad_norm", "losses", "side"):
        jax.tree.map(close, result[0][key], expected[0][key])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5)
    jax.tree.map(close, result[1:], expected[1:])


@pytest.mark.slow
def test_state_is_saved_and_restored_on_another_mesh(tmp_path):
    job = config(1, {**MICROBATCH, **FULL}, pp=4)
    program = setup(job)
    batch = random_batches(job, 1)
    state, _ = program.run(program.state(), batch)
    save_checkpoint(program, state, tmp_path)
    restored = restore_checkpoint(setup(config()), tmp_path, 1)
    drift = program.model.stack.unstack(state.model_state["layers"]["drift"])
    assert np.abs(drift).max() > 0
    np.testing.assert_array_equal(restored.model_state["layers"]["drift"], drift)


def test_bad_step_does_not_change_model_state():
    job = config()
    program = setup(job)
    batches = random_batches(job, 2)
    state, _ = program.run(program.state(), batches[:1])
    before = jax.device_get(state.model_state)
    state, metrics = program.run(state, batches[1:], apply=False)
    assert not metrics["applied"].any()
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state.model_state), before)


class LossRecorder(Callback):
    """Callback that records the loss terms."""

    def __init__(self):
        self.losses = []

    def on_step_end(self, context):
        self.losses.append((context.loss, context.losses))


@functools.cache
def logged(*axes):
    """Run on eight devices; return training lines, evaluation lines and the recorder."""
    with tempfile.TemporaryDirectory() as location:
        root = Path(location)
        tokens = np.random.default_rng(0).integers(0, 64, 4000)
        np.save(root / "a.npy", tokens.astype(np.uint16))
        sizes = dict(axes)
        job = tiny_config(
            model={**SHAPE, "n_layers": 3},
            train={"seq_len": 16, "batch_size": 8 // sizes["dp_shard"], "grad_accum_steps": 4,
                   "max_steps": 9, "loss_fn": "with_aux", "mixed_precision": "fp32"},
            data={"dataset_path": str(root)},
            eval={"enabled": True, "datasets": {"dataset_path": str(root)}, "interval": 1,
                  "steps": 2},
            early_stop={"metric": "eval/nats", "patience_steps": 2,
                        "min_delta": 10.0},
            distributed=sizes,
            checkpoint={"dir": str(root / "run"), "interval": 100},
        )  # fmt: skip
        recorder = LossRecorder()
        run_all(job, [recorder])
        lines = (root / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    train = [row for row in rows if "train/loss" in row]
    return train, [row for row in rows if "eval/loss" in row], recorder


def test_run_logs_evaluates_and_stops_by_custom_terms():
    train, evaluated, recorder = logged(("dp_shard", 8))
    assert len(train) == len(evaluated) == 3, "the first evaluation is the best"
    for row, (loss, terms) in zip(train, recorder.losses, strict=True):
        assert {key for key in row if key.startswith("terms/")} == {f"terms/{n}" for n in terms}
        assert sum(terms.values()) == pytest.approx(loss)
        assert {f"model/size/layers.{i}" for i in range(3)} < row.keys()
        assert 0 <= row["model/accuracy"] <= 1
    for row in evaluated:
        assert row["eval/nats"] == pytest.approx(row["eval/loss"], rel=1e-5)
        assert row["eval/size"] > 0


@pytest.mark.slow
def test_logs_do_not_depend_on_pipeline_stages():
    for program, reference in zip(
        logged(("dp_shard", 2), ("pp", 2), ("tp", 2)), logged(("dp_shard", 8)), strict=True
    ):
        for a, b in zip(program, reference, strict=True) if isinstance(program, list) else ():
            names = [key for key in a if key.split("/")[0] in ("terms", "model", "eval")]
            assert names
            assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, rel=1e-4)
