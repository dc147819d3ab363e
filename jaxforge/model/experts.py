"""The experts: each token's rows go to its experts, through their matrices, and back.

On each device on its own, manual over all mesh axes (`_on_each_device`): rows are sorted by expert,
and products of rows and experts are grouped (`model/grouped.py`), so that no token is dropped and
nothing is multiplied in vain. With `distributed.ep`, experts are spread: rows travel to the device
of their expert by an all-to-all, and back. Its buffers have room for some more rows than an even
load has (`_HEADROOM`); rows for which there is none go in further rounds, which are skipped as a
rule, so that neither memory nor traffic is that of the worst load, and no row is lost.
"""

import functools
import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.config.model import EXPERTS, ModelConfig
from jaxforge.kernels.fp8 import Scaled
from jaxforge.kernels.grouped import grouped_matmul
from jaxforge.kernels.grouped_fp8 import by_expert, grouped_matmul_fp8
from jaxforge.model.attention import residual_std
from jaxforge.model.dispatch import (
    Assignments,
    reordered,
    sorted_order,
    sorted_places,
    summed,
    to_rows,
    weights_of_rows,
)
from jaxforge.model.linear import Declare, normal
from jaxforge.model.mlp import activated
from jaxforge.model.router import Routing
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    automatic_axes,
    automatic_spec,
    axes_size,
    compute_axes,
)

_HEADROOM = 1.5  # rows in a round, relative to an even load


Part = TypeVar("Part")


class Gathered(NamedTuple, Generic[Part]):
    """A projection of all experts, whole but for experts and what `tp` splits; or how that is laid
    out.

    Attributes:
        weight: [E, out, in], in the dtype of products, or in 8 bits.
        bias: [E, out], if there is one.
        gradient: zeros like the weight, whose gradient is the weight's where that is added up in
            another dtype than products are made in, or these are made in 8 bits.
    """

    weight: Part | Scaled
    bias: Part | None
    gradient: Part | None


Linears = dict[str, Gathered[Array]]
"""By name of a projection."""
Operands = tuple[Array, Array, Linears]
"""Tokens, weights of their experts, and the experts' matrices."""
Round = Callable[[Array | int, Operands, "_Load"], Array]
"""(number, operands, load) -> what the tokens that take part in that round get of it."""


class ExpertLinear(nnx.Module):
    """`linear.Linear` for each expert: weight [E, out, in], bias [E, out]."""

    def __init__(
        self, out: tuple[int, str], inp: tuple[int, str], config: ModelConfig, declare: Declare,
        *, std: float,
    ) -> None:  # fmt: skip
        self.axes, experts = (EXPERTS, out[1], inp[1]), config.num_experts
        self.reduce_dtype = declare.backward.dtype
        self.weight = declare((experts, out[0], inp[0]), self.axes, normal(std))
        self.has_bias, self.in_8_bits = config.mlp_bias, False  # `fp8_layers.convert` decides
        if config.mlp_bias:
            self.bias = declare((experts, out[0]), self.axes[:2], jax.nn.initializers.zeros)

    def gathered(self, dtype: jnp.dtype, in_8_bits: bool) -> Gathered[Array]:
        """Return the matrices for products in `dtype`, or in 8 bits if the experts have those."""
        weight = self.weight[...]
        if self.in_8_bits and in_8_bits:
            return self._gathered_in_8_bits(weight, dtype)
        whole = collectives.all_gather_weight(weight.astype(dtype), self.axes)
        if not self._is_reduced_apart(dtype):
            return Gathered(whole, self.bias[...].astype(dtype) if self.has_bias else None, None)
        gradient = collectives.gradient_of(weight, self.axes, self.reduce_dtype)
        bias = self.bias[...].astype(self.reduce_dtype) if self.has_bias else None
        return Gathered(jax.lax.stop_gradient(whole), bias, gradient)

    def _gathered_in_8_bits(self, weight: Array, dtype: jnp.dtype) -> Gathered[Array]:
        own = by_expert(jax.lax.stop_gradient(weight.astype(dtype)))
        values = collectives.all_gather_weight(own.values, self.axes)
        sums = jnp.promote_types(self.reduce_dtype, dtype)
        gradient = collectives.gradient_of(weight, self.axes, sums)
        bias = self.bias[...].astype(sums) if self.has_bias else None
        return Gathered(own._replace(values=values), bias, gradient)

    def specs(self, dtype: jnp.dtype, in_8_bits: bool) -> Gathered[P]:
        """Return how the arrays of `gathered` are split."""
        axes = compute_axes(self.axes)
        weight, bias = automatic_spec(*axes), automatic_spec(*axes[:2])
        if self.in_8_bits and in_8_bits:
            packed = Scaled._make((weight, automatic_spec(axes[0], None, None)))
            return Gathered(packed, bias if self.has_bias else None, weight)
        gradient = weight if self._is_reduced_apart(dtype) else None
        return Gathered(weight, bias if self.has_bias else None, gradient)

    def _is_reduced_apart(self, dtype: jnp.dtype) -> bool:
        return collectives.reduces_in_other_dtype(self.reduce_dtype, dtype)


