"""Tests of layers with Gated DeltaNet: packed documents, decoding, meshes, cost and rules."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from jaxforge.config import rules
from jaxforge.config.mixers import GatedDeltaNetConfig
from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels.gated_delta import working_values
from jaxforge.model.decoding import Decoder
from jaxforge.model.flops import flops_per_token
from jaxforge.model.mixers.gated_delta_net import GatedDeltaNet
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model
from jaxforge.step.memory import step_memory
from tests.conftest import tiny_config
from tests.helpers import drawn, loss_and_gradient, lowered, random_batches, setup

NET = {"key_heads": 2, "value_heads": 4, "key_head_dim": 8, "value_head_dim": 6, "conv_size": 3}
SHAPE = {
    "dim": 32, "n_layers": 2, "vocab_size": 64, "ffn_hidden_dim": 48, "norm_eps": 1e-3,
    "mixer_pattern": ["gated_delta_net", "attention"], "gated_delta_net": NET,
}  # fmt: skip
GREEDY = Sampling(temperature=0.0)


@functools.cache
def toy(init_std=0.1):
    config = tiny_config(model={**SHAPE, "init_std": init_std}, train={"seed": 0})
    return Model(config.model), drawn(config)


@functools.cache
def compiled():
    model = toy()[0]
    return jax.jit(lambda params, *tokens: model.logits(params, model.hidden(params, *tokens)))


def logits(tokens, ids=None, init_std=0.1):
    """Return the logits of one row, padded to 32 tokens."""
    padded = [np.pad(x, (0, 32 - len(x)), mode="edge")[None] for x in (tokens, ids or tokens)]
    ids = () if ids is None else (padded[1],)
    return np.asarray(compiled()(toy(init_std)[1], padded[0], *ids))[0, : len(tokens)]


def test_packed_documents_equal_separate_documents():
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 64, n).tolist() for n in (5, 1, 17, 9)]
    ids = [i for i, document in enumerate(documents) for _ in document]
    alone = np.concatenate([logits(document) for document in documents])
    np.testing.assert_allclose(
        logits([token for document in documents for token in document], ids), alone, atol=1e-5
    )


def test_decoding_matches_full_forward_for_padded_prompts():
    """Prompts of 1 and 3 tokens have padding, and fewer tokens than a convolution or a chunk."""
    prompts, n_tokens = [[5], [7, 1, 60], list(range(20))], 6
    completions = Decoder(*toy(0.5), n_tokens, GREEDY).complete(prompts, range(3))
    for prompt, (continuation, _) in zip(prompts, completions, strict=True):
        best = logits(prompt + continuation, init_std=0.5).argmax(-1)
        assert best[len(prompt) - 1 : -1].tolist() == continuation


def test_decoding_state_has_constant_size():
    """A state of d x v numbers per value head, and W - 1 inputs of each channel."""
    short, long = (
        GatedDeltaNet.empty_cache(toy()[0].config, 3, length, np.dtype("float16"))
        for length in (8, 4096)
    )
    assert [leaf.shape for leaf in short] == [leaf.shape for leaf in long]
    assert sum(leaf.nbytes for leaf in short) == 3 * (4 * 8 * 6 * 4 + (16 + 16 + 24) * 2 * 2)


def test_flops_count_states_and_no_pairs():
    model = ModelConfig(**{**SHAPE, "n_heads": 4, "mixer_pattern": ["gated_delta_net"]})
    matrices = 32 * (16 + 16 + 24 + 24 + 4 + 4 + 24) + 3 * 32 * 48
    recurrence = 3 * 4 * 8 * 6 + 3 * (16 + 16 + 24)
    expected = 6 * (2 * (matrices + recurrence) + 32 * 64)
    assert flops_per_token(model, 1) == flops_per_token(model, 100) == expected


def test_training_step_has_no_array_of_length_squared():
    config = tiny_config(
        model={**SHAPE, "mixer_pattern": ["gated_delta_net"], "max_seq_len": 192},
        train={"batch_size": 2, "seq_len": 192},
    )
    program = setup(config)
    text = lowered(program, *random_batches(program.config, 1)).as_text()
    shapes = [re.findall(r"\d+", shape) for shape in re.findall(r"tensor<([\dx]+)xf32>", text)]
    assert any("192" in shape for shape in shapes)
    assert not [shape for shape in shapes if shape.count("192") > 1]


def test_memory_estimate_counts_values_of_chunks():
    """Compiled for H100, the rule with Qwen3-Next's heads takes 1.28 GB, and for v5p 0.88 GB."""
    assert 4 * 4096 * working_values(16, 32, 128, 128) == pytest.approx(1.28e9, rel=0.05)
    config = tiny_config(
        model={**SHAPE, "mixer_pattern": ["gated_delta_net"]},
        train={"batch_size": 2, "activation_checkpointing": "full", "grad_sync": "update"},
    )
    shape = rules.mesh_shape(config, 1)
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    needed = step_memory(config, Model(config.model), mesh, state=0)
    assert needed.working > 2 * config.train.seq_len * 4 * working_values(2, 4, 8, 6)


