"""Gathering of tokens into rows sorted by expert, and of rows back into tokens.

An *assignment* is a pair of a token and one of its k experts; T tokens have T k assignments,
numbered token by token. *Rows* hold assignments in the order that grouped products need. Both
directions and both gradients are gathers: no row is added to another by index.

    token        0     1     2          k = 2 experts each
    experts      1 0   2 1   0 2
    assignment   0 1   2 3   4 5
    row          1 4 | 0 3 | 2 5        assignments in a stable order of their experts

The content of a row without an assignment is undefined, and so is its gradient. Grouped products
skip such rows; clearing them would take a pass over all rows after each gather.
"""

import functools
import operator
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_BITS = 32  # of a packed key and index


class Permutation(NamedTuple):
    """A permutation of rows.

    Attributes:
        row: index of the row that comes to each position.
        position: position of each row, the inverse of `row`.
    """

    row: Int[Array, "n"]
    position: Int[Array, "n"]

    @property
    def inverse(self) -> "Permutation":
        """Inverse permutation."""
        return Permutation(self.position, self.row)


class Assignments(NamedTuple):
    """Assignment of every row of the grouped products.

    Attributes:
        row: row of each assignment; N for an assignment without a row.
        assignment: assignment of each row; T k for a row without an assignment.
    """

    row: Int[Array, "t k"]
    assignment: Int[Array, "n"]


def sort_by_key(key_N: Int[Array, "n"], n_keys: int) -> tuple[Permutation, Int[Array, "keys"]]:
    """Return the stable order of keys, and the number of rows of each key below `n_keys`.

    Keys are 0 to `n_keys`, inclusive.
    """
    order = stable_order(key_N, n_keys)
    sizes = jnp.sum(key_N[:, None] == jnp.arange(n_keys), axis=0, dtype=jnp.int32)
    # The inverse of a permutation by one scatter of unique indices, instead of a second sort.
    ascending = jnp.arange(len(key_N), dtype=key_N.dtype)
    return Permutation(
        order, jnp.zeros_like(key_N).at[order].set(ascending, unique_indices=True)
    ), sizes


def stable_order(key_N: Int[Array, "n"], n_keys: int) -> Int[Array, "n"]:
    """Return the order of `jnp.argsort(key_N, stable=True)` for keys from 0 to `n_keys`.

    One array of integers is sorted, whose high bits are the key and low bits the index. A stable
    sort of keys with their indices takes ten times as long on CPU, and XLA:TPU takes three times as
    long to compile it.
    """
    index_bits = max(1, (len(key_N) - 1).bit_length())
    if n_keys.bit_length() + index_bits > _BITS:
        return jnp.argsort(key_N, stable=True).astype(key_N.dtype)
    index = jnp.arange(len(key_N), dtype=jnp.uint32)
    packed = jax.lax.sort(key_N.astype(jnp.uint32) << index_bits | index, is_stable=False)
    return (packed & ((1 << index_bits) - 1)).astype(key_N.dtype)


def sort_assignments(
    key_TK: Int[Array, "t k"], n_keys: int
) -> tuple[Assignments, Int[Array, "keys"]]:
    """Return the rows of all assignments in the order of a key, and the number of each key.

    Assignments whose key is `n_keys` have no row.
    """
    order, sizes = sort_by_key(key_TK.reshape(-1), n_keys)
    # Assignments with key `n_keys` sort to the positions from `end` on. N marks them as absent: out
    # of bounds for rows, so that `mode="fill"` below reads zeros for them.
    n, end = key_TK.size, jnp.sum(sizes)
    row = jnp.where(order.position < end, order.position, n).reshape(key_TK.shape)
    return Assignments(row, jnp.where(jnp.arange(n) < end, order.row, n)), sizes


# Autodiff would transpose a gather to a scatter with additions. The inverse index is known here, so
# that every gradient below is a gather by the other index instead.
@jax.custom_vjp
def permute_rows(rows_ND: Float[Array, "n d"], order: Permutation) -> Float[Array, "n d"]:
    """Return the rows in another order."""
    return rows_ND.at[order.row].get(mode="promise_in_bounds", unique_indices=True)


permute_rows.defvjp(
    lambda x, order: (permute_rows(x, order), order),
    lambda order, d_rows: (permute_rows(d_rows, order.inverse), None),
)


@jax.custom_vjp
def gather_tokens(x_TD: Float[Array, "t d"], assignments: Assignments) -> Float[Array, "n d"]:
    """Return the token of each row's assignment; undefined for rows without an assignment."""
    # Rows without an assignment have an index out of bounds: "clip" reads the last token for them.
    return x_TD.at[assignments.assignment // assignments.row.shape[1]].get(mode="clip")


@jax.custom_vjp
def sum_by_token(rows_ND: Float[Array, "n d"], assignments: Assignments) -> Float[Array, "t d"]:
    """Return the sum in float32 of the rows of each token: the transpose of `gather_tokens`."""
    # Added one by one: XLA:CPU does not fuse a sum over an axis with the gathers of its terms.
    terms = (rows_ND.at[row].get(mode="fill", fill_value=0) for row in assignments.row.T)
    y_TD = functools.reduce(operator.add, (rows.astype(jnp.float32) for rows in terms))
    return y_TD.astype(rows_ND.dtype)


gather_tokens.defvjp(
    lambda x, assignments: (gather_tokens(x, assignments), assignments),
    lambda assignments, d_rows: (sum_by_token(d_rows, assignments), None),
)
sum_by_token.defvjp(
    lambda x, assignments: (sum_by_token(x, assignments), assignments),
    lambda assignments, d_rows: (gather_tokens(d_rows, assignments), None),
)


@jax.custom_vjp
def gather_weights(weight_TK: Float[Array, "t k"], assignments: Assignments) -> Float[Array, "n"]:
    """Return the weight of each row's assignment; undefined for rows without an assignment."""
    return weight_TK.reshape(-1).at[assignments.assignment].get(mode="clip")


gather_weights.defvjp(
    lambda x, assignments: (gather_weights(x, assignments), assignments),
    lambda assignments, d_rows: (d_rows.at[assignments.row].get(mode="fill", fill_value=0), None),
)
