"""Rows of the comparison: values of both models in the order of computation, with hints."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxforge.config.job import JobConfig
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.formats.lazy import from_array
from torch_compat.lockstep import hints
from torch_compat.lockstep.batches import Arrays
from torch_compat.lockstep.hints import Pair
from torch_compat.lockstep.jaxforge_model import JaxforgeValues, activation_dtype
from torch_compat.lockstep.module_locations import ModuleLocation, layer_number
from torch_compat.lockstep.rounding import tolerance
from torch_compat.lockstep.rows import (
    SMALL,
    Row,
    gradient_scales,
    in_backward_order,
    root_mean_square,
    row,
    update_tolerance,
)
from torch_compat.lockstep.torch_model import TorchValues
from torch_compat.names.table import HEAD, NameMap
from torch_compat.names.translation import summarize_names

_DRIFT_FACTOR = 2  # tolerance: at least this many times the change caused by rounding weights

RowAndHint = tuple[Row, Callable[[], str]]
"""Row, and a function that returns its hint if it is the first row that differs."""


class Comparison(NamedTuple):
    """Values of both models.

    Attributes:
        ours: values of jaxforge's model.
        theirs: values of the torch model.
        weights: parameters and buffers of the torch module, by its names.
        updates: first and second update of its optimizer for jaxforge's gradients, by its names;
            None: no optimizer.
        dialect: dialect of the module's names.
        config: config of jaxforge's model.
        labels: labels of the batch.
        locations: modules at which values of the forward pass were captured.
    """

    ours: JaxforgeValues
    theirs: TorchValues
    weights: Arrays
    updates: tuple[Arrays, Arrays] | None
    dialect: NameMap
    config: JobConfig
    labels: np.ndarray
    locations: Sequence[ModuleLocation]

    def to_jaxforge_names(self, named: Mapping[str, np.ndarray]) -> Arrays:
        """Return tensors of the module by jaxforge's names, in jaxforge's layout."""
        lazy = {key: from_array(array) for key, array in named.items()}
        tensors = self.dialect.to_jaxforge(lazy, self.ours.params, self.config.model)
        return {name: tensor.all() for name, tensor in tensors.items()}

    def names(self, name: str) -> tuple[str, str]:
        """Return the names of a parameter in both models."""
        return name, self.dialect.key_for(name)


def comparison_rows(comparison: Comparison) -> tuple[list[Row], list[str]]:
    """Return a row for each value and notes; the first row that differs has a hint."""
    rows, has_difference = list[Row](), False
    for row_, hint in _rows(comparison):
        is_first = row_.differs and not has_difference
        rows.append(dataclasses.replace(row_, hint=row_.hint or hint()) if is_first else row_)
        has_difference |= is_first
    return rows, list(_notes(comparison))


def _rows(comparison: Comparison) -> Iterator[RowAndHint]:
    for name, theirs in comparison.to_jaxforge_names(comparison.weights).items():
        row_ = row("weights", comparison.names(name), comparison.ours.params[name], theirs, 0.0)
        yield row_, lambda: hints.WEIGHTS_HINT
    yield from _forward(comparison)
    yield from _loss(comparison)
    yield from _gradients(comparison)
    yield from _updates(comparison)


def _forward(comparison: Comparison) -> Iterator[RowAndHint]:
    modules = {location.point: location.module for location in comparison.locations}
    pairs = _pairs(comparison.ours.points, comparison.theirs.points)
    for name, pair in pairs.items():
        names = name, modules.get(name, name)
        drift = comparison.ours.point_drift[name]
        drift_tolerance = _DRIFT_FACTOR * _relative(drift, root_mean_square(pair.ours))
        allowed = max(_tolerance(comparison, _depth(comparison, name)), drift_tolerance)
        row_ = row("forward", names, pair.ours, pair.theirs, allowed)
        yield row_, functools.partial(hints.forward_hint, name, pairs, comparison.config)


def _pairs(ours: Arrays, theirs: Arrays) -> dict[str, Pair]:
    pairs = {}
    for name, value in ours.items():
        if name in theirs:
            other = theirs[name]
            is_flat = other.size == value.size and other.shape != value.shape
            pairs[name] = Pair(value, other.reshape(value.shape) if is_flat else other)
    return pairs


def _loss(comparison: Comparison) -> Iterator[RowAndHint]:
    ours, theirs = comparison.ours.loss, comparison.theirs.loss
    allowed = _tolerance(comparison, 2 * comparison.config.model.n_layers + 2)
    row_ = row("loss", ("loss", "loss"), np.array([ours]), np.array([theirs]), allowed)
    yield row_, lambda: hints.loss_hint(ours, theirs, comparison.labels)


def _gradients(comparison: Comparison) -> Iterator[RowAndHint]:
    ours, layers = comparison.ours.grads, comparison.config.model.n_layers
    theirs, beside = comparison.to_jaxforge_names(comparison.theirs.grads), gradient_scales(ours)
    allowed = _tolerance(
        comparison, 3 * (2 * layers + 2)
    )  # forward, and two products backward for each
    has_head = comparison.dialect.find_key(HEAD) in comparison.theirs.grads
    is_untied = comparison.config.model.tie_embeddings and has_head
    for name in in_backward_order(theirs, layers):
        pair = Pair(ours[name], theirs[name])
        least = SMALL * beside[name]
        size = max(least, root_mean_square(pair.ours))
        drift_tolerance = _DRIFT_FACTOR * _relative(comparison.ours.gradient_drift[name], size)
        row_ = row(
            "gradients", comparison.names(name), pair.ours, pair.theirs,
            max(allowed, drift_tolerance), least=least,
        )  # fmt: skip
        yield row_, functools.partial(hints.gradient_hint, pair, is_untied=is_untied)


def _updates(comparison: Comparison) -> Iterator[RowAndHint]:
    if comparison.updates is None:
        return
    first, second = map(comparison.to_jaxforge_names, comparison.updates)
    stacking, o = Stacking(comparison.config.model), comparison.config.optimizer
    for name, theirs in first.items():
        pair, param = Pair(comparison.ours.updates[0][name], theirs), comparison.ours.params[name]
        row_ = row(
            "updates", comparison.names(name), pair.ours, theirs, update_tolerance(pair.ours, param)
        )
        decay = o.weight_decay * o.decays(stacking.array_of(name), is_matrix=param.ndim > 1)
        grad = comparison.ours.grads[name]
        yield row_, functools.partial(hints.update_hint, pair, grad, param, decay, o)
    for name, theirs in second.items():
        pair = Pair(comparison.ours.updates[1][name], theirs)
        allowed = update_tolerance(pair.ours, comparison.ours.params[name])
        yield (
            row("second updates", comparison.names(name), pair.ours, theirs, allowed),
            lambda: hints.SECOND_UPDATE_HINT,
        )


def _relative(drift: float, size: float) -> float:
    return drift / size if size and np.isfinite(drift) else 0.0


def _tolerance(comparison: Comparison, depth: int) -> float:
    return tolerance(activation_dtype(comparison.config), comparison.config.model.dim, depth)


def _depth(comparison: Comparison, point: str) -> int:
    """Return how many attentions and feed-forwards precede a value; the embedding counts as one."""
    if point == "embed":
        return 1
    layer = layer_number(point)
    if layer is None:
        return 2 * comparison.config.model.n_layers + 2
    return 2 * layer + (2 if "attention" in point else 3)


def _notes(comparison: Comparison) -> Iterator[str]:
    if missing := [name for name in comparison.ours.points if name not in comparison.theirs.points]:
        yield f"not compared, because no torch module computes it: {summarize_names(missing)}"
    known = {comparison.dialect.find_key(name) for name in comparison.ours.params}
    known.add(comparison.dialect.find_key(HEAD))
    if unknown := [name for name in comparison.theirs.grads if name not in known]:
        names = summarize_names(unknown)
        yield f"not compared, because {comparison.dialect.name} has no such name: {names}"
    if comparison.updates is None:
        yield "updates were not compared: the factory returned no optimizer"
