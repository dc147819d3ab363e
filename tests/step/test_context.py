"""Devices that share sequences learn what one device learns."""

import functools
import re

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from jaxforge.training.evaluation import make_eval_step
from tests.conftest import tiny_config
from tests.helpers import EVERY_OPTION, LEARNED, hlo, random_batches, setup

ROWS = 4
TOKENS = 40  # of a sequence: no other dimension is as long
WINDOWS = {
    "sliding_window": 5, "attention_pattern": ["sliding", "full"],
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "moe_top_k": 2, "moe_router": "softmax_topk",
    "moe_aux_loss_weight": 1.0, "moe_sequence_aux_loss_weight": 10.0,
}  # fmt: skip
GROUPS = {"n_heads": 16, "n_kv_heads": 2}
CHUNKS = {"attention_chunk_size": 6}
RING, ULYSSES = {"cp_strategy": "ring"}, {"cp_strategy": "ulysses"}

CASES = [
    (GROUPS, {"cp": 4, **ULYSSES}, "update"),
    (GROUPS, {"cp": 4, **RING}, "microbatch"),
    (EVERY_OPTION, {"dp_shard": 2, "cp": 2, "tp": 2, **ULYSSES}, "microbatch"),
    (EVERY_OPTION, {"dp_shard": 2, "cp": 2, "tp": 2, **RING}, "update"),
    (WINDOWS, {"pp": 2, "cp": 2, "dp_replicate": 2, **RING}, "microbatch"),
    (WINDOWS, {"pp": 2, "cp": 2, **ULYSSES}, "update"),
    (CHUNKS, {"cp": 4, **RING}, "update"),
    (LEARNED, {"dp_shard": 2, "cp": 4, **RING}, "update"),
    (EXPERTS, {"cp": 2, "ep": 2, **RING}, "update"),
]


def config(model, mesh, grad_sync="update", loss="cross_entropy"):
    shared = mesh.get("dp_shard", 1) * mesh.get("dp_replicate", 1) * mesh.get("ep", 1)
    train = {"grad_accum_steps": 2, "grad_sync": grad_sync, "loss_fn": loss, "z_loss_weight": 1e-3}
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


def learned(config):
    """Losses of two steps, and all gradients of the layers and the rest."""
    ours = setup(config, collect=("grads",))
    _, metrics = ours.run(ours.state(), packed_batches(ours.config, 2))
    grads = jax.device_get(metrics["grads"])
    stacked = [rows for name, rows in grads.items() if name == "layers"]
    # Stages hold layers in other places: [steps, stages x rows, ...] either way.
    flat = jax.tree.map(lambda x: x.reshape(x.shape[0], config.model.n_layers, -1), stacked)
    rest = {name: leaf for name, leaf in grads.items() if name != "layers"}
    return metrics["loss"], ravel_pytree((flat, rest))[0]


@functools.cache
def alone(index):
    return learned(config(CASES[index][0], {}))


@pytest.mark.parametrize(("model", "mesh", "grad_sync"), CASES, ids=str)
def test_losses_and_gradients_are_those_of_one_device(model, mesh, grad_sync):
    losses, gradients = learned(config(model, mesh, grad_sync))
    first = next(i for i, case in enumerate(CASES) if case[0] is model)
    want, d_want = alone(first)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_allclose(gradients, d_want, atol=1e-5 * np.abs(d_want).max())


@pytest.mark.parametrize("way", [RING, ULYSSES], ids=str)
def test_the_loss_by_chunks_of_the_vocabulary_is_the_same(way):
    losses, gradients = learned(
        config({}, {"dp_shard": 2, "cp": 2, **way}, "microbatch", "chunked_cross_entropy")
    )
    want, d_want = learned(config({}, {}))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_allclose(gradients, d_want, atol=1e-5 * np.abs(d_want).max())


@pytest.mark.parametrize("way", [RING, ULYSSES], ids=str)
def test_evaluation_gives_the_same_sums(way):
    def sums(mesh):
        ours = setup(config({}, mesh))
        (batch,) = packed_batches(ours.config, 1)
        first = {name: leaf[:1] for name, leaf in batch.items()}
        step = make_eval_step(ours.model, ours.config.train, ours.mesh)
        with jax.set_mesh(ours.mesh):
            found = step(ours.state().params, ours.put(first), np.ones(256, np.int32))
        return [float(one) for one in found[:3]]

    np.testing.assert_allclose(sums({"cp": 2, **way}), sums({}), rtol=1e-5)


@pytest.mark.parametrize(
    ("way", "kind"), [(RING, "collective-permute"), (ULYSSES, "all-to-all")], ids=str
)
def test_devices_exchange_heads_or_keys_and_gather_no_activations(way, kind):
    train = {"batch_size": 2, "seq_len": TOKENS, "grad_sync": "microbatch"}
    text = hlo(setup(tiny_config(train=train, distributed={"dp_shard": 2, "cp": 4, **way})))
    assert f" {kind}(" in text
    gathered = re.findall(r"= f32\[([\d,]+)\]\S* all-gather\(", text)
    assert gathered  # weights
    assert not [shape for shape in gathered if str(TOKENS) in shape.split(",")]
