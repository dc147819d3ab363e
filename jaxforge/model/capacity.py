"""Capacity of experts: which tokens an expert takes, in the order of the microbatch.

As in KempnerForge, the capacity holds for each expert and each rank of choice, together a *slot*:
an expert takes up to `capacity` tokens as their first choice, as many as their second, and so on.
Tokens enter in the order of rows and of positions in a row, whatever devices hold them, so that the
dropped tokens do not depend on the mesh. A device of `distributed.cp` holds parts of rows:

    strategy "ring"     row 0             row 1
    device 0            0        3        4        7
    device 1                1 2               5 6             order in which parts enter

The number of tokens before one in its slot is that of its own device, plus those of earlier parts
on other devices. Devices exchange only the number of tokens of each part in each slot.
"""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxforge.config.model import ModelConfig
from jaxforge.kernels.sequence_parts import combine_before, parts_per_device
from jaxforge.model.dispatch import sort_assignments
from jaxforge.parallel import collectives


def token_axis(strategy: str | None) -> str:
    """Return the logical axis along which devices have different tokens.

    Args:
        strategy: how devices share sequences; None: they have the same tokens.
    """
    return "batch" if strategy is None else "tokens"


def within_capacity(
    expert_TK: Int[Array, "t k"],
    config: ModelConfig,
    rows: int,
    strategy: str | None,
    *,
    has_padding: bool,
) -> Int[Array, "t k"]:
    """Replace experts beyond their capacity by `num_experts`.

    Padding uses no capacity, which is computed from the number of real tokens of the microbatch on
    all devices.

    Args:
        expert_TK: experts of the tokens of this device, in the order of their choice;
            `num_experts` for padding.
        config: the model.
        rows: number of rows that the tokens are parts of.
        strategy: "ulysses" or "ring": how devices share sequences, whose tokens have the order of
            `context_parallel.to_device_order`; None: they have the same tokens.
        has_padding: whether some tokens are padding.
    """
    tokens, k = expert_TK.shape
    n, axis = config.num_experts, token_axis(strategy)
    # Capacity of a microbatch of 0, 1, 2 ... tokens, computed in float64 on the host.
    even = np.arange(tokens * collectives.axis_size(axis) + 1) * k / n
    capacities = np.maximum(1, np.ceil(even * config.moe_capacity_factor)).astype(np.int32)
    capacity: int | Array = int(capacities[-1])
    if has_padding:
        # Only the device knows the number of real tokens: count the capacities that they reach.
        n_real = collectives.psum(jnp.sum(expert_TK[:, 0] < n, dtype=jnp.int32), axis)
        least_tokens = np.searchsorted(capacities, np.arange(1, capacities[-1] + 1))
        capacity = jnp.sum(jnp.asarray(least_tokens) <= n_real)
    # Sorting assignments by slot gives each its rank within the slot among those of this device.
    slot_TK = expert_TK * k + jnp.arange(k)
    assignments, sizes = sort_assignments(slot_TK, n * k)
    rank_TK = assignments.row - _exclusive_cumsum(sizes)[slot_TK]
    if strategy is None or collectives.axis_size("context") == 1:
        rank_TK += collectives.exclusive_cumsum(sizes, "batch")[slot_TK]
    else:
        part_PT = expert_TK.reshape(rows * parts_per_device(strategy), -1, k)
        earlier = _earlier_on_other_devices(part_PT, n, rows, strategy)
        part = jnp.arange(tokens) // part_PT.shape[1]
        rank_TK += earlier[part[:, None], slot_TK]
    return jnp.where(rank_TK < capacity, expert_TK, n)


def _earlier_on_other_devices(
    expert_PTK: Int[Array, "p t k"], n_experts: int, rows: int, strategy: str
) -> Int[Array, "p slots"]:
    """Return the number of tokens of other devices before each part, by slot.

    Args:
        expert_PTK: experts of the tokens of each part, `rows` times the parts of a row.
        n_experts: number of experts.
        rows: number of rows.
        strategy: "ulysses" or "ring".
    """
    is_chosen = expert_PTK[:, :, None] == jnp.arange(n_experts)[:, None]  # [p, t, e, k]
    counts = jnp.sum(is_chosen, axis=1, dtype=jnp.int32).reshape(len(expert_PTK), -1)
    local_of_row = jnp.sum(counts.reshape(rows, -1, counts.shape[1]), axis=1)
    of_row = collectives.psum(local_of_row, "context")
    before_row = _exclusive_cumsum(of_row)
    before_row += collectives.exclusive_cumsum(jnp.sum(of_row, axis=0), "batch")
    before = combine_before(jnp.add, counts, jnp.zeros_like(local_of_row), strategy)
    before += jnp.repeat(before_row, len(counts) // rows, axis=0)
    return before - _exclusive_cumsum(counts)


def _exclusive_cumsum(x: Int[Array, "n ..."]) -> Int[Array, "n ..."]:
    return jnp.cumsum(x, axis=0) - x