class Experts(nnx.Module):
    """down(act(gate(x)) · up(x)) of each expert, or down(act(up(x))) where there is no gate."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        embed, hidden = (config.dim, "expert_embed"), (config.expert_dim, "mlp")
        linear = functools.partial(ExpertLinear, config=config, declare=declare)
        if config.is_gated:
            self.gate_proj = linear(hidden, embed, std=config.init_std)
        self.up_proj = linear(hidden, embed, std=config.init_std)
        self.down_proj = linear(embed, hidden, std=residual_std(config))
        self.config = config

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        routing: Routing,
        backend: str,
        *,
        has_padding: bool = False,
        in_8_bits: bool | Bool[Array, ""] = False,
    ) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
        """Return the weighted sum of the outputs of a token's experts, and the dropped tokens.

        Args:
            x_BSD: tokens.
            routing: where they go.
            backend: the kernel of grouped products.
            has_padding: whether some tokens go to no expert.
            in_8_bits: whether products of the block are in 8 bits.
        """
        names = [name for name in ("gate_proj", "up_proj", "down_proj") if hasattr(self, name)]
        if not isinstance(in_8_bits, bool):
            assert not self.up_proj.in_8_bits, "refused (`mesh_rules`)"
            in_8_bits = False
        linears = {name: getattr(self, name).gathered(x_BSD.dtype, in_8_bits) for name in names}
        specs = {name: getattr(self, name).specs(x_BSD.dtype, in_8_bits) for name in names}
        run = functools.partial(_run, self.config, backend, has_padding)
        return _on_each_device(run, specs, x_BSD, routing, linears)


def _on_each_device(
    run: Callable[..., tuple[Array, Array]],
    specs: PyTree,
    x_BSD: Float[Array, "b s d"],
    routing: Routing,
    linears: Linears,
) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
    """Runs a function of what one device has, and adds up what was dropped."""
    axes, choice = automatic_axes(), (routing.experts, routing.weights)
    if axes_size(axes) == 1:  # alone: XLA:CPU would copy all that it exchanges with nobody
        y_BSD, dropped = run(x_BSD, choice, linears)
    else:
        tokens = automatic_spec("batch", "context", None)
        y_BSD, dropped = jax.shard_map(
            run,
            in_specs=(tokens, (tokens, tokens), specs),
            out_specs=(tokens, automatic_spec("tokens")),
            axis_names=axes,
            check_vma=False,  # kernels do not tell over which axes results vary
        )(x_BSD, choice, linears)
    return y_BSD, jnp.sum(dropped)


def _run(
    config: ModelConfig,
    backend: str,
    has_padding: bool,
    x_BSD: Float[Array, "b s d"],
    choice: tuple[Int[Array, "b s k"], Float[Array, "b s k"]],
    linears: Linears,
) -> tuple[Float[Array, "b s d"], Float[Array, "1"]]:
    """Run the experts of one device on the tokens routed to them."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    expert_TK, weight_TK = (of_row.reshape(len(x_TD), -1) for of_row in choice)
    is_padding_TK = expert_TK == config.num_experts
    if config.moe_capacity_factor:
        expert_TK = _within_capacity(expert_TK, config, has_padding)
    mlp = functools.partial(_mlp, config, backend)
    # Shapes on one device, T tokens with K experts each, N = T K assignments, E local experts:
    #
    # x_TD [T, D] --to_rows--> rows [N, D] sorted by expert --mlp--> [N, D] --summed--> y_TD [T, D]
    # sizes_E [E] rows of each expert; the grouped products skip experts without rows.
    if collectives.axis_size(EXPERTS) == 1:
        assignments, sizes_E = sorted_places(expert_TK, config.num_experts)
        rows = to_rows(x_TD, assignments), weights_of_rows(weight_TK, assignments)
        y_TD = summed(mlp(linears, *rows, sizes_E), assignments)
    else:
        y_TD = _by_all_to_all(mlp, x_TD, expert_TK, weight_TK, linears, config.num_experts)
    # The feed-forward dimension is split over tp: each device has a partial sum.
    y_TD = collectives.psum(y_TD, "mlp")
    is_dropped_TK = expert_TK == config.num_experts
    if has_padding:
        is_dropped_TK &= ~is_padding_TK
    dropped = jnp.sum(is_dropped_TK, dtype=jnp.float32)
    return y_TD.reshape(x_BSD.shape), dropped[None]


