"""Equality of pipelined and plain steps, and the communication and memory of pipelined steps."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.aux_outputs import AuxOutputs
from jaxforge.parallel.pipeline.spmd import split_pull
from jaxforge.parallel.sharding import batch_shardings
from jaxforge.training.evaluation import make_eval_step
from tests.conftest import tiny_config
from tests.helpers import (
    EVERY_OPTION,
    LEARNED,
    collectives_in_loops,
    hlo,
    lowered,
    new_setup,
    random_batches,
    setup,
    use_unsplittable_kernel,
)

ROWS = 4  # of a microbatch
SMALL = {"dim": 32, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 64, "ffn_hidden_dim": 48}
TIED = {"tie_embeddings": True}
PACKED = {"packed": True}
KINDS = {
    "attention_chunk_size": 6, "sliding_window": 5, "local_rope_theta": 100.0,
    "rope_pattern": (True, False, True), "attention_pattern": ("chunked", "full", "sliding"),
    "tie_embeddings": True, "qk_norm": True, "activation": "relu",
}  # fmt: skip
PARTS = {  # layers of one part, whose order differs between stages
    "mixer_pattern": ("attention", "none"), "feed_forward_pattern": ("none", "dense"),
}  # fmt: skip


def config(layers, microbatches, model=None, train=None, optimizer=None, **distributed):
    axes = {"dp_shard": 1, **distributed}
    groups = axes["dp_shard"] * axes.get("dp_replicate", 1)
    return tiny_config(
        model={**SMALL, "n_layers": layers, **(model or {})},
        train={
            "seq_len": 16, "batch_size": ROWS // groups, "grad_accum_steps": microbatches,
            "z_loss_weight": 1e-3, **(train or {}),
        },
        optimizer=optimizer or {},
        scheduler={"name": "none"} if optimizer else {},
        distributed=axes,
    )  # fmt: skip


def batches(job, n, packed=False):
    """Return batches whose microbatches have unequal weights; packed: several documents a row."""
    result = random_batches(job, n)
    rng = np.random.default_rng(1)
    for batch in result:
        batch["labels"][0, :, :8] = -100
        if packed:
            ends = rng.random(batch["labels"].shape) < 0.15
            batch["segment_ids"] = np.cumsum(ends, axis=-1)
    return result


def run(job, n=3, packed=False, make=setup):
    """Return the metrics of n updates, and the final parameters with and without unstacking."""
    step = make(job)
    state, metrics = step.run(step.state(), batches(job, n, packed))
    params = jax.device_get(state.params)
    stacks, stack = job.model.stacks, step.model.stack
    by_layer = {
        name: jax.tree.map(stack.of(name).unstack, part) if name in stacks else part
        for name, part in params.items()
    }
    return metrics, by_layer, params


@functools.cache
def without_stages(layers, microbatches, model, packed, n=3, optimizer=()):
    """Return `run` for one stage without chunks and recomputation."""
    job = config(layers, microbatches, dict(model), optimizer=dict(optimizer))
    return run(job, n, packed)


def assert_same(actual, expected, rtol=1e-5):
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(actual[0][name], expected[0][name], rtol=rtol)
    for a, b in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


CHUNKED = {"loss_fn": "chunked_cross_entropy", "ce_vocab_chunk": 12}
CHUNKED_TOKENS = {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 64}
INTERLEAVED = {"pp_schedule": "interleaved_1f1b"}
UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
FULL, SELECTIVE = ({"activation_checkpointing": save} for save in ("full", "selective"))
CASES = [  # each schedule, reduction, recomputation and axis in several combinations
    # layers, microbatches, mesh and schedule, train settings, model settings
    (3, 5, {"pp": 2, "dp_replicate": 2, "tp": 2}, {**MICROBATCH, **FULL}, TIED),
    pytest.param(
        11,
        8,
        {"pp": 4, "dp_shard": 2, **INTERLEAVED},
        {**UPDATE, **FULL},
        TIED,
        marks=pytest.mark.slow,
    ),
    # All stages run one program, although each has other kinds of layers.
    pytest.param(
        6,
        8,
        {"pp": 4, "dp_shard": 2, "pp_schedule": "gpipe"},
        {**MICROBATCH, **FULL},
        KINDS,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        3,
        5,
        {"pp": 2, "dp_shard": 2, "pp_schedule": "gpipe"},
        {**MICROBATCH, **FULL},
        TIED,
        marks=pytest.mark.slow,
    ),
    (5, 4, {"pp": 2, "tp": 2, **INTERLEAVED}, MICROBATCH, TIED),
    pytest.param(3, 2, {"pp": 2}, {}, PARTS, marks=pytest.mark.slow),
    pytest.param(
        7,
        4,
        {"pp": 2, "dp_shard": 2, "tp": 2, **INTERLEAVED},
        {**MICROBATCH, **FULL},
        PARTS,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        6,
        8,
        {"pp": 2, "dp_shard": 2, "tp": 2, **INTERLEAVED},
        MICROBATCH,
        KINDS,
        marks=pytest.mark.slow,
    ),
    pytest.param(
        2,
        3,
        {"pp": 2, "dp_shard": 2, "tp": 2},
        {**UPDATE, **CHUNKED},
        EVERY_OPTION,
        marks=pytest.mark.slow,
    ),
    pytest.param(2, 3, {"pp": 2, "tp": 4}, SELECTIVE, LEARNED, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("layers", "microbatches", "axes", "train", "model"), CASES)
def test_pipelined_step_equals_plain_step(layers, microbatches, axes, train, model):
    """Documents are packed."""
    expected = without_stages(layers, microbatches, tuple(model.items()), True)
    assert_same(run(config(layers, microbatches, model, train, **axes), packed=True), expected)


@pytest.mark.slow
def test_mixed_layer_kinds_equal_reference_on_mesh():
    """This case without stages shares the reference of a pipelined case."""
    train = {**FULL, **CHUNKED_TOKENS}
    test_pipelined_step_equals_plain_step(6, 8, {"dp_shard": 2, "tp": 2}, train, KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "schedule_free_adamw"])
def test_empty_rows_stay_zero_under_optimizer(name):
    optimizer = {"name": name, "weight_decay": 0.1}
    job = config(3, 2, pp=2, optimizer=optimizer, model={"qkv_bias": True, "qk_norm": True})
    actual = run(job, n=2)
    for leaf in jax.tree.leaves(actual[2]["layers"]):
        assert leaf.shape[0] == 4
        assert not leaf[3].any()
    model = (("qkv_bias", True), ("qk_norm", True))
    expected = without_stages(3, 2, model, False, 2, tuple(optimizer.items()))
    assert_same(actual, expected)


@pytest.mark.slow
def test_pipelined_bf16_step_is_close_to_float32():
    """Gradients with bf16 compute are compared in tests/step/test_grad_sync.py."""
    expected = without_stages(3, 5, tuple(TIED.items()), True)[0]
    half = {**MICROBATCH, "mixed_precision": "bf16"}
    metrics = run(config(3, 5, TIED, half, pp=2, dp_shard=2, tp=2), packed=True)[0]
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=2e-2)


@pytest.mark.slow
def test_opaque_kernel_runs_per_device(monkeypatch):
    """The partitioner must not see the kernel, whose results `shard_map` cannot check."""
    use_unsplittable_kernel(monkeypatch)
    job = config(3, 5, TIED, pp=2, dp_shard=2, tp=2, train={**UPDATE, **FULL})
    expected = without_stages(3, 5, tuple(TIED.items()), True)
    assert_same(run(job, packed=True, make=new_setup), expected)
    sums = evaluated.__wrapped__(3, (("pp", 2), ("tp", 2)), make=new_setup)
    np.testing.assert_allclose(sums, evaluated(3), rtol=1e-5)


def test_split_pull_saves_residuals_but_not_parameters():
    """`split_pull` relies on the structure of `jax.vjp`'s result, which JAX does not document."""

    def layer(params, x, around):
        y = jnp.tanh(x @ params["in"])
        aux = AuxOutputs(loss_terms={"size": jnp.sum(y**2)}, metrics={"mean": jnp.mean(y)})
        y = y @ params["out"] * around["scale"] + around["whole"]
        return (y, aux.loss_terms), aux

    keys = jax.random.split(jax.random.key(0), 5)
    params = {"in": jax.random.normal(keys[0], (3, 5)), "out": jax.random.normal(keys[1], (5, 3))}
    around = {"scale": jax.random.normal(keys[2], (4, 1)), "whole": np.ones(3, np.float32)}
    x, d_y = (jax.random.normal(key, (4, 3)) for key in keys[3:])
    d_term = {"size": jnp.float32(0.5)}

    expected = jax.vjp(layer, params, x, around, has_aux=True)[1]((d_y, d_term))

    @jax.jit
    def both_ways(params, x):
        pull = jax.vjp(layer, params, x, around, has_aux=True)[1]
        saved, _ = split_pull(pull, (params, around))
        shapes = [leaf.shape for leaf in saved]
        assert (4, 3) in shapes, "x"
        assert (4, 5) in shapes, "the activation"
        assert not {(3, 5), (5, 3), (4, 1)} & set(shapes), "parameters and context are not saved"
        pull = jax.vjp(layer, params, jnp.zeros_like(x), around, has_aux=True)[1]
        _, rebuild = split_pull(pull, (params, around))
        return rebuild(saved)((d_y, d_term))

    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    jax.tree.map(close, both_ways(params, x)[:2], expected[:2])