ONLY = {"mixer_pattern": ["gated_delta_net"]}
RING, ULYSSES = {"cp_strategy": "ring"}, {"cp_strategy": "ulysses"}
MESHES = [  # attention is added in the slow cases
    (ONLY, {"dp_shard": 2, "cp": 2, "tp": 2, **RING}, "update"),
    (ONLY, {"dp_shard": 2}, "update"),  # devices without cp: JAX checks what varies over them
    *(
        pytest.param({}, *case, marks=pytest.mark.slow)
        for case in [
            ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, "microbatch"),
            ({"pp": 2, "dp_shard": 2, "tp": 2}, "update"),
            ({"dp_shard": 2, "cp": 2, "tp": 2, **RING}, "microbatch"),
            ({"dp_shard": 2, "cp": 4, **ULYSSES}, "update"),
            ({"cp": 2, "tp": 2, **ULYSSES}, "microbatch"),
        ]
    ),
    pytest.param(
        ONLY, {"pp": 2, "cp": 2, "dp_shard": 2, **RING}, "microbatch", marks=pytest.mark.slow
    ),
]


def values_on(model, mesh, grad_sync="update"):
    """Return losses and gradients of packed sequences on a mesh."""
    data_parallel = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1)
    config = tiny_config(
        model={**SHAPE, **model},
        train={"batch_size": 4 // data_parallel, "seq_len": 48, "grad_sync": grad_sync},
        distributed={"dp_shard": 1, **mesh},
    )
    program, rng = setup(config), np.random.default_rng(1)
    (batch,) = random_batches(config, 1)
    ids = np.sort(rng.integers(0, 4, batch["labels"].shape), axis=-1)
    return loss_and_gradient(program, {**batch, "segment_ids": ids})


@functools.cache
def values_on_one_device(has_attention):
    return values_on({} if has_attention else ONLY, {})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "mesh", "grad_sync"), MESHES, ids=str)
def test_losses_and_gradients_match_single_device(model, mesh, grad_sync):
    losses, gradients = values_on(model, mesh, grad_sync)
    expected_losses, expected = values_on_one_device(model is not ONLY)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(gradients, expected, atol=1e-5 * np.abs(expected).max())


def test_value_heads_must_be_a_multiple_of_key_heads():
    with pytest.raises(ValueError, match="value_heads = 6 must be a multiple of key_heads = 4"):
        GatedDeltaNetConfig(key_heads=4, value_heads=6)


def test_settings_without_layers_are_refused():
    with pytest.raises(ValueError, match=r"mixer_pattern has no .gated_delta_net."):
        ModelConfig(gated_delta_net=NET)


def test_heads_must_be_divisible_by_tp():
    config = tiny_config(model={**SHAPE, "n_kv_heads": 4}, distributed={"dp_shard": 1, "tp": 4})
    with pytest.raises(UserError, match=r"model.gated_delta_net.key_heads = 2"):
        rules.check(config, 4)