def _mlp(
    config: ModelConfig,
    backend: str,
    linears: Linears,
    rows_ND: Float[Array, "n d"],
    weight_N: Float[Array, "n"],
    sizes_E: Int[Array, "e"],
) -> Float[Array, "n d"]:
    """Rows sorted by expert, through the matrices of their experts, times their weights.

    The weight comes before the last matrix, so that its gradient needs no row of the result.
    """

    def apply(name: str, rows: Array) -> Array:
        weight, bias, gradient = linears[name]
        if isinstance(weight, Scaled):
            y = grouped_matmul_fp8(backend, rows, weight, sizes_E, gradient)
        else:
            y = grouped_matmul(rows, weight, sizes_E, backend, gradient)
        if bias is None:
            return y
        bias_NO = _bias_of_rows(bias, sizes_E, len(rows), name).astype(y.dtype)
        return y + (bias_NO if name != "down_proj" else bias_NO * weight_N.astype(y.dtype)[:, None])

    up_NF = apply("up_proj", rows_ND)
    gate_NF = apply("gate_proj", rows_ND) if config.is_gated else None
    return apply("down_proj", activated(up_NF, gate_NF, config, weight_N))


def _bias_of_rows(
    bias_EO: Float[Array, "e o"], sizes_E: Int[Array, "e"], n: int, name: str
) -> Float[Array, "n o"]:
    """The bias of each row's expert, 0 where it has none.

    Of what is summed over `tp` afterwards, on one device.
    """
    expert_N = jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(n), side="right")
    if name == "down_proj":
        bias_EO = jnp.where(collectives.first_index("mlp", 1) == 0, bias_EO, 0)
    return bias_EO.at[expert_N].get(mode="fill", fill_value=0)


def _within_capacity(
    expert_TK: Int[Array, "t k"], config: ModelConfig, has_padding: bool
) -> Int[Array, "t k"]:
    """Replace experts whose capacity is used up by `num_experts`.

    As in KempnerForge: an expert first takes tokens for which it is the first choice, then the
    second and so on, in the order of the microbatch, which devices share. Padding takes no place,
    and the capacity is that of the other tokens.
    """
    tokens, k = expert_TK.shape
    n = config.num_experts
    capacities = _capacities(tokens * collectives.axis_size("tokens"), config)
    capacity: int | Array = int(capacities[-1])
    if has_padding:
        real = collectives.psum(jnp.sum(expert_TK[:, 0] < n, dtype=jnp.int32), "tokens")
        least = np.searchsorted(capacities, np.arange(1, capacities[-1] + 1))  # tokens for so much
        capacity = jnp.sum(jnp.asarray(least) <= real)
    # A slot is (expert, rank of the choice). Sorting assignments by slot gives each its rank within
    # the slot; adding the tokens of the devices before this one makes the rank global, so that
    # capacity does not depend on how devices share the microbatch.
    slot_TK = expert_TK * k + jnp.arange(k)
    assignments, sizes = sorted_places(slot_TK, n * k)
    before = jnp.cumsum(sizes) - sizes
    rank_TK = (
        assignments.row - before[slot_TK] + collectives.exclusive_cumsum(sizes, "tokens")[slot_TK]
    )
    return jnp.where(rank_TK < capacity, expert_TK, n)


def _capacities(tokens: int, config: ModelConfig) -> Int[np.ndarray, "n"]:
    """Return how many tokens an expert takes of a microbatch of 0 to `tokens` tokens."""
    even = np.arange(tokens + 1) * config.moe_top_k / config.num_experts
    return np.maximum(1, np.ceil(even * config.moe_capacity_factor)).astype(np.int32)


