"""Both sides' values in the order in which models make them, with what tells their differences."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jaxforge.config.job import JobConfig
from jaxforge.tools.replay.compare import (
    SMALL,
    Row,
    gradient_scales,
    in_backward_order,
    root_mean_square,
    row,
    tolerance,
    update_tolerance,
)
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.formats.lazy import from_array
from torch_compat.lockstep import hints
from torch_compat.lockstep.hints import Pair
from torch_compat.lockstep.jaxforge_model import JaxforgeValues, activation_dtype
from torch_compat.lockstep.module_locations import ModuleLocation, layer_number
from torch_compat.lockstep.torch_model import Arrays, TorchValues
from torch_compat.names.table import HEAD, NameMap
from torch_compat.names.translation import summarize_names

_UNSURE = 2  # times what moved weights make of a value: a tolerance, where that is larger

Hinted = tuple[Row, Callable[[], str]]
"""A row, and what makes its hint where it is the first that differs."""


class Comparison(NamedTuple):
    """Both sides of a comparison.

    Attributes:
        ours: our side.
        theirs: torch's.
        held: the module's parameters and buffers, by its names.
        updates: its first and second update by our gradients, by its names; None: no optimizer.
        dialect: whose names those are.
        config: ours.
        labels: of the batch.
        places: where values of the forward pass were taken.
    """

    ours: JaxforgeValues
    theirs: TorchValues
    held: Arrays
    updates: tuple[Arrays, Arrays] | None
    dialect: NameMap
    config: JobConfig
    labels: np.ndarray
    locations: Sequence[ModuleLocation]

    def by_our_names(self, named: Mapping[str, np.ndarray]) -> Arrays:
        """Their tensors of parameters by our names, in our layout."""
        lazy = {key: from_array(array) for key, array in named.items()}
        has_difference = self.dialect.to_jaxforge(lazy, self.ours.params, self.config.model)
        return {name: tensor.all() for name, tensor in has_difference.items()}

    def names(self, name: str) -> tuple[str, str]:
        """A parameter as both call it."""
        return name, self.dialect.key_for(name)


def comparison_rows(comparison: Comparison) -> tuple[list[Row], list[str]]:
    """A row for each value, in order, and notes; the first that differs has a hint."""
    rows, has_difference = list[Row](), False
    for row_, hint in _rows(comparison):
        is_first = row_.differs and not has_difference
        rows.append(dataclasses.replace(row_, hint=row_.hint or hint()) if is_first else row_)
        has_difference |= is_first
    return rows, list(_notes(comparison))


def _rows(comparison: Comparison) -> Iterator[Hinted]:
    for name, theirs in comparison.by_our_names(comparison.held).items():
        row_ = row("weights", comparison.names(name), comparison.ours.params[name], theirs, 0.0)
        yield row_, lambda: hints.WEIGHTS
    yield from _forward(comparison)
    yield from _loss(comparison)
    yield from _gradients(comparison)
    yield from _updates(comparison)


def _forward(comparison: Comparison) -> Iterator[Hinted]:
    modules = {location.point: location.module for location in comparison.locations}
    pairs = _pairs(comparison.ours.points, comparison.theirs.points)
    for name, pair in pairs.items():
        names = name, modules.get(name, name)
        unsure = _UNSURE * _share(comparison.ours.unsure[name], root_mean_square(pair.ours))
        allowed = max(_allowed(comparison, _parts(comparison, name)), unsure)
        row_ = row("forward", names, pair.ours, pair.theirs, allowed)
        yield row_, functools.partial(hints.forward_hint, name, pairs, comparison.config)


def _pairs(ours: Arrays, theirs: Arrays) -> dict[str, Pair]:
    has_difference = {}
    for name, value in ours.items():
        if name in theirs:
            other = theirs[name]
            is_flat = other.size == value.size and other.shape != value.shape
            has_difference[name] = Pair(value, other.reshape(value.shape) if is_flat else other)
    return has_difference


def _loss(comparison: Comparison) -> Iterator[Hinted]:
    ours, theirs = comparison.ours.loss, comparison.theirs.loss
    allowed = _allowed(comparison, 2 * comparison.config.model.n_layers + 2)
    row_ = row("loss", ("loss", "loss"), np.array([ours]), np.array([theirs]), allowed)
    yield row_, lambda: hints.loss_hint(ours, theirs, comparison.labels)


def _gradients(comparison: Comparison) -> Iterator[Hinted]:
    ours, layers = comparison.ours.grads, comparison.config.model.n_layers
    theirs, beside = comparison.by_our_names(comparison.theirs.grads), gradient_scales(ours)
    allowed = _allowed(comparison, 3 * (2 * layers + 2))  # there, and back by two products for each
    has_head = comparison.dialect.find_key(HEAD) in comparison.theirs.grads
    is_untied = comparison.config.model.tie_embeddings and has_head
    for name in in_backward_order(theirs, layers):
        pair = Pair(ours[name], theirs[name])
        least = SMALL * beside[name]
        size = max(least, root_mean_square(pair.ours))
        unsure = _UNSURE * _share(comparison.ours.gradient_drift[name], size)
        row_ = row(
            "gradients", comparison.names(name), pair.ours, pair.theirs, max(allowed, unsure),
            least=least,
        )  # fmt: skip
        yield row_, functools.partial(hints.gradient_hint, pair, is_untied=is_untied)


def _updates(comparison: Comparison) -> Iterator[Hinted]:
    if comparison.updates is None:
        return
    first, second = map(comparison.by_our_names, comparison.updates)
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
            lambda: hints.SECOND,
        )


def _share(apart: float, size: float) -> float:
    return apart / size if size and np.isfinite(apart) else 0.0


def _allowed(comparison: Comparison, parts: int) -> float:
    return tolerance(activation_dtype(comparison.config), comparison.config.model.dim, parts)


def _parts(comparison: Comparison, point: str) -> int:
    """Attentions and feed-forwards that a value has been through; embedding and norm are one."""
    if point == "embed":
        return 1
    layer = layer_number(point)
    if layer is None:
        return 2 * comparison.config.model.n_layers + 2
    return 2 * layer + (2 if "attention" in point else 3)


def _notes(comparison: Comparison) -> Iterator[str]:
    if missing := [name for name in comparison.ours.points if name not in comparison.theirs.points]:
        yield f"not compared, as no module of theirs has it: {summarize_names(missing)}"
    known = {comparison.dialect.find_key(name) for name in comparison.ours.params}
    known.add(comparison.dialect.find_key(HEAD))
    if alone := [name for name in comparison.theirs.grads if name not in known]:
        yield f"not compared, as {comparison.dialect.name} has no such name: {summarize_names(alone)}"
    if comparison.updates is None:
        yield "updates were not compared: the factory returned no optimizer"
