"""Tests of the gated delta rule by chunks against the recurrence of single tokens, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.kernels.context_parallel import to_device_order, to_sequence_order
from jaxforge.kernels.gated_delta import (
    DeltaTokens,
    gated_delta_rule,
    gated_delta_step,
)
from jaxforge.kernels.triangular_inverse import invert_by_rows, invert_unit_lower

ROWS, KEY_HEADS, HEADS, D, V = 2, 2, 4, 6, 5
TOLERANCE = 1e-10

per_head_and_channel = pytest.mark.parametrize("decays", [1, D])


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def drawn(length, decays=1):
    """Return tokens and a state; some tokens forget almost everything, or almost all channels."""
    rng = np.random.default_rng(0)
    key_heads = KEY_HEADS if decays == 1 else HEADS
    q, k = rng.standard_normal((2, ROWS, length, key_heads, D))
    v = rng.standard_normal((ROWS, length, HEADS, V))
    log_decay = -rng.exponential(0.3, (ROWS, length, HEADS, decays))
    log_decay *= rng.choice([1, 30], (length, 1, decays))
    beta = rng.uniform(0, 1, (ROWS, length, HEADS))
    state = rng.standard_normal((ROWS, HEADS, D, V))
    return DeltaTokens(q, k, v, log_decay, beta), state


def recurrence(tokens, ids, state):
    """Compute the definition of the rule, token by token."""
    repeat = HEADS // tokens.k.shape[2]
    q, k = (jnp.repeat(x / jnp.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), repeat, axis=2)
            for x in tokens[:2])  # fmt: skip
    q = q / jnp.sqrt(D)

    def step(s, at):
        q, k, v, log_decay, beta, start = at
        s = jnp.where(start[:, None, None, None], 0, s) * jnp.exp(log_decay)[..., None]
        missing = (v - jnp.einsum("bhdv,bhd->bhv", s, k)) * beta[..., None]
        s = s + k[..., None] * missing[..., None, :]
        return s, jnp.einsum("bhdv,bhd->bhv", s, q)

    starts = np.zeros(tokens.v.shape[:2], bool)
    if ids is not None:
        starts[:, 1:] = np.diff(ids, axis=1) != 0
    xs = [jnp.moveaxis(jnp.asarray(x), 1, 0) for x in (q, k, *tokens[2:], starts)]
    state, y = jax.lax.scan(step, state, xs)
    return jnp.moveaxis(y, 0, 1), state


def compiled_recurrence(tokens, ids, state):
    """Run the recurrence as one program: each operation alone would be compiled as another."""
    return jax.jit(lambda tokens, state: recurrence(tokens, ids, state))(tokens, state)


def values_and_gradients(rule, ids, tokens, state, d_y, d_last):
    """Return outputs, final state, and gradients of all inputs."""
    (y, last), back = jax.vjp(lambda tokens, state: rule(tokens, ids, state), tokens, state)
    return y, last, back((d_y, d_last))


def directions(tokens, state):
    """Return gradients of outputs and final state."""
    rng = np.random.default_rng(1)
    return rng.standard_normal(tokens.v.shape), rng.standard_normal(state.shape)


def packed(length):
    """Return documents with several starts in a chunk, and one at the start of a chunk."""
    ids = np.zeros((ROWS, length), np.int32)
    for row, starts in enumerate([(0, 3, 4, 16, 29), (32, 33)]):
        for start in starts:
            ids[row, start:] += 1
    return ids


@pytest.mark.parametrize("length", [1, 37, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize("maps_states", [False, True])
@per_head_and_channel
def test_chunks_match_recurrence(length, is_packed, maps_states, decays):
    """Length 37 leaves a part of a chunk; with 64 tokens, chunks of 16 pass on four states."""
    tokens, state = drawn(length, decays)
    ids = packed(length) if is_packed else None

    def run(rule):
        run = jax.jit(functools.partial(values_and_gradients, rule, ids))
        return run(tokens, state, *directions(tokens, state))

    expected = run(recurrence)
    result = run(functools.partial(gated_delta_rule, chunk=16, maps_states=maps_states))
    for computed, reference_result in zip(
        jax.tree.leaves(result), jax.tree.leaves(expected), strict=True
    ):
        assert computed.dtype == np.float64
        np.testing.assert_allclose(computed, reference_result, rtol=TOLERANCE, atol=TOLERANCE)


@per_head_and_channel
def test_gradients_in_float32_do_not_depend_on_other_documents(decays):
    """No output depends on the last token of a document if its own has no gradient."""
    tokens, state = drawn(100, decays)
    ids, d_y = packed(100), directions(tokens, state)[0]
    is_last = np.diff(ids, axis=1, append=-1) != 0
    d_y = np.where(is_last[..., None, None], 0, d_y)

    def gradients(rule, dtype):
        def run(tokens, state, d_y):
            return jax.vjp(lambda tokens: rule(tokens, ids, state)[0], tokens)[1](d_y)[0]

        return jax.jit(run)(*jax.tree.map(lambda x: x.astype(dtype), (tokens, 0 * state, d_y)))

    expected = gradients(recurrence, np.float64)
    result = gradients(gated_delta_rule, np.float32)
    for computed, reference_result in zip(result, expected, strict=True):
        assert computed.dtype == np.float32
        assert not np.asarray(computed)[is_last].any()
        np.testing.assert_allclose(
            computed, reference_result, atol=1e-5 * np.abs(reference_result).max()
        )


@per_head_and_channel
def test_large_chunks_match_recurrence(decays):
    tokens, state = drawn(100, decays)
    expected = compiled_recurrence(tokens, packed(100), state)
    result = jax.jit(gated_delta_rule)(tokens, packed(100), state)
    for computed, reference_result in zip(result, expected, strict=True):
        np.testing.assert_allclose(computed, reference_result, rtol=TOLERANCE, atol=TOLERANCE)


@per_head_and_channel
def test_steps_match_recurrence(decays):
    tokens, state = drawn(5, decays)
    y, last = compiled_recurrence(tokens, None, state)
    outputs, step = [], jax.jit(gated_delta_step)
    for i in range(5):
        token = DeltaTokens(*(x[:, i : i + 1] for x in tokens))
        out, state = step(token, state)
        outputs.append(out)
    np.testing.assert_allclose(np.concatenate(outputs, 1), y, rtol=TOLERANCE, atol=TOLERANCE)
    np.testing.assert_allclose(state, last, rtol=TOLERANCE, atol=TOLERANCE)


def test_tokens_without_decay_and_beta_leave_state_unchanged():
    tokens, state = drawn(20)
    silent = tokens._replace(log_decay=0 * tokens.log_decay, beta=0 * tokens.beta)
    np.testing.assert_array_equal(jax.jit(gated_delta_rule)(silent, None, state)[1], state)


def test_repeated_keys_lose_no_digits_in_float32():
    """With equal keys and a beta of 1, powers of the matrix reach binomial coefficients."""
    strict = np.tril(np.ones((64, 64), np.float32), -1)
    expected = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_array_equal(jax.jit(invert_unit_lower)(strict), expected)


def test_tpu_program_solves_triangular_systems():
    """XLA:TPU has a kernel for them, and compiles and runs small exact products slowly."""
    strict = jnp.tril(jnp.asarray(np.random.default_rng(0).standard_normal((3, 64, 64))), -1)
    lowered = jax.jit(invert_unit_lower).trace(strict).lower(lowering_platforms=("tpu",))
    assert "triangular_solve" in lowered.as_text()
    assert "dot_general" not in lowered.as_text()
    result, expected = invert_by_rows(strict / 8), invert_unit_lower(strict / 8)
    np.testing.assert_allclose(result, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_bfloat16_values_keep_float32_state():
    tokens, state = drawn(40)
    half = DeltaTokens(*(jnp.asarray(x, jnp.bfloat16) for x in tokens))
    y, last = jax.jit(gated_delta_rule)(half)
    assert (y.dtype, last.dtype) == (jnp.bfloat16, jnp.float32)
    same = DeltaTokens(*(np.asarray(x, np.float64) for x in half))
    expected = compiled_recurrence(same, None, np.zeros_like(state))[1]
    np.testing.assert_allclose(last, expected, atol=1e-5)


@pytest.mark.parametrize("strategy", [pytest.param("ulysses", marks=pytest.mark.slow), "ring"])
@per_head_and_channel
def test_devices_that_share_sequences_compute_same_rule(strategy, decays):
    """Documents start in the middle of parts and at their first tokens; one spans five parts."""
    tokens, state = drawn(64, decays)
    ids = packed(64)
    ids[1, 56:] += 1
    d_y, no_direction = directions(tokens, state)[0], np.zeros_like(state)
    inputs = tokens, np.zeros_like(state), d_y, no_direction
    reference = jax.jit(functools.partial(values_and_gradients, recurrence, ids))
    y, _, (gradients, _) = reference(*inputs)

    def in_order(change, x):
        return np.moveaxis(change(np.moveaxis(x, 1, -1), strategy, 4), -1, 1)

    def on_device(tokens, ids, d_y):
        rule = functools.partial(gated_delta_rule, strategy=strategy, chunk=16)
        y, back = jax.vjp(lambda tokens: rule(tokens, ids)[0], tokens)
        return y, *back(d_y)

    spec = P(None, "cp")
    laid_out = jax.tree.map(functools.partial(in_order, to_device_order), (tokens, ids, d_y))
    with jax.set_mesh(jax.make_mesh((4,), ("cp",), (AxisType.Auto,))):
        run = jax.shard_map(on_device, in_specs=spec, out_specs=spec, check_vma=False)
        result = jax.jit(run)(*laid_out)
    for computed, reference_result in zip(jax.tree.leaves(result), [y, *gradients], strict=True):
        restored = in_order(to_sequence_order, computed)
        np.testing.assert_allclose(restored, reference_result, rtol=TOLERANCE, atol=TOLERANCE)
