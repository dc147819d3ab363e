"""Rows of tokens, brought to where their experts are and back.

An *assignment* is a token and one of its k experts; T tokens have T k of them, numbered token by
token. *Rows* are places for assignments in the order that products with experts want. Both ways,
and both gradients, are gathers: no row is added to another by index.

A row that has no assignment holds anything, and so does its gradient: products with experts leave
it out, and to clear it would be a pass over all rows, after each gather.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Order(NamedTuple):
    """A permutation of rows: which row each place has, and which place each row."""

    row: Int[Array, "n"]
    position: Int[Array, "n"]

    @property
    def back(self) -> "Order":
        """Return the inverse order."""
        return Order(self.position, self.row)


class Assignments(NamedTuple):
    """Assignment of every row of the grouped products.

    Attributes:
        row: of each assignment; N where it has none.
        assignment: of each row; T k where it has none.
    """

    row: Int[Array, "t k"]
    assignment: Int[Array, "n"]


def sorted_order(key_N: Int[Array, "n"], n_keys: int) -> tuple[Order, Int[Array, "keys"]]:
    """The order of a key, 0 to `n_keys`, and how many rows have each but the last."""
    order = jnp.argsort(key_N, stable=True).astype(key_N.dtype)
    sizes = jnp.sum(key_N[:, None] == jnp.arange(n_keys), axis=0, dtype=jnp.int32)
    ascending = jnp.arange(len(key_N), dtype=key_N.dtype)
    return Order(order, jnp.zeros_like(key_N).at[order].set(ascending, unique_indices=True)), sizes


def sorted_places(key_TK: Int[Array, "t k"], n_keys: int) -> tuple[Assignments, Int[Array, "keys"]]:
    """Rows for all assignments in the order of a key, and how many there are of each key.

    Assignments whose key is `n_keys` come last and have no row.
    """
    order, sizes = sorted_order(key_TK.reshape(-1), n_keys)
    n, end = key_TK.size, jnp.sum(sizes)
    row = jnp.where(order.position < end, order.position, n).reshape(key_TK.shape)
    return Assignments(row, jnp.where(jnp.arange(n) < end, order.row, n)), sizes


@jax.custom_vjp
def reordered(rows_ND: Float[Array, "n d"], order: Order) -> Float[Array, "n d"]:
    """Rows in another order."""
    return rows_ND.at[order.row].get(mode="promise_in_bounds", unique_indices=True)


reordered.defvjp(
    lambda x, order: (reordered(x, order), order),
    lambda order, d_rows: (reordered(d_rows, order.back), None),
)


@jax.custom_vjp
def to_rows(x_TD: Float[Array, "t d"], assignments: Assignments) -> Float[Array, "n d"]:
    """The token of each row's assignment; anything where it has none."""
    return x_TD.at[assignments.assignment // assignments.row.shape[1]].get(mode="clip")


@jax.custom_vjp
def summed(rows_ND: Float[Array, "n d"], assignments: Assignments) -> Float[Array, "t d"]:
    """The rows of each token's assignments, added up in float32; `to_rows` transposed."""
    # One by one: XLA:CPU runs a sum over an axis apart from what makes its terms.
    of_tokens = (rows_ND.at[row].get(mode="fill", fill_value=0) for row in assignments.row.T)
    y_TD = functools.reduce(operator.add, (rows.astype(jnp.float32) for rows in of_tokens))
    return y_TD.astype(rows_ND.dtype)


to_rows.defvjp(
    lambda x, assignments: (to_rows(x, assignments), assignments),
    lambda assignments, d_rows: (summed(d_rows, assignments), None),
)
summed.defvjp(
    lambda x, assignments: (summed(x, assignments), assignments),
    lambda assignments, d_rows: (to_rows(d_rows, assignments), None),
)


@jax.custom_vjp
def weights_of_rows(weight_TK: Float[Array, "t k"], assignments: Assignments) -> Float[Array, "n"]:
    """The weight of each row's assignment; anything where it has none."""
    return weight_TK.reshape(-1).at[assignments.assignment].get(mode="clip")


weights_of_rows.defvjp(
    lambda x, assignments: (weights_of_rows(x, assignments), assignments),
    lambda assignments, d_rows: (d_rows.at[assignments.row].get(mode="fill", fill_value=0), None),
)
