"""Execution of a plan's layers in order, with a scan over its periods."""

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from jaxforge.model.layer import LayerOut
from jaxforge.model.plan import LayerKind, LayerPlan

Layer = Callable[[Array, PyTree], tuple[Array, PyTree]]
"""(x, (parameters, other inputs)) -> (x, other outputs)."""


class LayerInputs(NamedTuple):
    """Per-layer inputs of a layer scan.

    Attributes:
        stacks: stacked parameters by name of the stack, with a row per layer of the stack.
        states: decoding states by name of the stack, with a row per layer of the stack; None: there
            are none.
    """

    stacks: Mapping[str, PyTree]
    states: Mapping[str, PyTree] | None


class LayerGroup(NamedTuple):
    """Consecutive layers of a plan.

    Attributes:
        run: x -> (x after the layers, stacked other outputs).
        is_scanned: whether outputs are stacked as [periods, layers of a period, ...].
    """

    run: Callable[[Array], tuple[Array, LayerOut]]
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
    ) -> tuple[Array, LayerOut]:
        outs, used = [], Counter[str]()
        for number in layers:
            stack = plan.stacks[number]
            state = None if rows.states is None else _row(rows.states[stack], used[stack])
            row = _row(rows.stacks[stack], used[stack]), state
            x_BSD, out = layer(plan.layers[number], stack, in_loop)(x_BSD, row)
            outs.append(out)
            used[stack] += 1
        return x_BSD, _stack_outputs([plan.stacks[number] for number in layers], outs)

    for first, end in ((0, leading), (leading, period.end), (period.end, len(plan.layers))):
        if first == end:
            continue
        group_rows = _slice_layers(rows, plan, slice(first, end))
        if first != leading:
            yield LayerGroup(
                functools.partial(run, range(first, end), False, rows=group_rows), False
            )
            continue
        # Rows of L layers become [periods, layers of a period, ...]; the scan runs over periods.
        xs = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), group_rows)
        body = functools.partial(run, range(leading, leading + length), repeats > 1)
        scan = functools.partial(jax.lax.scan, body, xs=xs, unroll=max(1, unroll // length))
        yield LayerGroup(scan, is_scanned=True)


def _stack_outputs(stacks: Sequence[str], outs: Sequence[LayerOut]) -> LayerOut:
    """Stack outputs of consecutive layers: decoding states by stack, the others by layer."""
    states: dict[str, list[PyTree]] = {}
    for stack, out in zip(stacks, outs, strict=True):
        states.setdefault(stack, []).append(out.cache)
    others = [out._replace(cache=None) for out in outs]
    cache = {stack: _stacked(rows) for stack, rows in states.items()}
    return _stacked(others)._replace(cache=cache)


def _stacked(trees: Sequence[PyTree]) -> Any:  # noqa: ANN401  # the type of the trees
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def concatenate_outputs(groups: Sequence[LayerGroup], outs: Sequence[LayerOut]) -> LayerOut:
    """Concatenate outputs of groups of layers, stacked by layer; groups may lack some stacks."""
    outs = [
        jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), out)
        if group.is_scanned
        else out
        for group, out in zip(groups, outs, strict=True)
    ]

    def concatenate(trees: Sequence[PyTree]) -> Any:  # noqa: ANN401  # the type of the trees
        return jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *trees)

    stacks = dict.fromkeys(stack for out in outs for stack in out.cache)
    cache = {
        stack: concatenate([out.cache[stack] for out in outs if stack in out.cache])
        for stack in stacks
    }
    return concatenate([out._replace(cache=None) for out in outs])._replace(cache=cache)


def unstack(plan: LayerPlan, stacks: Mapping[str, PyTree]) -> list[PyTree]:
    """Return the rows of each layer of the model, such as its parameters, as separate arrays."""
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


def _slice_layers(rows: LayerInputs, plan: LayerPlan, layers: slice) -> LayerInputs:
    """Return the rows of consecutive layers, without stacks that have none of these layers."""
    slices = {stack: plan.stack_rows(stack, layers) for stack in rows.stacks}
    slices = {stack: at for stack, at in slices.items() if at.stop > at.start}

    def sliced(by_stack: Mapping[str, PyTree]) -> dict[str, PyTree]:
        return {
            stack: jax.tree.map(lambda leaf, at=at: leaf[at], by_stack[stack])
            for stack, at in slices.items()
        }

    return LayerInputs(sliced(rows.stacks), None if rows.states is None else sliced(rows.states))


def _row(stacked: PyTree, row: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[row], stacked)
