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
    place: Int[Array, "n"]

    @property
    def back(self) -> "Order":
        """What undoes it."""
        return Order(self.place, self.row)


class Places(NamedTuple):
    """Which row has which assignment.

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


def sorted_places(key_TK: Int[Array, "t k"], n_keys: int) -> tuple[Places, Int[Array, "keys"]]:
    """Rows for all assignments in the order of a key, and how many there are of each key.

    Assignments whose key is `n_keys` come last and have no row.
    """
    order, sizes = sorted_order(key_TK.reshape(-1), n_keys)
    n, end = key_TK.size, jnp.sum(sizes)
    row = jnp.where(order.place < end, order.place, n).reshape(key_TK.shape)
    return Places(row, jnp.where(jnp.arange(n) < end, order.row, n)), sizes


@jax.custom_vjp
def reordered(rows_ND: Float[Array, "n d"], order: Order) -> Float[Array, "n d"]:
    """Rows in another order."""
    return rows_ND.at[order.row].get(mode="promise_in_bounds", unique_indices=True)


def _reordered(rows_ND: Array, order: Order) -> tuple[Array, Order]:
    return reordered(rows_ND, order), order


def _reordered_back(order: Order, d_rows: Array) -> tuple[Array, None]:
    return reordered(d_rows, order.back), None


reordered.defvjp(_reordered, _reordered_back)


@jax.custom_vjp
def to_rows(x_TD: Float[Array, "t d"], places: Places) -> Float[Array, "n d"]:
    """The token of each row's assignment; anything where it has none."""
    return x_TD.at[places.assignment // places.row.shape[1]].get(mode="clip")


def _to_rows(x_TD: Array, places: Places) -> tuple[Array, Places]:
    return to_rows(x_TD, places), places


def _to_rows_back(places: Places, d_rows: Array) -> tuple[Array, None]:
    return summed(d_rows, places), None


to_rows.defvjp(_to_rows, _to_rows_back)


@jax.custom_vjp
def summed(rows_ND: Float[Array, "n d"], places: Places) -> Float[Array, "t d"]:
    """The rows of each token's assignments, added up in float32; `to_rows` transposed."""
    # One by one: XLA:CPU runs a sum over an axis apart from what makes its terms.
    of_tokens = (rows_ND.at[row].get(mode="fill", fill_value=0) for row in places.row.T)
    y_TD = functools.reduce(operator.add, (rows.astype(jnp.float32) for rows in of_tokens))
    return y_TD.astype(rows_ND.dtype)


def _summed(rows_ND: Array, places: Places) -> tuple[Array, Places]:
    return summed(rows_ND, places), places


def _summed_back(places: Places, d_TD: Array) -> tuple[Array, None]:
    return to_rows(d_TD, places), None


summed.defvjp(_summed, _summed_back)


@jax.custom_vjp
def weights_of_rows(weight_TK: Float[Array, "t k"], places: Places) -> Float[Array, "n"]:
    """The weight of each row's assignment; anything where it has none."""
    return weight_TK.reshape(-1).at[places.assignment].get(mode="clip")


def _weights_of_rows(weight_TK: Array, places: Places) -> tuple[Array, Places]:
    return weights_of_rows(weight_TK, places), places


def _weights_of_rows_back(places: Places, d_N: Array) -> tuple[Array, None]:
    return d_N.at[places.row].get(mode="fill", fill_value=0), None


weights_of_rows.defvjp(_weights_of_rows, _weights_of_rows_back)
