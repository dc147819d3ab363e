"""Guarantees of an update: token weights, guard, compilation and communication."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.step.token_weights import token_weights
from jaxforge.step.train_step import Controls
from tests.conftest import tiny_config
from tests.helpers import collectives_in_loops, hlo, new_setup, random_batches, setup


def plain_loss(program, params, batch):
    """Return the mean of -log p over valid tokens, without code of the step."""
    logits = program.model.logits(params, program.model.hidden(params, batch["input_ids"]))
    log_p = jax.nn.log_softmax(logits)
    labels = batch["labels"]
    picked = jnp.take_along_axis(log_p, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    return -jnp.sum(picked * (labels >= 0)) / jnp.sum(labels >= 0)


def ragged_batches(config, n=1):
    """Return microbatches whose numbers of valid tokens differ widely."""
    batches = random_batches(config, n)
    for batch in batches:
        batch["labels"][0, :, 4:] = -100
    return batches


def test_valid_tokens_have_equal_weight():
    program = setup(tiny_config(train={"grad_accum_steps": 2, "batch_size": 4}))
    (batch,) = ragged_batches(program.config)
    state = program.state()
    whole = {k: jnp.asarray(v.reshape(8, -1)) for k, v in batch.items()}
    loss, grads = jax.jit(jax.value_and_grad(lambda p: plain_loss(program, p, whole)))(state.params)
    norm = np.sqrt(sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(grads)))
    _, metrics = program.run(state, [batch])
    np.testing.assert_allclose(metrics["loss"][0], loss, rtol=1e-6)
    np.testing.assert_allclose(metrics["grad_norm"][0], norm, rtol=1e-5)


def test_microbatch_norm_is_the_mean_of_means():
    train = {"grad_accum_steps": 2, "batch_size": 4, "loss_norm": "microbatch"}
    program = setup(tiny_config(train=train))
    (batch,) = ragged_batches(program.config)
    state = program.state()
    mean = jax.jit(lambda microbatch: plain_loss(program, state.params, microbatch))
    means = [mean({k: v[m] for k, v in batch.items()}) for m in (0, 1)]
    _, metrics = program.run(state, [batch])
    np.testing.assert_allclose(metrics["loss"][0], np.mean(means), rtol=1e-6)
    assert abs(means[0] - means[1]) > 1e-3


def test_batch_without_labels_changes_no_parameters():
    """Weight decay, moments, the count of updates and the losses of the guard do not change."""
    program = setup(tiny_config(optimizer={"weight_decay": 0.1}, train={"z_loss_weight": 1e-3}))
    batches = random_batches(program.config, 3)
    batches[1]["labels"][:] = -100
    state, _ = program.run(program.state(), batches[:1])
    before = jax.device_get(state)
    state, metrics = program.run(state, batches[1:2])
    after = jax.device_get(state)
    assert (metrics["skipped"][0], metrics["nonfinite"][0]) == (1, 0)
    for part in ("params", "opt_state"):
        jax.tree.map(
            np.testing.assert_array_equal, *(getattr(count, part) for count in (before, after))
        )
    np.testing.assert_array_equal(before.guard.losses, after.guard.losses)
    assert (int(after.step), int(after.guard.good), int(after.guard.consecutive)) == (2, 1, 0)
    counts = [count.counts._asdict() for count in (before, after)]
    samples, tokens, valid = (
        [int(count[name]) for count in counts] for name in ("samples", "tokens", "valid_tokens")
    )
    assert (samples[1], tokens[1], valid[1]) == (2 * samples[0], tokens[0], valid[0])
    _, metrics = program.run(state, batches[2:])
    assert metrics["skipped"][0] == 1


def test_token_weights_of_empty_microbatch_are_zero():
    weights = jnp.array([0.0, 3.0])
    np.testing.assert_allclose(token_weights(weights, "tokens"), [0, 1 / 3])
    np.testing.assert_allclose(token_weights(weights, "microbatch"), [0, 1 / 6])


@pytest.mark.parametrize("mesh", [{}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_nonfinite_step_changes_only_counts(mesh):
    program = setup(tiny_config(distributed={"dp_shard": 1, **mesh}))
    batches = random_batches(program.config, 3, dp=1)
    state, _ = program.run(program.state(), batches[:2])
    poisoned = jax.tree.map(lambda leaf: leaf, state.params)
    weight = poisoned["output_head"]["proj"]["weight"]
    poisoned["output_head"]["proj"]["weight"] = weight.at[0, 0].set(jnp.nan)
    before = jax.device_get((poisoned, state.opt_state))
    count = int(before[1][1].updates)
    state = dataclasses.replace(state, params=poisoned)
    state, metrics = program.run(state, batches[2:])
    assert np.isnan(metrics["loss"][0])
    after = jax.device_get((state.params, state.opt_state))
    jax.tree.map(np.testing.assert_array_equal, before, after)
    assert int(after[1][1].updates) == count  # so the schedule does not advance either
    assert (int(state.step), int(state.guard.total), int(state.guard.consecutive)) == (3, 1, 1)


def test_infinite_gradient_of_a_finite_loss_is_caught():
    """KempnerForge checks only the loss; its clipping then spreads NaN to every weight."""
    program = setup(tiny_config())
    (batch,) = random_batches(program.config, 1)
    state = program.state()
    huge = jax.tree.map(lambda leaf: leaf, state.params)
    huge["norm"]["weight"] = jnp.full_like(huge["norm"]["weight"], 1e30)
    huge["output_head"]["proj"]["weight"] = jnp.zeros_like(huge["output_head"]["proj"]["weight"])
    state = dataclasses.replace(state, params=huge)
    state, metrics = program.run(state, [batch])
    assert np.isfinite(metrics["loss"][0])
    assert not np.isfinite(metrics["grad_norm"][0])
    assert metrics["skipped"][0] == 1


def test_state_is_constant_after_too_many_bad_steps():
    program = setup(tiny_config(train={"nan_consecutive_max": 3}))
    state = program.state()
    state.params["norm"]["weight"] = jnp.full_like(state.params["norm"]["weight"], jnp.nan)
    state, metrics = program.run(state, random_batches(program.config, 6))
    assert metrics["consecutive"].tolist() == [1, 2, 3, 3, 3, 3]
    assert int(state.step) == 3


def test_lr_scale_is_traced():
    program = new_setup(tiny_config())
    batches = random_batches(program.config, 4)
    _, full = program.run(program.state(), batches)
    _, half = program.run(program.state(), batches, lr_scale=0.5)
    np.testing.assert_allclose(half["lr"], full["lr"] / 2, rtol=1e-6)
    assert half["loss"][2] != full["loss"][2]  # the first update has rate 0
    assert program.step._cache_size() == 1


def test_step_compiles_once_and_donates_its_state():
    program = new_setup(tiny_config(distributed={"dp_shard": 2, "tp": 2}))
    with jax.set_mesh(program.mesh):
        state = program.init()
    old = state.params["norm"]["weight"]
    program.run(state, random_batches(program.config, 3, dp=1))
    assert program.step._cache_size() == 1
    assert old.is_deleted()


def test_update_reduction_has_no_collective_in_loops():
    """Neither the loop over microbatches nor the loop over layers has collectives."""
    base = {"grad_accum_steps": 4, "batch_size": 2}
    text = hlo(setup(tiny_config(train=base, distributed={"dp_replicate": 2, "dp_shard": 2})))
    assert collectives_in_loops(text) == []
    assert re.search(r"reduce-scatter|all-reduce", text)


def test_microbatch_reduction_is_inside_loops():
    """The counterpart of the test above: its HLO parser finds existing collectives."""
    train = {"grad_accum_steps": 4, "batch_size": 2, "grad_sync": "microbatch"}
    result = collectives_in_loops(hlo(setup(tiny_config(train=train, distributed={"dp_shard": 4}))))
    kinds = {kind for _, kind, _ in result}
    assert "all-gather" in kinds
    assert kinds & {"all-reduce", "reduce-scatter", "all-to-all"}  # depends on the version of JAX


@pytest.fixture(scope="module")
def with_tp():
    """Return HLO for dp_shard 2 x tp 2, with tp groups {0, 1} and {2, 3}."""
    train = {"grad_accum_steps": 4, "batch_size": 2, "seq_len": 24}  # 48 tokens: no weight has 48
    return hlo(setup(tiny_config(train=train, distributed={"dp_shard": 2, "tp": 2})))


def test_loops_communicate_only_over_tp(with_tp):
    result = collectives_in_loops(with_tp)
    assert result
    assert {groups for _, _, groups in result} == {"{{0,1},{2,3}}"}
    weights = re.compile(r"\[(2,)?(\d+,64|64,\d+)\]")
    tokens = re.compile(r"\b48\b|\[2,24,")
    shapes = [shape for shape, _, _ in result if weights.search(shape)]
    assert not [shape for shape in shapes if not tokens.search(shape)]


def test_reductions_keep_tp_shards(with_tp):
    """Weights and gradients are never gathered over tp: ffn 256 appears only as its half, 128."""
    assert "f32[2,128,64]" in with_tp
    assert not re.search(r"f32\[2,(256,64|64,256)\]", with_tp)


def test_gradients_can_be_collected():
    program = setup(tiny_config(), collect=("grads",))
    _, metrics = jax.device_get(
        program.step(program.state(), program.put(random_batches(program.config, 1)[0]), Controls())
    )
    norm = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(metrics["grads"])))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)


@pytest.mark.parametrize("chunk", [{"ce_chunk_size": 100}, {"ce_vocab_chunk": 23}])
def test_chunked_loss_matches_plain_loss(chunk):
    """The last chunk is partial; test_cross_entropy.py covers whole chunks."""
    train = {"loss_fn": "chunked_cross_entropy", "z_loss_weight": 1e-3, **chunk}
    plain = setup(tiny_config(train={"z_loss_weight": 1e-3}))
    chunked = setup(tiny_config(train=train))
    batches = random_batches(plain.config, 3)
    _, a = plain.run(plain.state(), batches)
    _, b = chunked.run(chunked.state(), batches)
    np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
    np.testing.assert_allclose(a["grad_norm"], b["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize(
    "grad_sync", ["update", pytest.param("microbatch", marks=pytest.mark.slow)]
)
def test_chunks_are_counted_per_device(grad_sync):
    """Chunks are 16 tokens on each of 4 devices with 2 sequences: slices of 8 positions."""
    train = {
        "loss_fn": "chunked_cross_entropy", "ce_chunk_size": 16, "grad_sync": grad_sync,
        "batch_size": 2,
    }  # fmt: skip
    config = tiny_config(model={"vocab_size": 512}, train=train, distributed={"dp_shard": 4})
    assert "f32[16,512]" in hlo(setup(config))


def test_chunked_loss_never_holds_all_logits():
    model = {"vocab_size": 4096}
    train = {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 32}
    text = hlo(setup(tiny_config(model=model, train=train)))
    assert "[256,4096]" in hlo(setup(tiny_config(model=model)))
    assert "[256,4096]" not in text
    assert "[32,4096]" in text
