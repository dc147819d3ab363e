"""Execution of a plan's layers in order, with a scan over its periods."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxforge.model.plan import LayerKind, LayerPlan

Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]
"""(x, (parameters, other inputs)) -> (x, other outputs)."""


class LayerInputs(NamedTuple):
    """Per-layer inputs of a layer scan.

    Attributes:
        stacks: stacked parameters by name of the stack, with a row per layer of the stack.
        others: other inputs, such as the cache, with a row per layer of the model.
    """

    stacks: Mapping[str, PyTree]
    others: PyTree


class LayerGroup(NamedTuple):
    """Consecutive layers of a plan.

    Attributes:
        run: x -> (x after the layers, stacked other outputs).
        is_scanned: whether outputs are stacked as [periods, layers of a period, ...].
    """

    run: Callable[[Array], tuple[Array, PyTree]]
    is_scanned: bool


def split_into_groups(
    plan: LayerPlan,
    layer: Callable[[LayerKind, str, bool], Layer],
    rows: LayerInputs,
    unroll: int,
) -> Iterator[LayerGroup]:
    """Split a plan into leading layers, repeated periods (one scan) and remaining layers.

    Args:
        plan: the kind of each layer.
        layer: (kind, name of the stack, whether in a loop) -> the layer function.
        rows: inputs of the layers.
        unroll: number of layers per iteration of the loop.
    """
    leading, length, repeats = period = plan.period

    def run(
        layers: Sequence[int], in_loop: bool, x_BSD: Array, rows: LayerInputs
    ) -> tuple[Array, PyTree]:
        outs, used = [], Counter[str]()
        for i, number in enumerate(layers):
            stack = plan.stacks[number]
            row = _row(rows.stacks[stack], used[stack]), _row(rows.others, i)
            x_BSD, out = layer(plan.layers[number], stack, in_loop)(x_BSD, row)
            outs.append(out)
            used[stack] += 1
        return x_BSD, jax.tree.map(lambda *leaves: jnp.stack(leaves), *outs)

    def in_order(first: int, end: int) -> LayerGroup:
        group_rows = _slice_layers(rows, plan, slice(first, end))
        body = functools.partial(run, range(first, end), False, rows=group_rows)
        return LayerGroup(body, is_scanned=False)

    def scanned() -> LayerGroup:
        # Rows of L layers become [periods, layers of a period, ...]; the scan runs over periods.
        group_rows = _slice_layers(rows, plan, slice(leading, period.end))
        xs = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), group_rows)
        body = functools.partial(run, range(leading, leading + length), repeats > 1)
        scan = functools.partial(jax.lax.scan, body, xs=xs, unroll=max(1, unroll // length))
        return LayerGroup(scan, is_scanned=True)

    if leading:
        yield in_order(0, leading)
    yield scanned()
    if period.end < len(plan.layers):
        yield in_order(period.end, len(plan.layers))


def unstack(plan: LayerPlan, stacks: Mapping[str, PyTree]) -> list[PyTree]:
    """Return the parameters of each layer of the model as arrays of their own."""
    used, layers = Counter[str](), list[PyTree]()
    for stack in plan.stacks:
        layers.append(_row(stacks[stack], used[stack]))
        used[stack] += 1
    return layers


def run_unstacked(
    plan: LayerPlan,
    layer: Callable[[LayerKind, str, bool], Layer],
    rows: Iterable[tuple[PyTree, PyTree]],
    x_BSD: Array,
) -> tuple[Array, list[PyTree]]:
    """Run layers whose inputs are arrays of their own, and return x and the outputs of each layer.

    A loop over stacked layers would copy the parameters and the cache of a layer before it uses
    them. That doubles the time of a decoded token on CPU.
    """
    outs = []
    for kind, stack, row in zip(plan.layers, plan.stacks, rows, strict=True):
        x_BSD, out = layer(kind, stack, False)(x_BSD, row)
        outs.append(out)
    return x_BSD, outs


def flatten_periods(outs: PyTree) -> PyTree:
    """Reshape outputs [periods, layers, ...] of a scan to [periods * layers, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outs)


def _slice_layers(rows: LayerInputs, plan: LayerPlan, layers: slice) -> LayerInputs:
    """Return the rows of consecutive layers, without stacks that have none of these layers."""
    slices = {stack: plan.stack_rows(stack, layers) for stack in rows.stacks}
    stacks = {
        stack: jax.tree.map(lambda leaf, at=at: leaf[at], rows.stacks[stack])
        for stack, at in slices.items()
        if at.stop > at.start
    }
    return LayerInputs(stacks, jax.tree.map(lambda leaf: leaf[layers], rows.others))


def _row(stacked: PyTree, row: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[row], stacked)
