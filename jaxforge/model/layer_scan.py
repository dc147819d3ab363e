"""Runs layers one after another, as a scan over what repeats in their plan."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxforge.model.plan import LayerKind, LayerPlan

Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]
"""(x, what the layer has of its own) -> x, what comes of it besides."""


class Rows(NamedTuple):
    """What layers have of their own.

    Attributes:
        stacks: parameters by stack, one row for each of its layers.
        others: the rest, one row for each layer.
    """

    stacks: Mapping[str, PyTree]
    others: PyTree


def scan_layers(
    plan: LayerPlan,
    layer: Callable[[LayerKind, str, bool], Layer],
    x_BSD: Float[Array, "b s d"],
    rows: Rows,
    unroll: int,
) -> tuple[Float[Array, "b s d"], PyTree]:
    """All layers of a plan.

    Args:
        plan: of which kind each is.
        layer: (kind, name of its stack, whether it is in a loop) -> a layer of that kind.
        x_BSD: what enters the first.
        rows: what each has of its own.
        unroll: layers in an iteration of the loop.

    Returns:
        What leaves the last, and what came of all, stacked.
    """
    leading, length, repeats = period = plan.period

    def run(layers: Sequence[int], in_loop: bool) -> Layer:
        def in_order(x_BSD: Array, rows: Rows) -> tuple[Array, PyTree]:
            outs, taken = [], Counter[str]()
            for i, number in enumerate(layers):
                stack = plan.stacks[number]
                one = layer(plan.layers[number], stack, in_loop)
                own = _row(rows.stacks[stack], taken[stack]), _row(rows.others, i)
                x_BSD, out = one(x_BSD, own)
                outs.append(out)
                taken[stack] += 1
            return x_BSD, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *outs)

        return in_order

    def periods(x_BSD: Array, rows: Rows) -> tuple[Array, PyTree]:
        by_period = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), rows)
        one = run(range(leading, leading + length), repeats > 1)
        x_BSD, outs = jax.lax.scan(one, x_BSD, by_period, unroll=max(1, unroll // length))
        return x_BSD, jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outs)

    parts = [
        (slice(0, leading), run(range(leading), False)),
        (slice(leading, period.end), periods),
        (slice(period.end, None), run(range(period.end, len(plan.layers)), False)),
    ]
    found = []
    for part, layers in parts:
        if range(len(plan.layers))[part]:
            x_BSD, outs = layers(x_BSD, _rows_of(rows, plan, part))
            found.append(outs)
    return x_BSD, jax.tree.map(lambda *outs: jnp.concatenate(outs), *found)


def _rows_of(rows: Rows, plan: LayerPlan, layers: slice) -> Rows:
    """Those of some consecutive layers; a stack that has none of them is left out."""
    ours = {stack: plan.rows_in(stack, layers) for stack in rows.stacks}
    stacks = {
        stack: jax.tree.map(lambda leaf, at=at: leaf[at], rows.stacks[stack])
        for stack, at in ours.items()
        if at.stop > at.start
    }
    return Rows(stacks, jax.tree.map(lambda leaf: leaf[layers], rows.others))


def _row(stacked: PyTree, row: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[row], stacked)
