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
    from_the_loss,
    gradients_beside,
    root_mean_square,
    row,
    tolerance,
    update_tolerance,
)
from torch_compat.checkpoint.stacking import Stacking
from torch_compat.formats.lazy import of_array
from torch_compat.lockstep import hints
from torch_compat.lockstep.hints import Pair
from torch_compat.lockstep.ours import Ours, dtype_of
from torch_compat.lockstep.places import Place, layer_number
from torch_compat.lockstep.theirs import Named, Theirs
from torch_compat.names.table import HEAD, NameMap
from torch_compat.names.translation import some

_UNSURE = 2  # times what moved weights make of a value: a tolerance, where that is larger

Hinted = tuple[Row, Callable[[], str]]
"""A row, and what makes its hint where it is the first that differs."""


class Sides(NamedTuple):
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

    ours: Ours
    theirs: Theirs
    held: Named
    updates: tuple[Named, Named] | None
    dialect: NameMap
    config: JobConfig
    labels: np.ndarray
    places: Sequence[Place]

    def by_our_names(self, named: Mapping[str, np.ndarray]) -> Named:
        """Their tensors of parameters by our names, in our layout."""
        lazy = {key: of_array(array) for key, array in named.items()}
        found = self.dialect.to_ours(lazy, self.ours.params, self.config.model)
        return {name: tensor.all() for name, tensor in found.items()}

    def names(self, name: str) -> tuple[str, str]:
        """A parameter as both call it."""
        return name, self.dialect.their_name(name)


def rows_of(sides: Sides) -> tuple[list[Row], list[str]]:
    """A row for each value, in order, and notes; the first that differs has a hint."""
    rows, found = list[Row](), False
    for made, hint in _rows(sides):
        is_first = made.differs and not found
        rows.append(dataclasses.replace(made, hint=made.hint or hint()) if is_first else made)
        found |= is_first
    return rows, list(_notes(sides))


def _rows(sides: Sides) -> Iterator[Hinted]:
    for name, theirs in sides.by_our_names(sides.held).items():
        made = row("weights", sides.names(name), sides.ours.params[name], theirs, 0.0)
        yield made, lambda: hints.WEIGHTS
    yield from _forward(sides)
    yield from _loss(sides)
    yield from _gradients(sides)
    yield from _updates(sides)


def _forward(sides: Sides) -> Iterator[Hinted]:
    modules = {place.point: place.module for place in sides.places}
    pairs = _pairs(sides.ours.points, sides.theirs.points)
    for name, pair in pairs.items():
        names = name, modules.get(name, name)
        unsure = _UNSURE * _share(sides.ours.unsure[name], root_mean_square(pair.ours))
        allowed = max(_allowed(sides, _parts(sides, name)), unsure)
        made = row("forward", names, pair.ours, pair.theirs, allowed)
        yield made, functools.partial(hints.of_point, name, pairs, sides.config)


def _pairs(ours: Named, theirs: Named) -> dict[str, Pair]:
    found = {}
    for name, value in ours.items():
        if name in theirs:
            other = theirs[name]
            is_flat = other.size == value.size and other.shape != value.shape
            found[name] = Pair(value, other.reshape(value.shape) if is_flat else other)
    return found


def _loss(sides: Sides) -> Iterator[Hinted]:
    ours, theirs = sides.ours.loss, sides.theirs.loss
    allowed = _allowed(sides, 2 * sides.config.model.n_layers + 2)
    made = row("loss", ("loss", "loss"), np.array([ours]), np.array([theirs]), allowed)
    yield made, lambda: hints.of_loss(ours, theirs, sides.labels)


def _gradients(sides: Sides) -> Iterator[Hinted]:
    ours, layers = sides.ours.grads, sides.config.model.n_layers
    theirs, beside = sides.by_our_names(sides.theirs.grads), gradients_beside(ours)
    allowed = _allowed(sides, 3 * (2 * layers + 2))  # there, and back by two products for each
    has_head = sides.dialect.their_key(HEAD) in sides.theirs.grads
    is_untied = sides.config.model.tie_embeddings and has_head
    for name in from_the_loss(theirs, layers):
        pair = Pair(ours[name], theirs[name])
        least = SMALL * beside[name]
        size = max(least, root_mean_square(pair.ours))
        unsure = _UNSURE * _share(sides.ours.unsure_grads[name], size)
        made = row(
            "gradients", sides.names(name), pair.ours, pair.theirs, max(allowed, unsure),
            least=least,
        )  # fmt: skip
        yield made, functools.partial(hints.of_gradient, pair, is_untied=is_untied)


def _updates(sides: Sides) -> Iterator[Hinted]:
    if sides.updates is None:
        return
    first, second = map(sides.by_our_names, sides.updates)
    stacking, o = Stacking(sides.config.model), sides.config.optimizer
    for name, theirs in first.items():
        pair, param = Pair(sides.ours.updates[0][name], theirs), sides.ours.params[name]
        made = row(
            "updates", sides.names(name), pair.ours, theirs, update_tolerance(pair.ours, param)
        )
        decay = o.weight_decay * o.decays(stacking.array_of(name), is_matrix=param.ndim > 1)
        grad = sides.ours.grads[name]
        yield made, functools.partial(hints.of_update, pair, grad, param, decay, o)
    for name, theirs in second.items():
        pair = Pair(sides.ours.updates[1][name], theirs)
        allowed = update_tolerance(pair.ours, sides.ours.params[name])
        yield (
            row("second updates", sides.names(name), pair.ours, theirs, allowed),
            lambda: hints.SECOND,
        )


def _share(apart: float, size: float) -> float:
    return apart / size if size and np.isfinite(apart) else 0.0


def _allowed(sides: Sides, parts: int) -> float:
    return tolerance(dtype_of(sides.config), sides.config.model.dim, parts)


def _parts(sides: Sides, point: str) -> int:
    """Attentions and feed-forwards that a value has been through; embedding and norm are one."""
    if point == "embed":
        return 1
    layer = layer_number(point)
    if layer is None:
        return 2 * sides.config.model.n_layers + 2
    return 2 * layer + (2 if "attention" in point else 3)


def _notes(sides: Sides) -> Iterator[str]:
    if missing := [name for name in sides.ours.points if name not in sides.theirs.points]:
        yield f"not compared, as no module of theirs has it: {some(missing)}"
    known = {sides.dialect.their_key(name) for name in sides.ours.params}
    known.add(sides.dialect.their_key(HEAD))
    if alone := [name for name in sides.theirs.grads if name not in known]:
        yield f"not compared, as {sides.dialect.name} has no such name: {some(alone)}"
    if sides.updates is None:
        yield "updates were not compared: the factory returned no optimizer"
