"""Tests of the capacity of experts: the same tokens are dropped on any devices."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.config.model import ModelConfig
from jaxforge.kernels.context_parallel import to_device_order, to_sequence_order
from jaxforge.model.capacity import within_capacity

ROWS, TOKENS, EXPERTS, K = 4, 24, 4, 2


def assignments(padding):
    """Return distinct experts [rows, tokens, k] of random tokens; the first are preferred."""
    rng = np.random.default_rng(0)
    scores = rng.random((ROWS, TOKENS, EXPERTS)) * np.arange(1, 1 + EXPERTS)[::-1]
    experts = np.argsort(-scores, axis=-1)[..., :K].astype(np.int32)
    experts[rng.random((ROWS, TOKENS)) < padding] = EXPERTS
    return experts


def taken(experts, factor):
    """Return experts within the capacity: a loop over tokens in the order of the microbatch."""
    n_real = np.sum(experts[..., 0] < EXPERTS)
    capacity = max(1, int(np.ceil(n_real * K / EXPERTS * factor)))
    counts, result = np.zeros((EXPERTS + 1, K), int), experts.copy()
    for index in np.ndindex(experts.shape):
        slot = experts[index], index[-1]
        result[index] = experts[index] if counts[slot] < capacity else EXPERTS
        counts[slot] += 1
    return result


@pytest.mark.parametrize(
    ("strategy", "shape", "padding"),
    [
        ("ulysses", {"cp": 1, "dp_shard": 4}, 0.0),
        ("ulysses", {"cp": 4, "dp_shard": 2}, 0.3),
        ("ring", {"cp": 2, "dp_shard": 4}, 0.0),
        ("ring", {"cp": 4, "dp_shard": 1}, 0.3),
    ],
    ids=str,
)
def test_experts_take_tokens_in_order_of_microbatch_on_any_mesh(strategy, shape, padding):
    config = ModelConfig(num_experts=EXPERTS, moe_top_k=K, moe_capacity_factor=0.8)
    experts, of_device = assignments(padding), P("dp_shard", "cp")
    mesh = jax.make_mesh(tuple(shape.values()), tuple(shape), (AxisType.Auto,) * len(shape))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=of_device, out_specs=of_device)
    def run(experts):
        flat = experts.reshape(-1, K)
        within = within_capacity(flat, config, len(experts), strategy, has_padding=padding > 0)
        return within.reshape(experts.shape)

    laid_out = to_device_order(experts, strategy, shape["cp"], axis=1)
    with jax.set_mesh(mesh):
        result = to_sequence_order(np.asarray(run(laid_out)), strategy, shape["cp"], axis=1)
    expected = taken(experts, config.moe_capacity_factor)
    assert np.mean(expected != experts) > 0.05
    np.testing.assert_array_equal(result, expected)