def _by_all_to_all(
    mlp: Callable[[Linears, Array, Array, Array], Array],
    x_TD: Float[Array, "t d"],
    expert_TK: Int[Array, "t k"],
    weight_TK: Float[Array, "t k"],
    linears: Linears,
    n_experts: int,
) -> Float[Array, "t d"]:
    """Run experts that are spread over devices, in as many rounds as the fullest device needs."""
    devices, (tokens, k) = collectives.axis_size(EXPERTS), expert_TK.shape
    # Static shapes: a round moves `room` rows from each device to each device. Balanced routing
    # needs T K / devices; headroom covers the usual imbalance, and further rounds the rest.
    #
    # device d                       device p (experts p E/P ...)
    # rows for device 0 [room] --+ rows for device 1 [room] --+-- all_to_all --> [devices x room]
    # --sort--> mlp --unsort--+
    # ...                                                                                    |
    # y_TD <-- summed <-- all_to_all <--------------------------------------------------------
    most = tokens * min(k, n_experts // devices)  # a token's experts differ
    room = min(most, 8 * math.ceil(_HEADROOM * tokens * k / devices / 8))
    load = _load_of_devices(expert_TK, n_experts, devices)

    def exchange(rows: Array) -> Array:
        by_device = rows.reshape(devices, room, *rows.shape[1:])
        return collectives.all_to_all(by_device, EXPERTS).reshape(rows.shape)

    def run_round(number: Array | int, operands: Operands, load: _Load) -> Array:
        x_TD, weight_TK, linears = operands
        assignments = _places_in_round(load, number * room, room)
        # Unused rows get an expert number out of range: they sort to the end, and no product
        # touches them.
        expert = load.local_expert.at[assignments.assignment].get(
            mode="fill", fill_value=n_experts // devices
        )
        order, sizes = sorted_order(exchange(expert), n_experts // devices)
        rows, weights = to_rows(x_TD, assignments), weights_of_rows(weight_TK, assignments)
        rows, weights = (reordered(exchange(each), order) for each in (rows, weights))
        back = exchange(reordered(mlp(linears, rows, weights, sizes), order.back))
        return summed(back, assignments)

    operands = (x_TD, weight_TK, linears)
    y_TD = run_round(0, operands, load)
    if (rounds := -(-most // room)) > 1:
        # The branch must be the same on all devices, because it contains collectives.
        fullest = collectives.pmax(jnp.max(load.sizes), "tokens")
        y_TD = y_TD + _further(run_round, rounds, fullest > room, operands, load)
    return y_TD


class _Load(NamedTuple):
    """Number of rows that a device sends to each device with experts.

    Attributes:
        assignments: (token, choice) pairs in the order of their experts.
        device: where each assignment goes.
        local_expert: the expert there of each assignment, by number.
        sizes: how many go to each device.
        first: the first row of each device.
    """

    assignments: Assignments
    device: Int[Array, "t k"]
    local_expert: Int[Array, "n"]
    sizes: Int[Array, "p"]
    first: Int[Array, "p"]


def _load_of_devices(expert_TK: Int[Array, "t k"], n_experts: int, devices: int) -> _Load:
    assignments, sizes_E = sorted_places(expert_TK, n_experts)
    sizes = jnp.sum(sizes_E.reshape(devices, -1), axis=1)
    each = n_experts // devices
    device = jnp.minimum(expert_TK // each, devices - 1)
    return _Load(
        assignments, device, expert_TK.reshape(-1) % each, sizes, jnp.cumsum(sizes) - sizes
    )


def _places_in_round(load: _Load, begin: Array | int, room: int) -> Assignments:
    """Rows [devices x room]: of each device's load, `room` assignments from `begin` on."""
    none, at = load.local_expert.shape[0], begin + jnp.arange(room)
    position = load.first[:, None] + at
    assignment = load.assignments.assignment.at[position].get(mode="fill", fill_value=none)
    assignment = jnp.where(at < load.sizes[:, None], assignment, none)
    slot = load.assignments.row - load.first[load.device] - begin
    is_in = (slot >= 0) & (slot < room) & (load.assignments.row < none)
    row = jnp.where(is_in, load.device * room + slot, assignment.size)
    return Assignments(row, assignment.reshape(-1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _further(
    round_: Round, rounds: int, is_needed: Array, operands: Operands, load: _Load
) -> Array:
    """All rounds but the first, if needed. Nothing is saved: the backward runs them again."""
    return jax.lax.cond(
        is_needed,
        functools.partial(_all_further, round_, rounds),
        lambda operands, load: jnp.zeros_like(operands[0]),
        operands,
        load,
    )


def _all_further(round_: Round, rounds: int, operands: Operands, load: _Load) -> Array:
    # `checkpoint`: a round's exchanged rows are recomputed in the backward pass instead of saved.
    def add(y_TD: Array, number: Array) -> tuple[Array, None]:
        return y_TD + jax.checkpoint(round_)(number, operands, load), None

    return jax.lax.scan(add, jnp.zeros_like(operands[0]), jnp.arange(1, rounds))[0]


def _further_back(
    round_: Round, rounds: int, saved: tuple[Array, Operands, _Load], d_y: Array
) -> tuple[None, Operands, None]:
    is_needed, operands, load = saved

    def back(operands: Operands, load: _Load, d_y: Array) -> Operands:
        return jax.vjp(lambda o: _all_further(round_, rounds, o, load), operands)[1](d_y)[0]

    def nothing(operands: Operands, load: _Load, d_y: Array) -> Operands:
        return jax.tree.map(jnp.zeros_like, operands)

    # `cond` inside a custom_vjp: plain autodiff of `cond` would save the residuals of both
    # branches.
    return None, jax.lax.cond(is_needed, back, nothing, operands, load, d_y), None


_further.defvjp(
    lambda run_round, rounds, *saved: (_further(run_round, rounds, *saved), saved),
    _further_back,
)
