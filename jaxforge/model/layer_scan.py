"""Layers in their order, as a scan over the periods of their plan."""

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxforge.model.plan import LayerKind, LayerPlan

Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]
"""A layer: (x, its parameters and other arrays) -> x, and its other outputs."""


class Rows(NamedTuple):
    """Per-layer inputs of a layer scan.

    Attributes:
        stacks: parameters by stack, one row for each of its layers.
        others: the rest, one row for each layer.
    """

    stacks: Mapping[str, PyTree]
    others: PyTree


class Part(NamedTuple):
    """Consecutive layers of a plan.

    Attributes:
        run: x -> x after the layers, and their other outputs, stacked.
        is_scanned: whether the outputs are stacked twice: by period, and by layer in each.
    """

    run: Callable[[Array], tuple[Array, PyTree]]
    is_scanned: bool


def parts_of(
    plan: LayerPlan,
    layer: Callable[[LayerKind, str, bool], Layer],
    rows: Rows,
    unroll: int,
) -> Iterator[Part]:
    """Split a plan into leading layers, repeated periods (one scan) and remaining layers.

    Args:
        plan: the kind of each layer.
        layer: (kind, name of the stack, whether in a loop) -> a layer.
        rows: the arrays of the layers.
        unroll: layers in an iteration of the loop.
    """
    leading, length, repeats = period = plan.period

    def run(layers: Sequence[int], in_loop: bool, x_BSD: Array, rows: Rows) -> tuple[Array, PyTree]:
        outs, used = [], Counter[str]()
        for i, number in enumerate(layers):
            stack = plan.stacks[number]
            own = _row(rows.stacks[stack], used[stack]), _row(rows.others, i)
            x_BSD, out = layer(plan.layers[number], stack, in_loop)(x_BSD, own)
            outs.append(out)
            used[stack] += 1
        return x_BSD, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *outs)

    def in_order(first: int, end: int) -> Part:
        own = _rows_of(rows, plan, slice(first, end))
        return Part(functools.partial(run, range(first, end), False, rows=own), is_scanned=False)

    def scanned() -> Part:
        own = _rows_of(rows, plan, slice(leading, period.end))
        own = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), own)
        body = functools.partial(run, range(leading, leading + length), repeats > 1)
        scan = functools.partial(jax.lax.scan, body, xs=own, unroll=max(1, unroll // length))
        return Part(scan, is_scanned=True)

    if leading:
        yield in_order(0, leading)
    yield scanned()
    if period.end < len(plan.layers):
        yield in_order(period.end, len(plan.layers))


def flattened(outs: PyTree) -> PyTree:
    """Return outputs [periods, layers, ...] of a scan as [periods x layers, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outs)


def _rows_of(rows: Rows, plan: LayerPlan, layers: slice) -> Rows:
    """Return the rows of consecutive layers; stacks without any of these layers are left out."""
    ours = {stack: plan.rows_in(stack, layers) for stack in rows.stacks}
    stacks = {
        stack: jax.tree.map(lambda leaf, at=at: leaf[at], rows.stacks[stack])
        for stack, at in ours.items()
        if at.stop > at.start
    }
    return Rows(stacks, jax.tree.map(lambda leaf: leaf[layers], rows.others))


def _row(stacked: PyTree, row: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[row], stacked)
