"""Tests of rotary positions: rotation, layout, and Llama 3's scaling."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.config.model import ModelConfig, Rope, RopeScaling
from jaxforge.model.mup import attention_scale
from jaxforge.model.plan import build_layer_plan
from jaxforge.model.rope import attention_factor, inverse_frequencies, rotate, rotation
from jaxforge.model.transformer import Model

HEAD = 16


def config(**options):
    return ModelConfig(dim=4 * HEAD, n_heads=4, **options)


def rope(**options):
    return build_layer_plan(config(**options)).ropes[0]


@functools.partial(jax.jit, static_argnums=(0, 3))
def turned(rope, x, positions, as_matmul=False):
    return rotate(x, rotation(rope, positions), rope_as_matmul=as_matmul)


def rotated(x, positions, **options):
    """Rotate x [positions, heads, h], each row by its position."""
    return np.asarray(turned(rope(**options), x[None], np.asarray(positions)[None]))[0]


def random_heads(n, seed=0):
    return np.random.default_rng(seed).standard_normal((n, 2, HEAD)).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rope_as_matmul_matches_concatenation(dtype):
    x = random_heads(6).astype(dtype).reshape(2, 3, 2, HEAD)
    positions = np.array([[0, 1, 50], [7, 8, 9]])
    computed, other = (turned(rope(), x, positions, method) for method in (True, False))
    assert computed.dtype == dtype
    np.testing.assert_allclose(computed, other, rtol=1e-6 if dtype == jnp.float32 else 0)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_scaling_depends_on_whole_sequence_that_devices_share(scaling):
    """Each device has fewer tokens than the original length, and the sequence has more."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if scaling == "longrope" else {}
    of_rope = RopeScaling(rope_type=scaling, factor=4.0, original_max_seq_len=12, **factors)
    model = Model(config(n_layers=1, rope_scaling=of_rope))
    x, positions = np.zeros((1, 16, 1)), np.arange(16)[None]

    def angles(x, positions):
        return model.context(x, positions=positions).rotations

    with jax.set_mesh(jax.make_mesh((2,), ("cp",), (AxisType.Auto,))):
        tokens = P(None, "cp")
        shared = jax.jit(jax.shard_map(angles, in_specs=(tokens, tokens), out_specs=tokens))
        result = shared(x, positions)
    jax.tree.map(np.testing.assert_array_equal, result, jax.jit(angles)(x, positions))


def test_position_zero_is_identity():
    x = random_heads(1)
    np.testing.assert_array_equal(rotated(x, [0]), x)


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_rotation_pairs_channels_half_a_head_apart(theta):
    """Rotation as complex numbers: z_i · exp(i · position · theta^(-2i / h))."""
    positions, x = np.array([1, 2, 50]), random_heads(3)
    z = x[..., : HEAD // 2] + 1j * x[..., HEAD // 2 :]
    angles = positions[:, None] * theta ** (-2 * np.arange(HEAD // 2) / HEAD)
    turned = z * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotated(x, positions, rope_theta=theta), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("scaling", [None, RopeScaling(original_max_seq_len=64)], ids=str)
def test_scores_depend_only_on_distance(scaling):
    q, k = random_heads(1), random_heads(1, seed=1)

    def scores(at_q, at_k):
        at_q, at_k = np.broadcast_arrays(at_q, at_k)
        turned_q, turned_k = (
            rotated(np.repeat(x, len(at), axis=0), at, rope_scaling=scaling)
            for x, at in ((q, at_q), (k, at_k))
        )
        return np.sum(turned_q * turned_k, axis=(1, 2))

    distances = np.arange(20)
    near = scores(3 + distances, [3])
    np.testing.assert_allclose(scores(103 + distances, [103]), near, rtol=0, atol=1e-4)
    np.testing.assert_allclose(near[0], np.sum(q * k), rtol=0, atol=1e-5)
    assert near.std() > 0.5
    assert np.abs(near - scores([3], 3 + distances)).max() > 0.5  # the direction matters


def test_bfloat16_heads_are_rotated_in_float32():
    positions, x = np.arange(20), random_heads(20).astype(jnp.bfloat16)
    computed = rotated(x, positions)
    assert computed.dtype == jnp.bfloat16
    exact = rotated(np.asarray(x, np.float32), positions)
    np.testing.assert_array_equal(computed, exact.astype(jnp.bfloat16))  # rounded once, at the end


def scaled_frequency(frequency, scaling):
    """Compute `apply_scaling` of Meta's Llama 3.1 code."""
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_max_seq_len / scaling.high_freq_factor:
        return frequency
    if wavelength > scaling.original_max_seq_len / scaling.low_freq_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency


SCALINGS = [RopeScaling(), RopeScaling(factor=32.0, low_freq_factor=2.0, high_freq_factor=16.0)]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
def test_llama3_scaling_matches_reference(scaling):
    plain = inverse_frequencies(Rope(500000.0, None, 128))
    computed = inverse_frequencies(Rope(500000.0, scaling, 128))
    assert computed.dtype == np.float32
    expected = [scaled_frequency(float(f), scaling) for f in plain]
    np.testing.assert_allclose(computed, expected, rtol=1e-6)
    unscaled, scaled = computed == plain, np.isclose(computed * scaling.factor, plain, rtol=1e-6)
    assert unscaled.any()
    assert scaled.any()
    assert (~unscaled & ~scaled).any()  # the ramp between them


def test_yarn_mscale_follows_deepseek():
    """DeepSeek-V3 has 1 and 1; 0.1 ln 40 is 0.36888794541139363."""
    yarn = {"rope_type": "yarn", "factor": 40.0}
    both = RopeScaling(**yarn, mscale=1.0, mscale_all_dim=1.0)
    assert attention_factor(both) == 1.0
    assert attention_scale(config(rope_scaling=both), HEAD) == pytest.approx(
        1.36888794541139363**2 / 4
    )
    uneven = RopeScaling(**yarn, mscale=1.0, mscale_all_dim=0.5)
    assert attention_factor(uneven) == pytest.approx(1.36888794541139363 / 1.18444397270569681)
    assert attention_factor(RopeScaling(**yarn)) == pytest.approx(1.36888794541139363)
    assert attention_factor(RopeScaling(**yarn, mscale_all_dim=0.5)) == attention_factor(
        RopeScaling(**yarn)
    )
    scaled = config(rope_scaling=uneven, attention_scale=0.5)
    assert attention_scale(scaled, HEAD) == pytest.approx(0.5 * 1.18444397270569681**2)
    assert attention_scale(config(rope_scaling=RopeScaling(**yarn)), HEAD) is None


@pytest.mark.parametrize(
    ("keys", "message"),
    [({"rope_type": "yarn", "mscale": 1.0}, "no effect without mscale_all_dim"),
     ({"rope_type": "linear", "mscale_all_dim": 1.0}, 'no effect with rope_type = "linear"')],
)  # fmt: skip
def test_mscale_without_effect_is_a_problem(keys, message):
    with pytest.raises(ValueError, match=message):
        RopeScaling(**keys)


def test_proportional_positions_rotate_the_first_pairs_at_the_frequencies_of_the_whole_head():
    scaling = RopeScaling(rope_type="proportional", factor=2.0, rotated_share=0.25)
    plain, part = (inverse_frequencies(Rope(1e6, s, 64)) for s in (None, scaling))
    np.testing.assert_allclose(part, np.where(np.arange(32) < 8, plain / 2, 0.0))
