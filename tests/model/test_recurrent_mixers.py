"""Tests of all recurrent mixers: meshes, packed documents, decoding, 8 bits, moments, resuming."""

import functools

import jax
import numpy as np
import pytest

from jaxforge.model.transformer import Model
from tests.conftest import tiny_config
from tests.helpers import (
    assert_resumes_bit_exactly,
    initial_params,
    loss_and_gradient,
    random_batches,
    setup,
)

ROWS, TOKENS = 4, 24
SHAPE = {"dim": 32, "n_layers": 2, "n_heads": 4, "vocab_size": 64, "ffn_hidden_dim": 48,
         "init_std": 0.1, "norm_eps": 1e-3}  # fmt: skip
MIXERS = {
    "gated_delta_net": {
        "key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 16, "conv_size": 3,
    },
    "kimi_delta_attention": {"heads": 4, "head_dim": 8, "conv_size": 3},
    "mamba2": {"heads": 8, "head_dim": 8, "state_size": 6, "groups": 2, "chunk_size": 5},
    "short_convolution": {"conv_size": 5, "bias": True},
}  # fmt: skip
SIDE_BY_SIDE = "attention+mamba2"
EXPERTS = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 16, "moe_shared_experts": 1}
EXPERT_PARALLEL = {"dp_shard": 2, "ep": 2}
INTERLEAVED = {"pp": 2, "pp_schedule": "interleaved_1f1b", "pp_chunks": 2}
RING = {"dp_shard": 2, "cp": 2, "tp": 2, "cp_strategy": "ring"}
FP8 = {"mixed_precision": "fp8", "fp8_scaling": "delayed", "fp8_amax_history_len": 3,
       "num_layers_at_start_in_bf16": 0, "num_layers_at_end_in_bf16": 0,
       "activation_checkpointing": "selective"}  # fmt: skip

all_mixers = pytest.mark.parametrize("mixer", [*MIXERS, SIDE_BY_SIDE])