def temporary_bytes(schedule, microbatches, save="full"):
    train = {"activation_checkpointing": save}
    program = setup(config(4, microbatches, train=train, pp=4, pp_schedule=schedule))
    return lowered(program).compile().memory_analysis().temp_size_in_bytes


def test_1f1b_memory_does_not_grow_with_microbatches():
    first, last = (temporary_bytes("1f1b", m) for m in (8, 64))
    assert abs(last - first) <= first // 100


@pytest.mark.slow
def test_gpipe_memory_grows_with_microbatches():
    assert temporary_bytes("gpipe", 32) > 1.5 * temporary_bytes("1f1b", 8)


def permutes(result):
    return [shape for shape, kind, _ in result if kind == "collective-permute"]


def test_tick_has_only_permutes_and_vocabulary_reductions():
    """A tick has one permute per direction, and reductions over pp of a microbatch's size.

    Even devices are the stages of one data-parallel rank, and odd devices those of the other.
    """
    job = config(4, 8, train={**UPDATE, **FULL}, pp=4, dp_shard=2)
    result = collectives_in_loops(hlo(setup(job)))
    assert len(permutes(result)) == 4  # forwards alone: 1, both ways: 2, backwards alone: 1
    assert {kind for _, kind, _ in result} == {"collective-permute", "all-reduce"}
    groups = {devices for _, kind, devices in result if kind == "all-reduce"}
    assert groups == {"{{0,2,4,6},{1,3,5,7}}"}, "only stages communicate in the loops"
    rows, length, dim = ROWS // 2, job.train.seq_len, job.model.dim
    largest = max(np.prod(sizes) for shape, _, _ in result for sizes in sizes_in(shape))
    assert largest == rows * length * dim


