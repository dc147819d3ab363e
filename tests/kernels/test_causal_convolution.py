"""Tests of the causal convolution against a loop over tokens in float64."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxforge.kernels.causal_convolution import causal_convolution
from jaxforge.kernels.context_parallel import to_device_order, to_sequence_order

ROWS, LENGTH, CHANNELS, WIDTH = 2, 16, 3, 4
DOCUMENTS = np.array([[0] * 5 + [1] * 2 + [2] * 9, [0] * 15 + [1]], np.int32)


def drawn():
    """Return inputs, weight, bias, earlier inputs and the gradient of the outputs."""
    rng = np.random.default_rng(0)
    x, d_y = (rng.standard_normal((ROWS, LENGTH, CHANNELS)) for _ in range(2))
    weight, bias = rng.standard_normal((CHANNELS, WIDTH)), rng.standard_normal(CHANNELS)
    return x, weight, bias, rng.standard_normal((ROWS, CHANNELS, WIDTH - 1)), d_y


def convolved_by_loop(x, weight, bias, state=None, ids=None):
    """Return the outputs, token by token and offset by offset."""
    ids = np.zeros(x.shape[:2]) if ids is None else ids
    y = np.zeros_like(x) + bias
    for row in range(len(x)):
        for t in range(x.shape[1]):
            for offset in range(WIDTH):
                source = t - offset
                if source >= 0 and ids[row, source] == ids[row, t]:
                    y[row, t] += weight[:, WIDTH - 1 - offset] * x[row, source]
                elif source < 0 and state is not None and ids[row, 0] == ids[row, t]:
                    y[row, t] += weight[:, WIDTH - 1 - offset] * state[row, :, source]
    return y


def gradients_by_loop(x, weight, bias, d_y, ids=None):
    """Return the gradients of inputs, weight and bias: a convolution is linear in each of them."""
    convolve = functools.partial(convolved_by_loop, ids=ids)

    def along(name, shape):
        gradient = np.zeros(shape)
        for i in np.ndindex(*shape):
            unit = np.zeros(shape)
            unit[i] = 1
            inputs = {"x": x, "weight": weight, "bias": np.zeros_like(bias)} | {name: unit}
            gradient[i] = np.sum(convolve(**inputs) * d_y)
        return gradient

    return along("x", x.shape), along("weight", weight.shape), d_y.sum((0, 1))


@pytest.mark.parametrize("ids", [None, DOCUMENTS], ids=["one document", "packed"])
def test_convolution_equals_loop_in_float64(ids):
    x, weight, bias, _, d_y = drawn()
    with jax.enable_x64(True):

        @jax.jit
        def run(inputs, d_y):
            y, pull_back = jax.vjp(
                lambda *inputs: causal_convolution(*inputs, segment_ids=ids)[0], *inputs
            )
            return y, pull_back(d_y)

        y, gradients = run((x, weight, bias), d_y)
    np.testing.assert_allclose(y, convolved_by_loop(x, weight, bias, ids=ids), atol=1e-12)
    for gradient, right in zip(
        gradients, gradients_by_loop(x, weight, bias, d_y, ids), strict=True
    ):
        np.testing.assert_allclose(gradient, right, atol=1e-12)


def test_sequence_in_steps_equals_whole_sequence():
    x, weight, bias, state, _ = drawn()
    whole = convolved_by_loop(x, weight, bias, state)
    with jax.enable_x64(True):
        for cuts in [(5,), (1, 2, 9)]:
            outputs, now = [], state
            for part in np.split(x, cuts, axis=1):
                y, now = causal_convolution(part, weight, bias, state=now)
                outputs.append(y)
            np.testing.assert_allclose(np.concatenate(outputs, axis=1), whole, atol=1e-12)
            np.testing.assert_array_equal(now, x[:, 1 - WIDTH :].swapaxes(1, 2))


def test_state_ignores_padding():
    x, weight, bias, state, _ = drawn()
    lengths = np.array([0, 2])
    with jax.enable_x64(True):
        after = causal_convolution(x, weight, bias, state=state, lengths=lengths)[1]
        after_two = causal_convolution(x[:, :2], weight, bias, state=state)[1]
    np.testing.assert_array_equal(after, np.stack([state[0], after_two[1]]))


def test_state_holds_last_document_only():
    x, weight, bias, _, _ = drawn()
    with jax.enable_x64(True):
        state = causal_convolution(x, weight, bias, segment_ids=DOCUMENTS)[1]
    expected = x[:, 1 - WIDTH :].swapaxes(1, 2).copy()
    expected[1, :, :-1] = 0  # the last document of row 1 has one token
    np.testing.assert_array_equal(state, expected)


@pytest.mark.parametrize("strategy", [pytest.param("ulysses", marks=pytest.mark.slow), "ring"])
def test_devices_that_share_sequences_compute_same_convolution(strategy):
    x, weight, bias, _, d_y = drawn()
    x, d_y = (np.concatenate([a, a[::-1] + 1], axis=1) for a in (x, d_y))  # 4 tokens in each part
    ids = np.concatenate([DOCUMENTS, DOCUMENTS + 2], axis=1)

    def values_and_gradients(convolve, x, d_y, weight, bias, ids):
        y, pull_back = jax.vjp(lambda *inputs: convolve(*inputs, ids)[0], x, weight, bias)
        return y, *pull_back(d_y)

    def on_devices(*arrays):
        convolve = functools.partial(causal_convolution, strategy=strategy)
        run = functools.partial(values_and_gradients, convolve)
        y, d_x, *of_weights = run(*arrays)
        return y, d_x, *(jax.lax.psum(gradient, "cp") for gradient in of_weights)

    tokens, whole = P(None, "cp"), P()
    laid_out = [in_device_order(a, strategy) for a in (x, d_y)]
    with jax.enable_x64(True), jax.set_mesh(jax.make_mesh((4,), ("cp",), (AxisType.Auto,))):
        run = jax.shard_map(
            on_devices, in_specs=(tokens, tokens, whole, whole, tokens),
            out_specs=(tokens, tokens, whole, whole), check_vma=False,
        )  # fmt: skip
        y, d_x, *of_weights = jax.jit(run)(*laid_out, weight, bias, in_device_order(ids, strategy))
    with jax.enable_x64(True):
        expected = values_and_gradients(causal_convolution, x, d_y, weight, bias, ids)
    results = (in_sequence_order(y, strategy), in_sequence_order(d_x, strategy), *of_weights)
    for result, right in zip(results, expected, strict=True):
        np.testing.assert_allclose(result, right, atol=1e-12)


def in_device_order(x, strategy):
    return np.moveaxis(to_device_order(np.moveaxis(x, 1, -1), strategy, 4), -1, 1)


def in_sequence_order(x, strategy):
    return np.moveaxis(to_sequence_order(np.moveaxis(x, 1, -1), strategy, 4), -1, 1)
