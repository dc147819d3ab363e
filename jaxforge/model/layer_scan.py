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
from jaxforge.parallel import collectives
from jaxforge.parallel.layer_switch import LayerResult, arrays_of_layer, change_if, run_layer
from jaxforge.parallel.stages import Locations

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
        kinds = [(plan.layers[number], plan.stacks[number]) for number in layers]
        # Rows are counted per stack, because consecutive layers may belong to several.
        outs, used = [], Counter[str]()
        for kind, stack in kinds:
            x_BSD, out = layer(kind, stack, in_loop)(x_BSD, row_of_layer(rows, stack, used))
            outs.append(out)
        return x_BSD, stack_outputs([stack for _, stack in kinds], outs)

    for first, end in ((0, leading), (leading, period.end), (period.end, len(plan.layers))):
        if first == end:
            continue
        group_rows = slice_layers(rows, plan, slice(first, end))
        if first != leading or len(plan.layers) == 1:
            yield LayerGroup(
                functools.partial(run, range(first, end), False, rows=group_rows), False
            )
            continue
        # Rows of L layers become [periods, layers of a period, ...]; the scan runs over periods.
        xs = jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), group_rows)
        body = functools.partial(run, range(leading, leading + length), repeats > 1)
        scan = functools.partial(jax.lax.scan, body, xs=xs, unroll=max(1, unroll // length))
        yield LayerGroup(scan, is_scanned=True)


def row_of_layer(rows: LayerInputs, stack: str, used: Counter[str]) -> tuple[PyTree, PyTree]:
    """Return the parameters and the decoding state of the next layer of a stack.

    Args:
        rows: inputs of consecutive layers.
        stack: name of the layer's stack.
        used: number of rows of each stack that earlier layers have taken; the layer is added.
    """
    row = used[stack]
    used[stack] += 1
    state = None if rows.states is None else _row(rows.states[stack], row)
    return _row(rows.stacks[stack], row), state


def run_period(
    period: Sequence[str],
    layer: Callable[[LayerKind, str, bool], Layer],
    x_BSD: Array,
    inputs: tuple[LayerKind, LayerInputs],
) -> tuple[Array, LayerOut]:
    """Run the consecutive layers that repeat in a pipeline stage, in a loop over repetitions.

    Args:
        period: name of the stack of each layer (`LayerPlan.stage_period`).
        layer: (kind, name of the stack, whether in a loop) -> the layer function.
        x_BSD: input of the first layer.
        inputs: kinds as arrays, and inputs of the layers. If there are several layers, arrays have
            a leading dimension of the layers.
    """
    kinds, rows = inputs
    if len(period) == 1:
        (stack,) = period
        state = None if rows.states is None else rows.states[stack]
        x_BSD, out = layer(kinds, stack, True)(x_BSD, (rows.stacks[stack], state))
        return x_BSD, out._replace(cache={stack: out.cache})
    outs, used = [], Counter[str]()
    for i, stack in enumerate(period):
        row = row_of_layer(rows, stack, used)
        x_BSD, out = layer(_row(kinds, i), stack, True)(x_BSD, row)
        outs.append(out)
    return x_BSD, stack_outputs(period, outs)


def run_rows(
    names: Sequence[str],
    layer: Callable[[LayerKind, str, bool], Layer],
    x_BSD: Array,
    layers: tuple[LayerKind, Locations],
    inputs: LayerInputs,
) -> tuple[Array, LayerOut]:
    """Run the layers of a pipeline stage whose layers differ from those of other stages.

    Args:
        names: names of the stacks (`Stack.stack_names`).
        layer: (kind, name of the stack, whether in a loop) -> the layer function.
        x_BSD: input of the first layer.
        layers: kinds and locations of the rows of the stage, as arrays.
        inputs: parameters and states of the stage's layers.
    """
    stacks, states = inputs

    def run_row(carry: tuple[Array, PyTree], row: tuple[LayerKind, Locations]) -> Any:  # noqa: ANN401
        (x_BSD, states), (kind, location) = carry, row

        def run(name: str) -> LayerResult[LayerOut]:
            state = None if states is None else _row(states[name], location.row)
            y_BSD, out = layer(kind, name, True)(x_BSD, (_row(stacks[name], location.row), state))
            return y_BSD, (jax.tree.leaves(out.cache), out._replace(cache=None))

        layers = [functools.partial(run, name) for name in names]
        # The branches of a switch must agree on the axes over which their results vary.
        varying = collectives.varying_axes((x_BSD, location))
        x_BSD, (shared, out) = run_layer(location.stack, layers, x_BSD, varying)
        for i, name in enumerate(names if states is not None else ()):
            like, structure = jax.tree.flatten(_row(states[name], location.row))
            new = jax.tree.unflatten(structure, arrays_of_layer(shared, like))
            set_row = functools.partial(_with_row, row=location.row, new=new)
            states = {**states, name: change_if(location.stack == i, set_row, states[name])}
        return (x_BSD, states), out

    (x_BSD, states), out = jax.lax.scan(run_row, (x_BSD, states), layers)
    return x_BSD, out._replace(cache=states)


def split_periods(period: Sequence[str], repeats: int, stacked: PyTree) -> PyTree:
    """Reshape rows of a stage to [repetitions of a period, layers of a period, ...].

    With one layer in a period, or without a period, nothing changes.
    """
    if len(period) < 2:
        return stacked
    return jax.tree.map(lambda leaf: leaf.reshape(repeats, -1, *leaf.shape[1:]), stacked)


def join_periods(period: Sequence[str], stacked: PyTree) -> PyTree:
    """Undo `split_periods`."""
    if len(period) < 2:
        return stacked
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), stacked)


def stack_outputs(stacks: Sequence[str], outs: Sequence[LayerOut]) -> LayerOut:
    """Stack outputs of consecutive layers: decoding states by stack, the others by layer."""
    states: dict[str, list[PyTree]] = {}
    for stack, out in zip(stacks, outs, strict=True):
        states.setdefault(stack, []).append(out.cache)
    without_caches = [out._replace(cache=None, keys=None) for out in outs]
    cache = {stack: _stacked(rows) for stack, rows in states.items()}
    # Only layers that run alone return keys.
    return _stacked(without_caches)._replace(cache=cache, keys=outs[-1].keys)


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


def slice_layers(rows: LayerInputs, plan: LayerPlan, layers: slice) -> LayerInputs:
    """Return the rows of consecutive layers, without stacks that have none of these layers."""
    if layers == slice(0, len(plan.layers)):
        return rows
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


def _with_row(stacked: PyTree, row: Array, new: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf, new: leaf.at[row].set(new), stacked, new)
