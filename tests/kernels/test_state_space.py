"""Tests of the state-space layer by chunks against a loop over tokens in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.kernels.context_parallel import to_device_order, to_sequence_order
from jaxforge.kernels.state_space import Inputs, state_space, state_space_step, time_steps

ROWS, LENGTH, HEADS, GROUPS, WIDTH, SIZE = 2, 32, 4, 2, 3, 5
DOCUMENTS = np.stack([np.repeat([0, 1, 2, 3], [13, 1, 2, 16]), np.repeat([0, 1], [31, 1])])


@functools.cache
def drawn():
    """Return x, dt, a, b, c, skip, a state, and the gradients of outputs and last state."""
    rng = np.random.default_rng(0)
    draw = rng.standard_normal
    dt, a = np.exp(draw((ROWS, LENGTH, HEADS)) - 1), -np.exp(draw(HEADS))
    b, c = draw((ROWS, LENGTH, GROUPS, SIZE)), draw((ROWS, LENGTH, GROUPS, SIZE))
    x, skip = draw((ROWS, LENGTH, HEADS, WIDTH)), draw(HEADS)
    state = draw((ROWS, HEADS, WIDTH, SIZE))
    return x, dt, a, b, c, skip, state, draw(x.shape), draw(state.shape)


def recurrence(x, dt, a, b, c, skip, state, ids):
    """Return the outputs and the last state, token by token."""
    b, c = (jnp.repeat(g, HEADS // GROUPS, axis=2) for g in (b, c))
    documents = np.zeros(x.shape[:2], int) if ids is None else ids
    is_start = np.diff(documents, axis=1, prepend=documents[:, :1]) != 0

    def step(state, token):
        x, dt, b, c, is_start = token
        state = jnp.where(is_start[:, None, None, None], 0, state)
        decay = jnp.exp(dt * a)[..., None, None]
        state = decay * state + jnp.einsum("bh,bhp,bhn->bhpn", dt, x, b)
        return state, jnp.einsum("bhpn,bhn->bhp", state, c) + skip[:, None] * x

    tokens = [jnp.moveaxis(array, 1, 0) for array in (x, dt, b, c, is_start)]
    state, outputs = jax.lax.scan(step, state, tokens)
    return jnp.moveaxis(outputs, 0, 1), state


@functools.cache
def by_recurrence(packed):
    """Return outputs, last state, and gradients of the recurrence in float64."""
    *arrays, d_y, d_state = drawn()
    run = functools.partial(recurrence, ids=DOCUMENTS if packed else None)
    with jax.enable_x64(True):
        return values_and_gradients(run, arrays, d_y, d_state)


def values_and_gradients(run, arrays, d_y, d_state):
    @jax.jit
    def compute(arrays, cotangents):
        outputs, pull_back = jax.vjp(run, *arrays)
        return *outputs, *pull_back(cotangents)

    return compute(tuple(arrays), (d_y, d_state))


def by_chunks(x, dt, a, b, c, skip, state, ids=None, **options):
    return state_space(Inputs(x, dt, a, b, c), skip, ids, state, **options)


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize(
    ("chunk", "block"), [(8, 1), (7, 1), (5, 2 * ROWS * HEADS * 25), (64, 1)],
    ids=["chunks", "uneven chunks", "blocks of chunks", "one chunk"],
)  # fmt: skip
def test_chunks_equal_recurrence_in_float64(packed, chunk, block):
    *arrays, d_y, d_state = drawn()
    ids = DOCUMENTS if packed else None
    run = functools.partial(by_chunks, ids=ids, chunk_size=chunk, block=block)
    with jax.enable_x64(True):
        results = values_and_gradients(run, arrays, d_y, d_state)
    for result, right in zip(results, by_recurrence(packed), strict=True):
        assert result.dtype == np.float64
        np.testing.assert_allclose(result, right, rtol=1e-10, atol=1e-10)


ENDS = np.stack([np.repeat([0, 1, 2, 3], [3, 5, 8, 16]), np.repeat([0, 1], [31, 1])])
IS_LAST = np.diff(ENDS, axis=1, append=-1) != 0


def gradients_of_documents(run, dtype):
    """Return gradients of x, dt, a, b, c and skip; last tokens of documents have no output."""
    x, dt, a, b, c, skip, state, d_y, _ = drawn()
    arrays = x, dt, 10 * a, b, c, skip, 0 * state
    cotangents = np.where(IS_LAST[..., None, None], 0, d_y), 0 * state
    inputs = [jnp.asarray(array, dtype) for array in (*arrays, *cotangents)]
    return values_and_gradients(functools.partial(run, ids=ENDS), inputs[:7], *inputs[7:])[2:8]


@functools.cache
def exact_gradients_of_documents():
    with jax.enable_x64(True):
        return gradients_of_documents(recurrence, np.float64)


@pytest.mark.parametrize("chunk", [64, 4], ids=["one chunk", "chunks that end with documents"])
def test_gradients_in_float32_do_not_depend_on_other_documents(chunk):
    """No output depends on the last token of a document if its own has no gradient."""
    result = gradients_of_documents(functools.partial(by_chunks, chunk_size=chunk), np.float32)
    for computed, reference in zip(result, exact_gradients_of_documents(), strict=True):
        assert computed.dtype == np.float32
        if computed.ndim > 1:
            assert not np.asarray(computed)[IS_LAST].any()
        np.testing.assert_allclose(computed, reference, atol=1e-5 * np.abs(reference).max())


def test_steps_and_chunks_continue_from_a_state():
    x, dt, a, b, c, skip, state, *_ = drawn()
    right, right_state, *_ = by_recurrence(packed=False)
    outputs, now = [], state
    with jax.enable_x64(True):
        for tokens in (slice(0, 11), slice(11, 12), slice(12, 13), slice(13, LENGTH)):
            arrays = Inputs(x[:, tokens], dt[:, tokens], a, b[:, tokens], c[:, tokens])
            is_step = arrays.x.shape[1] == 1
            run = state_space_step if is_step else functools.partial(state_space, chunk_size=4)
            y, now = jax.jit(run)(arrays, skip, state=now)
            outputs.append(y)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), right, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(now, right_state, rtol=1e-10, atol=1e-10)


def test_padding_leaves_state_unchanged():
    x, _, a, b, c, skip, state, *_ = drawn()
    is_padding = np.arange(LENGTH) >= np.array([[9], [20]])
    raw, bias = np.zeros((ROWS, LENGTH, HEADS)), np.zeros(HEADS)
    with jax.enable_x64(True):
        dt = time_steps(raw, bias, (0.0, float("inf")), is_padding)
        run = jax.jit(functools.partial(state_space, chunk_size=8))
        _, after = run(Inputs(x, dt, a, b, c), skip, state=state)
        for row, length in enumerate([9, 20]):
            whole = time_steps(raw[:, :length], bias, (0.0, float("inf")))
            short = Inputs(x[:, :length], whole, a, b[:, :length], c[:, :length])
            _, expected = run(short, skip, state=state)
            np.testing.assert_allclose(after[row], expected[row], rtol=1e-12)


def test_time_steps_are_clamped_softplus():
    raw, bias = np.array([[[-9.0, 0.5, 3.0]]]), np.array([1.0, 0.0, -1.0])
    with jax.enable_x64(True):
        steps = time_steps(raw, bias, (0.001, 2.0))
    np.testing.assert_allclose(steps[0, 0], [0.001, np.log1p(np.exp(0.5)), 2.0], rtol=1e-12)


def test_no_array_has_pairs_of_all_tokens():
    tokens = 61  # no other dimension is as long
    shapes = Inputs(
        *(
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in [
                (ROWS, tokens, HEADS, WIDTH), (ROWS, tokens, HEADS), (HEADS,),
                (ROWS, tokens, GROUPS, SIZE), (ROWS, tokens, GROUPS, SIZE),
            ]
        )
    )  # fmt: skip
    ids = jax.ShapeDtypeStruct((ROWS, tokens), jnp.int32)

    def loss(inputs, skip, ids):
        return jnp.sum(state_space(inputs, skip, ids, chunk_size=8, block=1)[0] ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(shapes, shapes.a, ids).compile().as_text()
    sizes = [
        np.prod([int(n) for n in dims.split(",")]) for dims in re.findall(r"\[([\d,]+)\]", compiled)
    ]
    assert max(sizes) < ROWS * HEADS * tokens**2 / 4


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_devices_that_share_sequences_pass_states(strategy):
    x, dt, a, b, c, skip, _, d_y, _ = drawn()
    ids = DOCUMENTS.copy()
    ids[1] = 0  # a document over all devices

    def values(x, dt, a, b, c, skip, ids, **options):
        return state_space(Inputs(x, dt, a, b, c), skip, ids, chunk_size=3, **options)[0]

    def run(arrays, ids, d_y, **options):
        y, pull_back = jax.vjp(lambda *arrays: values(*arrays, ids, **options), *arrays)
        return y, *pull_back(d_y)

    def on_devices(arrays, ids, d_y):
        y, d_x, d_dt, d_a, d_b, d_c, d_skip = run(arrays, ids, d_y, strategy=strategy)
        d_a, d_skip = jax.lax.psum((d_a, d_skip), "cp")
        return y, d_x, d_dt, d_a, d_b, d_c, d_skip

    def reorder(x, order):
        return x if x.ndim == 1 else np.moveaxis(order(np.moveaxis(x, 1, -1), strategy, 4), -1, 1)

    arrays, tokens, whole = (x, dt, a, b, c, skip), P(None, "cp"), P()
    specs = (tokens, tokens, whole, tokens, tokens, whole)
    laid_out = [reorder(x, to_device_order) for x in (*arrays, ids, d_y)]
    with jax.enable_x64(True), jax.set_mesh(jax.make_mesh((4,), ("cp",), (AxisType.Auto,))):
        compute = jax.shard_map(
            on_devices, in_specs=(specs, tokens, tokens), out_specs=(tokens, *specs),
            check_vma=False,
        )  # fmt: skip
        results = jax.jit(compute)(tuple(laid_out[:6]), *laid_out[6:])
    with jax.enable_x64(True):
        expected = jax.jit(run)(arrays, ids, d_y)
    for result, right in zip(results, expected, strict=True):
        in_order = reorder(np.asarray(result), to_sequence_order)
        np.testing.assert_allclose(in_order, right, rtol=1e-10, atol=1e-10)
