"""Rows of tokens, brought to where their experts are and back.

An *assignment* is a token and one of its k experts; T tokens have T k of them, numbered token by
token. *Rows* are places for assignments in the order that products with experts want. Both ways,
and both gradients, are gathers: no row is added to another by index.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Places(NamedTuple):
    """Which row has which assignment.

    Attributes:
        row: of each assignment; N where it has none.
        assignment: of each row; T k where it has none.
    """

    row: Int[Array, "t k"]
    assignment: Int[Array, "n"]


def sorted_places(key_TK: Int[Array, "t k"], n_keys: int) -> tuple[Places, Int[Array, "keys"]]:
    """Rows for all assignments in the order of a key, and how many there are of each key.

    Assignments whose key is `n_keys` come last and have no row.
    """
    flat = key_TK.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.sum(flat[:, None] == jnp.arange(n_keys), axis=0, dtype=jnp.int32)
    n, end = flat.shape[0], jnp.sum(sizes)
    row = jnp.zeros_like(flat).at[order].set(jnp.arange(n, dtype=flat.dtype), unique_indices=True)
    places = Places(
        jnp.where(row < end, row, n).reshape(key_TK.shape),
        jnp.where(jnp.arange(n) < end, order, n).astype(flat.dtype),
    )
    return places, sizes


@jax.custom_vjp
def to_rows(x_TD: Float[Array, "t d"], places: Places) -> Float[Array, "n d"]:
    """The token of each row's assignment; zeros where it has none."""
    return _take(x_TD, places.assignment // places.row.shape[1])


@jax.custom_vjp
def from_rows(rows_ND: Float[Array, "n d"], places: Places) -> Float[Array, "t k d"]:
    """The row of each assignment; zeros where it has none."""
    return _take(rows_ND, places.row)


def _take(rows: Array, at: Array) -> Array:
    return rows.at[at].get(mode="fill", fill_value=0)


def _to_rows(x_TD: Array, places: Places) -> tuple[Array, Places]:
    return to_rows(x_TD, places), places


def _to_rows_back(places: Places, d_rows: Array) -> tuple[Array, None]:
    return jnp.sum(from_rows(d_rows, places), axis=1), None


def _from_rows(rows_ND: Array, places: Places) -> tuple[Array, Places]:
    return from_rows(rows_ND, places), places


def _from_rows_back(places: Places, d_TKD: Array) -> tuple[Array, None]:
    return _take(d_TKD.reshape(-1, d_TKD.shape[-1]), places.assignment), None


to_rows.defvjp(_to_rows, _to_rows_back)
from_rows.defvjp(_from_rows, _from_rows_back)
