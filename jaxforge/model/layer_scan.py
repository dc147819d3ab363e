"""Runs layers one after another, as a scan over what repeats in their plan."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jaxforge.model.plan import LayerKind, LayerPlan

Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]
"""(x, what the layer has of its own) -> x, what comes of it besides."""


def scan_layers(
    plan: LayerPlan,
    layer: Callable[[LayerKind, bool], Layer],
    x_BSD: Float[Array, "b s d"],
    rows: PyTree,
    unroll: int,
) -> tuple[Float[Array, "b s d"], PyTree]:
    """All layers of a plan.

    Args:
        plan: of which kind each is.
        layer: (kind, whether it is in a loop) -> a layer of that kind.
        x_BSD: what enters the first.
        rows: what each has of its own, stacked.
        unroll: layers in an iteration of the loop.

    Returns:
        What leaves the last, and what came of all, stacked.
    """
    leading, length, repeats = period = plan.period

    def run(layers: Sequence[int], in_loop: bool) -> Layer:
        def in_order(x_BSD: Array, rows: PyTree) -> tuple[Array, PyTree]:
            outs = []
            for i, number in enumerate(layers):
                one = layer(plan.layers[number], in_loop)
                x_BSD, out = one(x_BSD, jax.tree.map(lambda leaf, i=i: leaf[i], rows))
                outs.append(out)
            return x_BSD, jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *outs)

        return in_order

    def periods(x_BSD: Array, rows: PyTree) -> tuple[Array, PyTree]:
        by_period = jax.tree.map(lambda leaf: leaf.reshape(repeats, length, *leaf.shape[1:]), rows)
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
            x_BSD, outs = layers(x_BSD, jax.tree.map(lambda leaf, part=part: leaf[part], rows))
            found.append(outs)
    return x_BSD, jax.tree.map(lambda *outs: jnp.concatenate(outs), *found)
