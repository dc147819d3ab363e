"""Per-dataset metrics of a step, and the effect of phases."""

import functools

import jax
import numpy as np
import pytest

from jaxforge.config.data import DataConfig
from jaxforge.step.train_step import Controls
from jaxforge.training.training_data import Phases, TrainingData
from tests.conftest import tiny_config
from tests.helpers import random_batches, setup

SMALL = {"dim": 32, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 64, "ffn_hidden_dim": 48}
SOURCES = [{"path": name} for name in ("a", "b", "c", "none")]
ROWS, MICROBATCHES = 4, 4
CONTROLS = Controls(next_lr_scale=1.0)  # as in a run


def config(train=None, **axes):
    axes = {"dp_shard": 1, **axes}
    groups = axes["dp_shard"] * axes.get("dp_replicate", 1)
    sizes = {"seq_len": 16, "batch_size": ROWS // groups, "grad_accum_steps": MICROBATCHES}
    return tiny_config(
        model=SMALL, data={"datasets": SOURCES}, distributed=axes,
        train={**sizes, "z_loss_weight": 1e-3, **(train or {})},
    )  # fmt: skip


def batches(n=2):
    """Return batches of datasets a and b; c has one sequence without labels, the last has none."""
    result = random_batches(config(), n)
    for batch in result:
        numbers = np.random.default_rng(0).integers(0, 2, (MICROBATCHES, ROWS))
        numbers[1, 2] = 2
        batch["labels"][1, 2] = -100
        batch["labels"][0, :, 5:] = -100
        batch["dataset_idx"] = numbers
    return result


@functools.cache
def reference_sums():
    """Return the sums of the first batch, computed from the logits."""
    parts, batch = setup(config()), batches()[0]
    labels = batch["labels"].reshape(-1, 16)

    @jax.jit
    def log_p(params, tokens):
        return jax.nn.log_softmax(parts.model.logits(params, parts.model.hidden(params, tokens)))

    result = np.asarray(log_p(parts.state().params, batch["input_ids"].reshape(-1, 16)))
    label_logits = np.take_along_axis(result, np.maximum(labels, 0)[..., None], -1)[..., 0]
    nats = -np.sum(np.where(labels >= 0, label_logits, 0.0), -1)
    numbers = batch["dataset_idx"].reshape(-1)
    tokens = np.sum(labels >= 0, -1)
    return [
        np.array([np.sum(np.where(numbers == i, rows, 0)) for i in range(len(SOURCES))])
        for rows in (nats, tokens)
    ]


@pytest.fixture(scope="module")
def compiled():
    """A setup and its compiled step, which cannot be traced again."""
    base = config()
    optimizer = base.optimizer.model_copy(update={"name": "lion", "lr": 0.01, "weight_decay": 0.0})
    scheduler = base.scheduler.model_copy(update={"name": "constant", "warmup_steps": 0})
    parts = setup(base.model_copy(update={"optimizer": optimizer, "scheduler": scheduler}))
    with jax.set_mesh(parts.mesh):
        lowered = parts.step.lower(parts.state(), parts.put(batches()[0]), CONTROLS)
        return parts, lowered.compile()


VOCAB_CHUNKS = {"loss_fn": "chunked_cross_entropy", "ce_vocab_chunk": 12}
TOKEN_CHUNKS = {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 24}


@pytest.mark.parametrize(
    ("train", "axes"),
    [
        (TOKEN_CHUNKS, {"dp_replicate": 2, "dp_shard": 2}),
        ({**VOCAB_CHUNKS, "grad_sync": "microbatch"}, {"dp_shard": 2, "tp": 2}),
        ({}, {"pp": 2, "dp_shard": 2}),
    ],
    ids=str,
)
def test_dataset_sums_do_not_depend_on_mesh(train, axes):
    parts = setup(config(train, **axes))
    assert_sums_are_those_of_the_logits(parts, parts.step)


def test_dataset_sums_match_logits(compiled):
    assert_sums_are_those_of_the_logits(*compiled)


def assert_sums_are_those_of_the_logits(parts, step):
    nats, tokens = reference_sums()
    assert tokens.tolist()[2:] == [0, 0]
    assert min(tokens[:2]) > 0
    with jax.set_mesh(parts.mesh):
        _, metrics = step(parts.state(), parts.put(batches()[0]), CONTROLS)
    for name in ("dataset_nll", "dataset_tokens", "valid_tokens"):
        assert metrics[name].sharding.is_fully_replicated  # else no host could read the value
    np.testing.assert_allclose(metrics["dataset_nll"], nats, rtol=1e-5)
    np.testing.assert_array_equal(metrics["dataset_tokens"], tokens)
    assert metrics["valid_tokens"] == tokens.sum()
    assert {metrics[name].dtype.name for name in ("dataset_tokens", "valid_tokens")} == {"int32"}


@pytest.mark.parametrize("lag", [False, True])
def test_phase_scales_learning_rate_without_recompilation(compiled, lag):
    """Updates of plain Lion have the size of the learning rate; the next rate is logged."""
    parts, step = compiled
    phases = [{"start_step": 3, "lr_scale": 0.25}, {"start_step": 5, "lr_scale": 0.5}]
    data_source = TrainingData(iter, Phases.of(DataConfig(phases=phases, phase_lr_lag=lag)))
    state, moved, logged = parts.state(), [], []
    with jax.set_mesh(parts.mesh):
        for n, batch in enumerate(batches(7)):
            before = np.asarray(state.params["norm"]["weight"])
            state, metrics = step(state, parts.put(batch), data_source.controls(n, ()))
            logged.append(metrics["lr"])
            moved.append(np.abs(np.asarray(state.params["norm"]["weight"]) - before).max())
    scales = [1, 1, 1, 0.25, 0.25, 0.5, 0.5]
    expected = [1, *scales[:-1]] if lag else scales
    np.testing.assert_allclose(np.array(moved) / 0.01, expected, rtol=1e-3)
    np.testing.assert_allclose(logged[:-1], moved[1:], rtol=1e-3)
