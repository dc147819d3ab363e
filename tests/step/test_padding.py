"""Padding of conversations: updates equal those without padding."""

import functools
import math

import jax
import numpy as np
import pytest

from jaxforge.data.corpus.manifest import FIRST, UNLEARNED
from jaxforge.data.packing import fill_window, split_entries
from jaxforge.model.decoding import Decoder
from jaxforge.model.likelihood import Continuation, Scorer
from jaxforge.model.sampling import Sampling
from jaxforge.state.train_state import Counts
from tests.conftest import tiny_config
from tests.helpers import setup

LENGTH, PADDED = 16, 64  # inputs of a row without padding, and of one that is padded by 75 %
SHAPE = {
    "n_layers": 2, "dim": 32, "vocab_size": 64, "num_experts": 8, "moe_expert_dim": 16,
    "init_std": 0.3,
}  # fmt: skip
MODELS = {
    "softmax": {
        **SHAPE, "moe_top_k": 3, "moe_aux_loss_weight": 0.1, "moe_router_z_loss_weight": 0.1,
        "moe_sequence_aux_loss_weight": 0.1, "moe_capacity_factor": 1.1,
    },
    "sigmoid with sign bias": {
        **SHAPE, "moe_router": "sigmoid_topk", "moe_bias_update": "sign",
        "moe_bias_update_rate": 0.05, "moe_aux_loss_weight": 0.0, "moe_capacity_factor": 0.9,
    },
    "kempnerforge": {
        **SHAPE, "moe_router": "sigmoid_topk", "moe_sequence_aux_loss_weight": 1.0,
        "moe_aux_loss_weight": 0.1, "moe_gradient_scale": True,
    },
    "dense with z-loss": {"n_layers": 2, "dim": 32, "vocab_size": 64},
}  # fmt: skip
Z_LOSS = {"z_loss_weight": 0.1}
CASES = [
    ("softmax", {"grad_sync": "microbatch"}, {}),
    pytest.param(
        "softmax",
        {"grad_sync": "microbatch"},
        {"dp_shard": 2, "ep": 2, "tp": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param("softmax", {"grad_sync": "update"}, {"cp": 2, "ep": 2}, marks=pytest.mark.slow),
    pytest.param(
        "sigmoid with sign bias",
        {"grad_sync": "update"},
        {"pp": 2, "ep": 2},
        marks=pytest.mark.slow,
    ),
    pytest.param("kempnerforge", {"grad_sync": "update"}, {"dp_shard": 2}, marks=pytest.mark.slow),
    pytest.param("dense with z-loss", Z_LOSS, {}, marks=pytest.mark.slow),
    (
        "dense with z-loss",
        {**Z_LOSS, "loss_fn": "chunked_cross_entropy", "ce_vocab_chunk": 32},
        {"cp": 2},
    ),
]


def conversations(rng):
    """Return entries of conversations that fill a row without padding."""
    cuts = sorted(rng.choice(np.arange(2, LENGTH), 2, replace=False))
    rows = np.split(rng.integers(0, 64, LENGTH + 1), cuts)
    for entries in rows:
        entries[: len(entries) // 2] |= UNLEARNED  # the prompt
        entries[0] |= FIRST
    return rows


def run(model, train, axes, length):
    """Return metrics of three updates, and the final state on the host."""
    groups = math.prod(axes.get(name, 1) for name in ("dp_shard", "ep"))
    sizes = {"seq_len": length, "batch_size": 8 // groups, "grad_accum_steps": 2, "max_steps": 8}
    job = tiny_config(
        model={**MODELS[model], "max_seq_len": PADDED},
        train={**sizes, **train},
        distributed={"dp_shard": 1, **axes},
    )
    program, rng = setup(job), np.random.default_rng(0)
    rows = [[fill_window(conversations(rng), length + 1) for _ in range(16)] for _ in range(3)]
    batches = [split_entries(np.stack(row).reshape(2, 8, -1)) for row in rows]
    state, metrics = program.run(program.state(), batches)
    return metrics, jax.device_get((state.params, state.model_state))


@functools.cache
def without_padding(model, z_loss_weight):
    return run(model, {"z_loss_weight": z_loss_weight}, {}, LENGTH)


@pytest.mark.parametrize(("model", "train", "axes"), CASES, ids=str)
def test_padding_does_not_change_updates(model, train, axes):
    result, weights = run(model, train, axes, PADDED)
    expected, expected_weights = without_padding(model, train.get("z_loss_weight", 0.0))
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    for key in ("loss", "grad_norm", *({"losses", "side"} & result.keys())):
        jax.tree.map(close, result[key], expected[key])
    close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=5e-5)
    jax.tree.map(close, weights, expected_weights)
    counted = [
        dict(zip(Counts._fields, item["counts"][-1, :, 1], strict=True))
        for item in (result, expected)
    ]
    assert counted[0]["tokens"] == 3 * 16 * PADDED
    assert counted[0]["tokens"] - counted[0]["padding"] == counted[1]["tokens"]
    assert counted[0]["valid_tokens"] == counted[1]["valid_tokens"]


@pytest.mark.parametrize(
    "model", ["softmax", pytest.param("sigmoid with sign bias", marks=pytest.mark.slow)]
)
def test_expert_counts_exclude_padding(model):
    aux = without_padding(model, 0.0)[0]["side"]
    assignments = 16 * LENGTH * MODELS[model].get("moe_top_k", 2)
    np.testing.assert_array_equal(np.sum(aux["expert_counts"], axis=-1), assignments)


def test_padding_does_not_change_prompt_logits():
    """Experts have little capacity, and padding rows and columns displace no token."""
    job = tiny_config(model={**MODELS["softmax"], "moe_capacity_factor": 0.6})
    program, rng = setup(job), np.random.default_rng(0)
    params, prompts = program.state().params, rng.integers(0, 64, (3, 5))
    run = jax.jit(
        lambda params: program.model.logits(params, program.model.hidden(params, prompts))
    )
    logits = np.asarray(run(params))[:, -1]
    decoder = Decoder(program.model, params, max_tokens=1, sampling=Sampling(0.0), rows=4)
    result = decoder.complete(prompts.tolist(), range(3))
    assert [item.tokens for item in result] == logits.argmax(-1)[:, None].tolist()
    scored = Scorer(program.model, params, max_length=64).score(
        [Continuation(prompt, [7]) for prompt in prompts.tolist()]
    )
    expected = jax.nn.log_softmax(logits)[:, 7]
    np.testing.assert_allclose([item.log_probability for item in scored], expected, rtol=1e-5)