def config(mixer, model=(), train=(), **mesh):
    """Return a config whose layers all have this mixer, or these."""
    own = {"mixer_pattern": (mixer,)}
    own |= {name: MIXERS[name] for name in mixer.split("+") if name in MIXERS}
    if mixer == SIDE_BY_SIDE:
        own |= {"mixer_multipliers": {"attention": 0.7, "mamba2": 0.4}}
    groups = mesh.get("dp_shard", 1) * mesh.get("ep", 1)
    rows = {"batch_size": ROWS // groups, "seq_len": TOKENS, "grad_accum_steps": 2}
    return tiny_config(
        model={**SHAPE, **own, **dict(model)},
        train={**rows, **dict(train)},
        distributed={"dp_shard": 1, **mesh},
        scheduler={"name": "none"},
    )


def packed_batches(job, n):
    batches = random_batches(job, n)
    ends = np.random.default_rng(1).random(batches[0]["labels"].shape) < 0.15
    return [{**batch, "segment_ids": np.cumsum(ends, axis=-1)} for batch in batches]


def values(job):
    """Return the loss of a packed batch, and all gradients."""
    return loss_and_gradient(setup(job), packed_batches(job, 1)[0])


@functools.cache
def alone(mixer, model):
    return values(config(mixer, model))


@pytest.mark.parametrize(
    ("mixer", "model", "mesh", "grad_sync"),
    [
        pytest.param(
            "gated_delta_net", {**EXPERTS, "n_layers": 1}, EXPERT_PARALLEL, "update",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gated_delta_net", {"n_layers": 4}, INTERLEAVED, "update", marks=pytest.mark.slow
        ),
        pytest.param(
            "gated_delta_net", EXPERTS, EXPERT_PARALLEL, "microbatch", marks=pytest.mark.slow
        ),
        pytest.param("mamba2", EXPERTS, EXPERT_PARALLEL, "update", marks=pytest.mark.slow),
        pytest.param("mamba2", EXPERTS, EXPERT_PARALLEL, "microbatch", marks=pytest.mark.slow),
        pytest.param("mamba2", {"n_layers": 4}, INTERLEAVED, "update", marks=pytest.mark.slow),
        pytest.param(
            "gated_delta_net", {**EXPERTS, "n_layers": 4}, {**INTERLEAVED, **EXPERT_PARALLEL},
            "microbatch", marks=pytest.mark.slow,
        ),
        pytest.param("short_convolution", {}, RING, "microbatch", marks=pytest.mark.slow),
        ("kimi_delta_attention", {}, RING, "update"),
        pytest.param(SIDE_BY_SIDE, {}, RING, "microbatch", marks=pytest.mark.slow),
        *(
            pytest.param(mixer, model, mesh, grad_sync, marks=pytest.mark.slow)
            for mixer in ("kimi_delta_attention", "short_convolution", SIDE_BY_SIDE)
            for model, mesh, grad_sync in (
                ({}, RING, "update"),
                ({}, {"cp": 2, "tp": 2, "cp_strategy": "ulysses"}, "microbatch"),
                ({}, {"pp": 2, "cp": 2, "cp_strategy": "ulysses"}, "update"),
                (EXPERTS, EXPERT_PARALLEL, "update"),
                ({"n_layers": 4}, INTERLEAVED, "update"),
            )
        ),
    ],
)  # fmt: skip
def test_losses_and_gradients_match_single_device(mixer, model, mesh, grad_sync):
    losses, gradients = values(config(mixer, model, {"grad_sync": grad_sync}, **mesh))
    expected_losses, expected = alone(mixer, tuple(model.items()))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(gradients, expected, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize("mixer", ["kimi_delta_attention", "short_convolution", SIDE_BY_SIDE])
def test_packed_documents_equal_separate_ones(mixer):
    model = Model(config(mixer).model)
    params = jax.device_get(initial_params(model))
    tokens = np.random.default_rng(0).integers(0, 64, (1, TOKENS))
    ids = np.repeat([[0, 1, 2]], [7, 4, 13], axis=1)
    hidden = jax.jit(model.hidden)
    packed = hidden(params, tokens, ids)[0]
    for i in range(3):
        first, end = np.flatnonzero(ids[0] == i)[[0, -1]] + [0, 1]
        alone = np.zeros_like(tokens)
        alone[0, : end - first] = tokens[0, first:end]
        separate = hidden(params, alone, np.zeros_like(ids))[0, : end - first]
        np.testing.assert_allclose(packed[first:end], separate, atol=2e-5)


@pytest.mark.slow
@all_mixers
def test_8_bit_products_do_not_depend_on_the_mesh(mixer):
    """Rounding of bf16 sums moves some values to the next of 8 bits."""
    results = []
    for mesh in ({}, {"dp_shard": 2, "tp": 2}):
        program = setup(config(mixer, train=FP8, **mesh))
        results.append(program.run(program.state(), packed_batches(program.config, 2))[1])
    np.testing.assert_allclose(results[1]["loss"], results[0]["loss"], rtol=1e-3)
    np.testing.assert_allclose(results[1]["grad_norm"], results[0]["grad_norm"], rtol=3e-2)


@pytest.mark.slow
@all_mixers
def test_run_in_8_bits_resumes_bit_exactly(mixer, tmp_path):
    """Products and moments have 8 bits, and experts are spread over devices."""
    train = {**FP8, "opt_state_dtype": "8bit"}
    program = setup(config(mixer, {**EXPERTS, "dim": 64}, train, ep=2))  # whole blocks of moments
    batches = packed_batches(program.config, 3)
    state, _ = program.run(program.state(), batches[:2])
    expected = assert_resumes_bit_exactly(program, state, batches[2:], tmp_path)
    assert {"int8", "uint8"} <= {leaf.dtype.name for leaf in jax.tree.leaves(expected.opt_state)}
    for name in mixer.split("+"):
        recorded = expected.model_state["layers"][name]
        projections = {key for key in expected.params["layers"][name] if key.endswith("_proj")}
        assert recorded.keys() == projections
        assert all(np.all(history > 0) for history in jax.tree.leaves(recorded))
