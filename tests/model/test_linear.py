"""Tests of linear layers: heads are dimensions of their products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.model import linear
from jaxforge.model.linear import Backward, Matrix

HEADS, HEAD, WIDTH = 3, 4, 6
AXES = (None, None)
PRODUCTS = [linear._product, linear._product_reduced_in_other_dtype]


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("regathers", [False, True])
@pytest.mark.parametrize(
    ("matrix", "shapes"),
    [
        (Matrix(AXES, out_head=HEAD), ((WIDTH,), (HEADS, HEAD))),
        (Matrix(AXES, inp_head=HEAD), ((HEADS, HEAD), (WIDTH,))),
        (Matrix(AXES, out_head=HEAD, inp_head=2), ((3, 2), (HEADS, HEAD))),
    ],
)
def test_products_with_heads_match_the_formula(product, regathers, matrix, shapes):
    """y = x Wᵀ + b, dx = dy W, dW = dyᵀ x and db = Σ dy, for heads that follow each other."""
    inp, out = (int(np.prod(shape)) for shape in shapes)
    rng = np.random.default_rng(0)
    x, d_y, weight, bias = (
        rng.standard_normal(shape, np.float32) for shape in ((5, inp), (5, out), (out, inp), (out,))
    )

    def by_head(x, weight, bias):
        backward = Backward(regathers=regathers)
        return product(matrix, jnp.dtype(jnp.float32), backward, x, weight, bias)

    y, pullback = jax.vjp(by_head, x.reshape(5, *shapes[0]), weight, bias)
    assert y.shape == (5, *shapes[1])
    results = y, *pullback(jnp.asarray(d_y.reshape(y.shape)))
    right = x @ weight.T + bias, d_y @ weight, d_y.T @ x, d_y.sum(0)
    for result, expected in zip(results, right, strict=True):
        np.testing.assert_allclose(np.ravel(result), expected.ravel(), rtol=1e-5, atol=1e-5)


def test_heads_are_split_before_the_product():
    """A split of the result would be a transposition on TPUs."""
    matrix = Matrix(AXES, out_head=HEAD)
    x, weight = jnp.zeros((5, WIDTH)), jnp.zeros((HEADS * HEAD, WIDTH))
    program = jax.make_jaxpr(lambda *a: linear._product(matrix, x.dtype, Backward(), *a, None))(
        x, weight
    )
    (product,) = (e for e in program.jaxpr.eqns if e.primitive.name == "dot_general")
    assert product.outvars[0].aval.shape == (5, HEADS, HEAD)
