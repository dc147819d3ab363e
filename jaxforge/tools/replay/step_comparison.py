"""Comparison of a step of two runs, or of a run under two configs, value by value."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict
from jaxtyping import Array, PyTree

from jaxforge.config.model import LAYERS
from jaxforge.config.points import STREAM
from jaxforge.errors import UserError
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Params
from jaxforge.parallel.sharding import param_shardings
from jaxforge.state.train_state import part_like
from jaxforge.step.update_loss import Batch
from jaxforge.tools.replay.compare import (
    SMALL,
    Row,
    gradient_scales,
    in_backward_order,
    row,
    tolerance,
    update_tolerance,
)
from jaxforge.tools.replay.past import PastRun, Walk, open_past

Named = dict[str, np.ndarray]
"""Host arrays by name; stacked parameters have an array for each layer."""

_ROWS, _TOKENS = 4, 64  # of the first microbatch, for forward values


@dataclasses.dataclass(frozen=True)
class StepValues:
    """Inputs and results of a step.

    Attributes:
        dtype: dtype of activations: "float32" or "bfloat16".
        width: width of the residual stream.
        params: parameters before the step.
        batch: batch of the step, [sequences, ...].
        points: values of the forward pass; empty if devices share sequences.
        loss: loss of the update.
        grads: gradients before clipping.
        grads_tree: the same gradients as a tree, with stacked layers in model order.
        updates: updates of the parameters; both runs apply the gradients of the first.
    """

    dtype: str
    width: int
    params: Named
    batch: Named
    points: Named
    loss: float
    grads: Named
    grads_tree: PyTree
    updates: Named


@dataclasses.dataclass(frozen=True)
class ReplayedRun:
    """A run and settings over its config."""

    run: Path
    overrides: Sequence[str] = ()


def compare_steps(run: ReplayedRun, other: ReplayedRun, step: int) -> tuple[list[Row], list[str]]:
    """Compare a step of two runs.

    Args:
        run: the first run, whose gradients make the updates of both.
        other: the run to compare with.
        step: number of the step, from 1.

    Returns:
        A row for each value, in the order of computation, and notes.

    Raises:
        UserError: the run or the step does not exist.
    """
    if jax.process_count() > 1:
        raise UserError("--against needs a single process: start it on one host")
    first = replay_step(run, step)
    second = replay_step(other, step, first.grads_tree)
    notes = []
    if not (first.points and second.points):
        notes.append("forward values were not compared: devices share sequences (distributed.cp)")
    return list(compare_values(first, second)), notes


def compare_values(a: StepValues, b: StepValues) -> Iterator[Row]:
    """Yield a row for each value of two steps."""
    dtype = "bfloat16" if "bfloat16" in (a.dtype, b.dtype) else "float32"
    layers = len({name.split(".")[1] for name in a.params if name.startswith(f"{LAYERS}.")})
    parts = 2 * layers + 2
    rounding = tolerance("float32", a.width, 1)
    yield from _pairs("weights", a.params, b.params, a.params, rounding)
    yield from _pairs("batch", a.batch, b.batch, a.batch, 0.0)
    if a.points and b.points:
        rows = min(len(step.points["embed"]) for step in (a, b))
        x, y = ({name: x[:rows] for name, x in step.points.items()} for step in (a, b))
        yield from _pairs("forward", x, y, x, tolerance(dtype, a.width, parts))
    loss = np.array([a.loss]), np.array([b.loss])
    yield row("loss", ("loss", "loss"), *loss, tolerance(dtype, a.width, parts))
    scales, allowed = gradient_scales(a.grads), tolerance(dtype, a.width, 3 * parts)
    for name in in_backward_order(a.grads.keys() & b.grads, layers):
        least = SMALL * scales[name]
        yield row("gradients", (name, name), a.grads[name], b.grads[name], allowed, least=least)
    for name in (name for name in a.updates if name in b.updates):
        update = a.updates[name], b.updates[name]
        yield row("updates", (name, name), *update, update_tolerance(update[0], a.params[name]))


def _pairs(
    stage: str, a: Named, b: Named, order: Mapping[str, np.ndarray], allowed: float
) -> Iterator[Row]:
    for name in (*order, *(name for name in b if name not in order)):
        if name in a and name in b:
            yield row(stage, (name, name), a[name], b[name], allowed)
        else:
            where = "first" if name in a else "second"
            yield Row(stage, name, name, np.inf, np.inf, allowed, f"only in the {where} run")


def replay_step(run: ReplayedRun, step: int, grads: PyTree | None = None) -> StepValues:
    """Replay a step of a run.

    Args:
        run: the run.
        step: number of the step, from 1.
        grads: gradients to apply (`StepValues.grads_tree`); by default the step's own.
    """
    with open_past(run.run, step, run.overrides) as past:
        walk = past.walk(step)
        params = _named(past, walk.state.params)
        metrics = walk.measure(past.step_function(("grads",)))
        own_grads = _in_order(past, metrics["grads"])
        batch = {  # all microbatches as one: [m, b, ...] -> [m b, ...]
            name: np.asarray(leaf).reshape(-1, *leaf.shape[2:]) for name, leaf in walk.batch.items()
        }
        return StepValues(
            "float32" if past.model.dtype == jnp.float32 else "bfloat16",
            past.config.model.dim,
            params,
            batch,
            {} if past.config.distributed.cp > 1 else _points(past, walk),
            float(metrics["loss"]),
            _named(past, metrics["grads"]),
            own_grads,
            _named(past, _updates(past, walk, own_grads if grads is None else grads)),
        )


def _points(past: PastRun, walk: Walk) -> Named:
    """Return values of the forward pass for some tokens of the first microbatch."""
    model = past.model

    def sample(x: Array) -> Array:
        return x[:_ROWS, :: max(1, x.shape[1] // _TOKENS)].astype(jnp.float32)

    def points(params: Params, batch: Batch) -> dict[str, PyTree]:
        first = {name: leaf[0] for name, leaf in batch.items()}
        capture = Capture(STREAM, lambda name, x: sample(x))
        hidden, out = model.forward(params, first, capture=capture)
        layers = {name: model.stack.unstack(x) for name, x in out.activations.items()}
        embedded = sample(model.embed(params, first))
        return {"embed": embedded, "final_norm": sample(hidden), LAYERS: layers}

    values = jax.device_get(jax.jit(points)(walk.state.variables, walk.batch))
    flat = {"embed": values["embed"]}
    for i in range(model.config.n_layers):
        flat |= {f"{LAYERS}.{i}.{name}": values[LAYERS][name][i] for name in STREAM}
    return flat | {"final_norm": values["final_norm"]}


def _updates(past: PastRun, walk: Walk, grads: PyTree) -> PyTree:
    """Return the updates for gradients with layers in model order."""
    stacks, stack = past.config.model.stacks, past.model.stack
    laid_out = {
        name: jax.device_get(jax.tree.map(stack.of(name).stack, part)) if name in stacks else part
        for name, part in grads.items()
    }
    shardings = param_shardings(past.model.abstract, past.model.axes, past.mesh)
    shardings = part_like(laid_out, shardings)  # frozen parameters have no gradient
    scale, state = walk.controls.lr_scale, walk.state
    update = jax.jit(lambda g, s, p: past.optimizer.update(g, s, p, lr_scale=scale)[0])
    return update(jax.device_put(laid_out, shardings), state.opt_state, state.params)


def _in_order(past: PastRun, tree: Params) -> PyTree:
    """Return a tree on the host, with the layers of each stack in model order."""
    stacks, stack = past.config.model.stacks, past.model.stack
    return {
        name: jax.tree.map(stack.of(name).unstack, part) if name in stacks else part
        for name, part in jax.device_get(tree).items()
    }


def _named(past: PastRun, tree: Params) -> Named:
    named: Named = {}
    for name, leaf in flatten_dict(_in_order(past, tree), sep=".").items():
        stack, _, name_in_stack = name.partition(".")
        layers = past.config.model.stacks.get(stack)
        if layers is None:
            named[name] = leaf
        else:
            named |= {f"{LAYERS}.{i}.{name_in_stack}": leaf[k] for k, i in enumerate(layers)}
    return named
