"""Experts of a mixture: dispatch of tokens, grouped feed-forward products, and combination.

The code runs per device, manual over all mesh axes (`_run_per_device`). Rows are sorted by expert,
and the products of rows and experts are grouped (`kernels/grouped.py`), so that no token is dropped
and no product is padded to the largest expert. With `distributed.ep`, experts are split over
devices, and an all-to-all moves rows to the device of their expert and back. The buffers of the
all-to-all hold `HEADROOM` times the rows of an even load. Excess rows take further rounds, which
are usually skipped. So memory and traffic do not follow the worst load, and no row is lost.
"""

import functools
import math
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.config.model import EXPERTS, ModelConfig
from jaxforge.kernels.fp8 import Scaled
from jaxforge.kernels.grouped import GROUPED_BACKENDS, grouped_matmul
from jaxforge.kernels.grouped_fp8 import grouped_matmul_fp8, quantize_experts
from jaxforge.model.capacity import token_axis, within_capacity
from jaxforge.model.dispatch import (
    Assignments,
    gather_tokens,
    gather_weights,
    permute_rows,
    sort_assignments,
    sort_by_key,
    sum_by_token,
)
from jaxforge.model.linear import Declare, is_decoding_step, normal, residual_std
from jaxforge.model.mlp import activated
from jaxforge.model.router import Routing
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    automatic_axes,
    automatic_spec,
    axes_of_type,
    axes_size,
    compute_axes,
)

HEADROOM = 1.5  # rows of a round relative to an even load


