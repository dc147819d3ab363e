"""Context parallelism: losses and gradients match a single device."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxforge.training.evaluation import make_eval_step
from tests.conftest import tiny_config
from tests.helpers import (
    EVERY_OPTION,
    LEARNED,
    losses_and_gradients,
    lowered,
    random_batches,
    setup,
)

ROWS = 4
TOKENS = 40  # of a sequence: no other dimension is as long
KINDS = {
    "sliding_window": 5, "attention_chunk_size": 6, "attention_pattern": ["sliding", "chunked"],
    "rope_pattern": [True, False], "qk_l2_norm": True, "attn_temperature_scale": 0.7,
    "attn_temperature_floor": 4,
}  # fmt: skip
EXPERTS = {
    "n_layers": 1, "num_experts": 4, "moe_top_k": 2, "moe_router": "softmax_topk",
    "moe_capacity_factor": 0.8, "moe_aux_loss_weight": 1.0, "moe_sequence_aux_loss_weight": 10.0,
    "moe_score_inputs": True, "init_std": 0.3,
}  # fmt: skip
COHERE = {
    "norm_type": "layernorm", "norm_bias": False, "clip_qkv": 0.1,
    "parallel_residual": True, "shared_norm": True, "qk_norm": True, "qk_norm_type": "layernorm",
    "qk_norm_scope": "each_head", "qk_norm_after_rotary": True,
}  # fmt: skip
GROUPS = {**LEARNED, "n_layers": 1, "n_heads": 16, "n_kv_heads": 2}
RING, ULYSSES = {"cp_strategy": "ring"}, {"cp_strategy": "ulysses"}

UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
CHUNKED = {"loss_fn": "chunked_cross_entropy", "ce_vocab_chunk": 24}

EXCHANGED = (GROUPS, {"dp_shard": 2, "cp": 4, **ULYSSES}, MICROBATCH)
CASES = [  # each strategy with each model, both reductions and losses; the reference has no chunks
    pytest.param(*EXCHANGED, marks=pytest.mark.slow),
    (GROUPS, {"dp_shard": 2, "cp": 4, **RING}, {**MICROBATCH, **CHUNKED}),
    pytest.param(
        EVERY_OPTION, {"dp_shard": 2, "cp": 2, "tp": 2, **ULYSSES}, {**MICROBATCH, **CHUNKED},
        marks=pytest.mark.slow,
    ),
    pytest.param(
        EVERY_OPTION, {"dp_shard": 2, "cp": 2, "tp": 2, **RING}, UPDATE, marks=pytest.mark.slow
    ),
    pytest.param(
        KINDS, {"pp": 2, "cp": 2, "dp_replicate": 2, **RING}, MICROBATCH, marks=pytest.mark.slow
    ),
    pytest.param(KINDS, {"pp": 2, "cp": 2, **ULYSSES}, UPDATE, marks=pytest.mark.slow),
    pytest.param(EXPERTS, {"cp": 2, "ep": 2, **RING}, UPDATE, marks=pytest.mark.slow),
    pytest.param(COHERE, {"pp": 2, "dp_shard": 2, "tp": 2}, UPDATE, marks=pytest.mark.slow),
]  # fmt: skip
MODELS = [case.values[0] if hasattr(case, "values") else case[0] for case in CASES]


def config(model, mesh, train=UPDATE):
    shared = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1) * mesh.get("ep", 1)
    train = {"grad_accum_steps": 2, "z_loss_weight": 1e-3, "seq_len": TOKENS, **train}
    return tiny_config(
        model=model,
        train={"batch_size": ROWS // 2 // shared, **train},
        distributed={"dp_shard": 1, **mesh},
    )


def packed_batches(config, n):
    rng = np.random.default_rng(1)
    batches = random_batches(config, n)
    return [
        {**batch, "segment_ids": np.sort(rng.integers(0, 4, batch["labels"].shape), axis=-1)}
        for batch in batches
    ]


def run(config):
    """Return losses of two batches, and gradients of the layers and all other parameters."""
    losses, grads = losses_and_gradients(setup(config), packed_batches(config, 2))
    stacked = [rows for name, rows in grads.items() if name == "layers"]
    # Stages hold layers in separate rows: flatten to [batches, stages x rows, ...].
    flat = jax.tree.map(lambda x: x.reshape(x.shape[0], config.model.n_layers, -1), stacked)
    remaining = {name: leaf for name, leaf in grads.items() if name != "layers"}
    return losses, ravel_pytree((flat, remaining))[0]


@functools.cache
def alone(index):
    return run(config(MODELS[index], {}))


@pytest.mark.parametrize(("model", "mesh", "train"), CASES, ids=str)
def test_losses_and_gradients_match_single_device(model, mesh, train):
    losses, gradients = run(config(model, mesh, train))
    want, d_want = alone(next(i for i, other in enumerate(MODELS) if other is model))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_allclose(gradients, d_want, atol=1e-5 * np.abs(d_want).max())


@functools.cache
def evaluated(**mesh):
    """Return sums of an evaluation over a microbatch."""
    program = setup(config({}, mesh))
    (batch,) = packed_batches(program.config, 1)
    first = {name: leaf[:1] for name, leaf in batch.items()}
    step = make_eval_step(program.model, program.config.train, program.mesh)
    with jax.set_mesh(program.mesh):
        result = step(program.state().params, program.put(first), np.ones(256, np.int32))
    return [float(item) for item in result[:3]]


@pytest.mark.parametrize("strategy", [RING, ULYSSES], ids=str)
def test_evaluation_sums_do_not_depend_on_cp(strategy):
    np.testing.assert_allclose(evaluated(cp=2, **strategy), evaluated(), rtol=1e-5)


@pytest.mark.parametrize(
    ("case", "kind"), [(EXCHANGED, "all-to-all"), (CASES[1], "collective-permute")], ids=str
)
def test_devices_exchange_heads_or_keys_and_gather_no_activations(case, kind):
    """Collected gradients add no gathers either."""
    program = setup(config(*case), collect=("grads",))
    text = lowered(program, *packed_batches(program.config, 1)).compile().as_text()
    assert f" {kind}(" in text
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathered  # weights
    assert not [shape for shape in gathered if str(TOKENS) in shape.split(",")]