def sizes_in(shape):
    return [[int(n) for n in dims.split(",") if n] for dims in re.findall(r"\[([\d,]*)\]", shape)]


@functools.cache
def evaluated(layers, axes=(), make=setup, model=None):
    """Return the sums of an evaluation over one microbatch."""
    train = make(config(layers, 4, TIED if model is None else dict(model), **dict(axes)))
    (batch,) = batches(train.config, 1, packed=True)
    first = {name: leaf[:1] for name, leaf in batch.items()}
    step = make_eval_step(train.model, train.config.train, train.mesh)
    with jax.set_mesh(train.mesh):
        placed = jax.device_put(first, batch_shardings(train.mesh, first))
        sums = step(train.state().params, placed, np.ones(SMALL["vocab_size"], np.int32))
    return [float(sum) for sum in sums[:3]]


@pytest.mark.parametrize(
    ("layers", "axes", "model"),
    [
        (3, {"pp": 2, "tp": 2}, TIED),
        pytest.param(5, {"pp": 2, "dp_shard": 2, **INTERLEAVED}, TIED, marks=pytest.mark.slow),
        pytest.param(5, {"pp": 4}, TIED, marks=pytest.mark.slow),
        (6, {"pp": 2, "dp_shard": 2, "tp": 2}, KINDS),
        (3, {"pp": 2}, PARTS),
    ],
)
def test_pipelined_evaluation_equals_plain_evaluation(layers, axes, model):
    model = tuple(model.items())
    result, expected = (evaluated(layers, tuple(a.items()), model=model) for a in (axes, {}))
    np.testing.assert_allclose(result, expected, rtol=1e-5)