def filled_rows(config: ModelConfig, ep: int) -> float:
    """Return the fraction of the rows of the first round that have a token, for an even load."""
    if not config.is_moe or ep == 1:
        return 1.0
    # A token has at most this many experts on a device.
    return 1 / min(
        HEADROOM, ep * min(config.moe_top_k, config.num_experts // ep) / config.moe_top_k
    )


Leaf = TypeVar("Leaf")


class GatheredLinear(NamedTuple, Generic[Leaf]):
    """A projection of all experts, gathered except over `ep` and `tp`; or its partition specs.

    Attributes:
        weight: [E, out, in], in the dtype of products, or in 8 bits.
        bias: [E, out], if there is one.
        gradient: zeros like the weight, which receive its gradient if that has another dtype than
            the products, or if these are in 8 bits. None: the weight receives it.
    """

    weight: Leaf | Scaled
    bias: Leaf | None
    gradient: Leaf | None


Linears = dict[str, GatheredLinear[Array]]
"""Projections by name."""
Operands = tuple[Array, Array, Linears]
"""Tokens, weights of their experts, and the experts' projections."""
Round = Callable[[Array | int, Operands, "_Load"], Array]
"""(number, operands, load) -> the tokens' sum of the outputs of that round."""
Pullback = Callable[[Array], tuple[Operands]]
"""Gradient of the result of a round -> gradients of its operands."""
Result = TypeVar("Result")
"""Tree of arrays that a round returns."""


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

    def gathered(self, dtype: jnp.dtype, in_8_bits: bool) -> GatheredLinear[Array]:
        """Return the matrices for products in `dtype`, or in 8 bits if the experts use them."""
        weight = self.weight[...]
        if self.in_8_bits and in_8_bits:
            return self._gathered_in_8_bits(weight, dtype)
        whole = collectives.all_gather_weight(weight.astype(dtype), self.axes)
        if not self._reduces_in_other_dtype(dtype):
            return GatheredLinear(
                whole, self.bias[...].astype(dtype) if self.has_bias else None, None
            )
        # The gradient flows to zeros of the reduction's dtype instead of through the cast of the
        # weight: devices then sum it before it is rounded to `dtype`.
        gradient = collectives.gradient_receiver(weight, self.axes, self.reduce_dtype)
        bias = self.bias[...].astype(self.reduce_dtype) if self.has_bias else None
        return GatheredLinear(jax.lax.stop_gradient(whole), bias, gradient)

    def _gathered_in_8_bits(self, weight: Array, dtype: jnp.dtype) -> GatheredLinear[Array]:
        # Quantized before they are gathered, so that values travel as one byte each.
        quantized = quantize_experts(jax.lax.stop_gradient(weight.astype(dtype)))
        values = collectives.all_gather_weight(quantized.values, self.axes)
        sums = jnp.promote_types(self.reduce_dtype, dtype)
        gradient = collectives.gradient_receiver(weight, self.axes, sums)
        bias = self.bias[...].astype(sums) if self.has_bias else None
        return GatheredLinear(quantized._replace(values=values), bias, gradient)

    def specs(self, dtype: jnp.dtype, in_8_bits: bool) -> GatheredLinear[P]:
        """Return the partition specs of the arrays of `gathered`."""
        axes = compute_axes(self.axes)
        weight, bias = automatic_spec(*axes), automatic_spec(*axes[:2])
        if self.in_8_bits and in_8_bits:
            packed = Scaled._make((weight, automatic_spec(axes[0], None, None)))
            return GatheredLinear(packed, bias if self.has_bias else None, weight)
        gradient = weight if self._reduces_in_other_dtype(dtype) else None
        return GatheredLinear(weight, bias if self.has_bias else None, gradient)

    def _reduces_in_other_dtype(self, dtype: jnp.dtype) -> bool:
        return collectives.reduces_in_other_dtype(self.reduce_dtype, dtype)


class Experts(nnx.Module):
    """Experts: down(act(gate(x)) · up(x)) each, or down(act(up(x))) without a gate."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        embed = (config.expert_embed_dim, "expert_embed")
        hidden = (config.expert_dim, "mlp")
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
        strategy: str = "ulysses",
    ) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
        """Return the weighted sum of each token's expert outputs, and the number of dropped tokens.

        Args:
            x_BSD: tokens.
            routing: experts of each token.
            backend: kernel of the grouped products.
            has_padding: whether some tokens are routed to no expert.
            in_8_bits: whether the products of the block are in 8 bits.
            strategy: "ulysses" or "ring": how devices share sequences.
        """
        names = [name for name in ("gate_proj", "up_proj", "down_proj") if hasattr(self, name)]
        if not isinstance(in_8_bits, bool):
            assert not self.up_proj.in_8_bits, "refused (`config.axes`)"
            in_8_bits = False
        linears = {name: getattr(self, name).gathered(x_BSD.dtype, in_8_bits) for name in names}
        specs = {name: getattr(self, name).specs(x_BSD.dtype, in_8_bits) for name in names}
        # A token of a decoding step is on all devices that share sequences.
        shared = None if is_decoding_step(x_BSD) else strategy
        run = functools.partial(_run, self.config, backend, has_padding, shared)
        is_opaque = GROUPED_BACKENDS[backend].is_opaque
        return _run_per_device(run, specs, x_BSD, routing, linears, shared, is_opaque=is_opaque)


def _run_per_device(
    run: Callable[..., tuple[Array, Array]],
    specs: PyTree,
    x_BSD: Float[Array, "b s d"],
    routing: Routing,
    linears: Linears,
    strategy: str | None,
    *,
    is_opaque: bool,
) -> tuple[Float[Array, "b s d"], Float[Array, ""]]:
    """Run a per-device function on all devices, and sum the number of dropped tokens.

    `is_opaque`: whether the function has kernels that XLA cannot partition.
    """
    axes, choice = automatic_axes(), (routing.experts, routing.weights)
    # In a partly manual program JAX lowers opaque kernels only if no axis is left to the
    # partitioner, even an axis of one device.
    is_refused = is_opaque and bool(axes) and bool(axes_of_type(AxisType.Manual))
    if axes_size(axes) == 1 and not is_refused:
        # XLA:CPU would copy the operands of collectives over one device.
        y_BSD, dropped = run(x_BSD, choice, linears)
    else:
        tokens = automatic_spec("batch", None if strategy is None else "context", None)
        y_BSD, dropped = jax.shard_map(
            run,
            in_specs=(tokens, (tokens, tokens), specs),
            out_specs=(tokens, automatic_spec(token_axis(strategy))),
            axis_names=axes,
            check_vma=False,  # kernels do not declare the mesh axes that their results vary over
        )(x_BSD, choice, linears)
    return y_BSD, jnp.sum(dropped)


def _run(
    config: ModelConfig,
    backend: str,
    has_padding: bool,
    strategy: str | None,
    x_BSD: Float[Array, "b s d"],
    choice: tuple[Int[Array, "b s k"], Float[Array, "b s k"]],
    linears: Linears,
) -> tuple[Float[Array, "b s d"], Float[Array, "1"]]:
    """Run the experts of one device on the tokens routed to them."""
    x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
    expert_TK, weight_TK = (of_row.reshape(len(x_TD), -1) for of_row in choice)
    is_padding_TK = expert_TK == config.num_experts
    if config.moe_capacity_factor:
        expert_TK = within_capacity(
            expert_TK, config, len(x_BSD), strategy, has_padding=has_padding
        )
    mlp = functools.partial(_mlp, config, backend)
    # Shapes on one device, T tokens with K experts each, N = T K assignments, E local experts:
    #
    #   x_TD  [T, D]
    #     | gather_tokens
    #   rows  [N, D], sorted by expert; sizes_E [E]: number of rows of each expert
    #     | mlp: grouped products, which skip experts without rows
    #   rows  [N, D]
    #     | sum_by_token
    #   y_TD  [T, D]
    if collectives.axis_size(EXPERTS) == 1:
        assignments, sizes_E = sort_assignments(expert_TK, config.num_experts)
        rows = gather_tokens(x_TD, assignments), gather_weights(weight_TK, assignments)
        y_TD = sum_by_token(mlp(linears, *rows, sizes_E), assignments)
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
    """Apply each expert to its rows, and multiply the outputs by the weights of the rows.

    Weights are applied before the last matrix, so that their gradient does not need the output; or
    to the rows themselves (`moe_score_inputs`).
    """
    weights: Array | None = weight_N
    if config.moe_score_inputs:
        rows_ND, weights = (rows_ND * weight_N[:, None]).astype(rows_ND.dtype), None

    def apply(name: str, rows: Array) -> Array:
        weight, bias, gradient = linears[name]
        if isinstance(weight, Scaled):
            y = grouped_matmul_fp8(backend, rows, weight, sizes_E, gradient)
        else:
            y = grouped_matmul(rows, weight, sizes_E, backend, gradient)
        if bias is None:
            return y
        bias_NO = _bias_of_rows(bias, sizes_E, len(rows), name).astype(y.dtype)
        if name != "down_proj" or weights is None:
            return y + bias_NO
        return y + bias_NO * weights.astype(y.dtype)[:, None]

    up_NF = apply("up_proj", rows_ND)
    gate_NF = apply("gate_proj", rows_ND) if config.is_gated else None
    return apply("down_proj", activated(up_NF, gate_NF, config, weights))


def _bias_of_rows(
    bias_EO: Float[Array, "e o"], sizes_E: Int[Array, "e"], n: int, name: str
) -> Float[Array, "n o"]:
    """Return the bias of each row's expert, 0 for rows without an expert.

    The output of `down_proj` is summed over `tp`, so that only one of those devices adds the bias.
    """
    expert_N = jnp.searchsorted(jnp.cumsum(sizes_E), jnp.arange(n), side="right")
    if name == "down_proj":
        bias_EO = jnp.where(collectives.first_index("mlp", 1) == 0, bias_EO, 0)
    return bias_EO.at[expert_N].get(mode="fill", fill_value=0)


def _by_all_to_all(
    mlp: Callable[[Linears, Array, Array, Array], Array],
    x_TD: Float[Array, "t d"],
    expert_TK: Int[Array, "t k"],
    weight_TK: Float[Array, "t k"],
    linears: Linears,
    n_experts: int,
) -> Float[Array, "t d"]:
    """Run experts that are split over devices, in as many rounds as the fullest device needs."""
    devices, (tokens, k) = collectives.axis_size(EXPERTS), expert_TK.shape
    # Static shapes: a round moves `room` rows from each device to each device. Balanced routing
    # needs T K / devices rows; the headroom covers the usual imbalance, further rounds the excess.
    #
    #   on the tokens' device                       on the experts' device
    #
    #   x_TD --gather_tokens--> [devices, room] --all-to-all--> [devices * room]
    #                                                             | sort by expert
    #                                                             | mlp
    #                                                             | inverse order
    #   y_TD <--sum_by_token--- [devices, room] <--all-to-all-- [devices * room]
    most = tokens * min(k, n_experts // devices)  # the experts of a token are distinct
    room = min(most, 8 * math.ceil(HEADROOM * tokens * k / devices / 8))
    load = _load_of_devices(expert_TK, n_experts, devices)

    def exchange(rows: Array) -> Array:
        by_device = rows.reshape(devices, room, *rows.shape[1:])
        return collectives.all_to_all(by_device, EXPERTS).reshape(rows.shape)

    def run_round(number: Array | int, operands: Operands, load: _Load) -> Array:
        x_TD, weight_TK, linears = operands
        assignments = _assignments_in_round(load, number * room, room)
        # Unused rows get an expert number out of range: they sort to the end, and no product
        # touches them.
        expert = load.local_expert.at[assignments.assignment].get(
            mode="fill", fill_value=n_experts // devices
        )
        order, sizes = sort_by_key(exchange(expert), n_experts // devices)
        rows, weights = gather_tokens(x_TD, assignments), gather_weights(weight_TK, assignments)
        rows, weights = (permute_rows(exchange(x), order) for x in (rows, weights))
        outputs = permute_rows(mlp(linears, rows, weights, sizes), order.inverse)
        return sum_by_token(exchange(outputs), assignments)

    operands = (x_TD, weight_TK, linears)
    if most == room:
        return run_round(0, operands, load)
    # The same number on all devices, because a round contains collectives.
    fullest = collectives.pmax(jnp.max(load.sizes), "tokens")
    return _sum_of_rounds(run_round, -(-fullest // room), operands, load)


class _Load(NamedTuple):
    """Number of rows that a device sends to each device with experts.

    Attributes:
        assignments: rows of (token, choice) pairs in the order of their experts.
        device: device of each assignment's expert.
        local_expert: index of each assignment's expert on its device.
        sizes: number of rows for each device.
        first: first row for each device.
    """

    assignments: Assignments
    device: Int[Array, "t k"]
    local_expert: Int[Array, "n"]
    sizes: Int[Array, "p"]
    first: Int[Array, "p"]


def _load_of_devices(expert_TK: Int[Array, "t k"], n_experts: int, devices: int) -> _Load:
    assignments, sizes_E = sort_assignments(expert_TK, n_experts)
    sizes = jnp.sum(sizes_E.reshape(devices, -1), axis=1)
    n_local = n_experts // devices
    device = jnp.minimum(expert_TK // n_local, devices - 1)  # of padding, any: it has no row
    return _Load(
        assignments, device, expert_TK.reshape(-1) % n_local, sizes, jnp.cumsum(sizes) - sizes
    )


def _assignments_in_round(load: _Load, begin: Array | int, room: int) -> Assignments:
    """Return the assignments of rows [devices * room]: for each device, `room` from `begin` on."""
    none, at = load.local_expert.shape[0], begin + jnp.arange(room)
    position = load.first[:, None] + at
    assignment = load.assignments.assignment.at[position].get(mode="fill", fill_value=none)
    assignment = jnp.where(at < load.sizes[:, None], assignment, none)
    # The inverse: an assignment is in this round if its rank among those for its device is.
    slot = load.assignments.row - load.first[load.device] - begin
    is_in = (slot >= 0) & (slot < room) & (load.assignments.row < none)
    row = jnp.where(is_in, load.device * room + slot, assignment.size)
    return Assignments(row, assignment.reshape(-1))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _sum_of_rounds(run_round: Round, rounds: Array, operands: Operands, load: _Load) -> Array:
    """Return the sum of the results of all rounds, at least one.

    Only the first round saves values for the backward pass, which recomputes any others. Without
    others, neither pass adds anything to the results and gradients of the first.
    """
    first = run_round(0, operands, load)
    return _add_further_rounds(lambda number: run_round(number, operands, load), rounds, first)


def _sum_of_rounds_forward(
    run_round: Round, rounds: Array, operands: Operands, load: _Load
) -> tuple[Array, tuple[Pullback, Array, Operands, _Load]]:
    first, pull = jax.vjp(lambda operands: run_round(0, operands, load), operands)
    y_TD = _add_further_rounds(lambda number: run_round(number, operands, load), rounds, first)
    return y_TD, (pull, rounds, operands, load)


def _sum_of_rounds_backward(
    run_round: Round, saved: tuple[Pullback, Array, Operands, _Load], d_y: Array
) -> tuple[None, Operands, None]:
    pull, rounds, operands, load = saved

    def gradient(number: Array) -> Operands:
        return jax.vjp(lambda operands: run_round(number, operands, load), operands)[1](d_y)[0]

    return None, _add_further_rounds(gradient, rounds, pull(d_y)[0]), None


_sum_of_rounds.defvjp(_sum_of_rounds_forward, _sum_of_rounds_backward)


def _add_further_rounds(result: Callable[[Array], Result], rounds: Array, first: Result) -> Result:
    """Add the results of all rounds but the first, in place."""

    def add(number: Array, total: Result) -> Result:
        return jax.tree.map(jnp.add, total, result(number))

    return jax.lax.fori_loop(1, rounds, add, first)
