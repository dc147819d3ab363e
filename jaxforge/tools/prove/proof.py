"""Comparison of updates on meshes with those on one device."""

import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from jaxforge.config.axes import declared_sizes, token_parallel
from jaxforge.config.job import JobConfig
from jaxforge.parallel.mesh import describe_mesh
from jaxforge.tools.prove.faults import FAULTS
from jaxforge.tools.prove.smaller import transposed
from jaxforge.tools.prove.trajectory import (
    Trainer,
    Update,
    by_kind,
    random_batches,
    random_variables,
    rounded,
)

UPDATES = 3
_FLOOR = 2e-5  # relative difference that is always allowed: sums of float32 in another order
_FACTOR = 50.0  # allowed differences over those of a change of the weights by their rounding
_TINY = 1e-30
_ROUNDINGS = 3


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Largest difference of a quantity between a mesh and one device.

    Attributes:
        name: what was compared, such as "gradients".
        difference: largest difference of an array, relative to its largest element.
        allowed: difference that rounding explains.
        where: the array with the largest difference over `allowed`, such as
            "layers.3.mlp.up_proj.weight, update 2".
    """

    name: str
    difference: float
    allowed: float
    where: str

    @property
    def excess(self) -> float:
        """The difference over what is allowed."""
        return self.difference / max(self.allowed, _TINY)

    @property
    def is_equal(self) -> bool:
        """True if rounding explains the difference."""
        return self.difference <= self.allowed


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A mesh compared with one device.

    Attributes:
        about: the mesh, and how gradients are reduced.
        quantities: the worst array of each quantity, in the order in which updates compute them.
        different: all arrays whose difference rounding does not explain.
    """

    about: str
    quantities: tuple[Quantity, ...]
    different: tuple[Quantity, ...] = ()

    @classmethod
    def of(cls, about: str, arrays: Iterable[Quantity]) -> "Comparison":
        """Return the comparison of all arrays of all quantities."""
        arrays, worst = [*arrays], dict[str, Quantity]()
        for each in arrays:
            so_far = worst.get(each.name)
            if so_far is None or each.excess > so_far.excess:
                worst[each.name] = each
        different = tuple(each for each in arrays if not each.is_equal)
        return cls(about, tuple(worst.values()), different)

    @property
    def first_difference(self) -> Quantity | None:
        """The worst array of the first quantity that rounding does not explain."""
        return next((each for each in self.quantities if not each.is_equal), None)


class Reference:
    """Updates of a small config on one device, and how much rounding changes each of them.

    Every update of a mesh begins with the state of the reference, so that differences do not grow
    from one update to the next.

    Args:
        small: result of `smaller.smaller`.

    Attributes:
        batches: the batch of each update.
        states: the state before each update, on the host.
    """

    def __init__(self, small: JobConfig) -> None:
        alone = Trainer(small)
        self.batches = random_batches(small, UPDATES)
        self.states = [alone.start(random_variables(small))]
        self._updates: list[Update] = []
        rounding: dict[Key, float] = {}
        for i, batch in enumerate(self.batches):
            before = self.states[-1]
            state, update = alone.update(before, batch)
            # The same update with weights that differ by their rounding: some gradients are nothing
            # but rounding, and optimizers turn the sign of these into whole steps.
            for seed in range(_ROUNDINGS):
                _, other = alone.update(rounded(before, seed), batch)
                for key, difference in _differences(i, update, other):
                    rounding[key] = max(difference, rounding.get(key, 0.0))
            self._updates.append(update)
            self.states.append(jax.device_get(state))
        self._allowed = {key: _FLOOR + _FACTOR * value for key, value in rounding.items()}

    def follow(self, trainer: Trainer) -> Iterator[Quantity]:
        """Yield the differences of the updates of a trainer."""
        for i, batch in enumerate(self.batches):
            _, update = trainer.update(self.states[i], batch)
            yield from self._quantities(i, update)

    def follow_over_a_save(self, first: Trainer, then: Trainer) -> Iterator[Quantity]:
        """Yield the differences of a state that is saved by one trainer and restored by another.

        The bits of a restored array must be those of the saved one. An update follows.
        """
        last = UPDATES - 1
        before = self.states[last]
        with tempfile.TemporaryDirectory(prefix="jaxforge-prove-") as directory:
            first.save(first.put(before), Path(directory))
            state = then.restore(before.params, Path(directory), last)
        saved, restored = by_kind(before), by_kind(state, then.program.model.stack)
        for what, arrays in saved.items():
            for name, array in arrays.items():
                difference = _difference(array, restored[what][name])
                yield Quantity(f"restored {what}", difference, 0.0, name)
        _, update = then.update(before, self.batches[last], placed=state)
        yield from self._quantities(last, update)

    def _quantities(self, i: int, update: Update) -> Iterator[Quantity]:
        for key, difference in _differences(i, self._updates[i], update):
            yield Quantity(key.quantity, difference, self._allowed[key], str(key))


def compare(reference: Reference, mesh: JobConfig) -> Iterator[Comparison]:
    """Compare a mesh with one device: both reductions of gradients, and over a checkpoint.

    Args:
        reference: the updates on one device.
        mesh: one of `smaller.meshes`.
    """
    trainers = _trainers(mesh)
    for sync, trainer in trainers.items():
        about = f"{_axes(trainer)}, gradients reduced per {sync}"
        yield Comparison.of(about, reference.follow(trainer))
    first, other = trainers["update"], Trainer(transposed(mesh))
    about = f"{_axes(first)}, saved and restored on {_axes(other)}"
    yield Comparison.of(about, reference.follow_over_a_save(first, other))


def plant(reference: Reference, mesh: JobConfig) -> Iterator[Comparison]:
    """Compare a mesh that has a fault with one device, for each fault that it can have.

    Args:
        reference: the updates on one device.
        mesh: one of `smaller.meshes`.
    """
    sound = _trainers(mesh)["update"]
    for fault in FAULTS:
        if not fault.applies(mesh):
            continue
        faulty = sound.with_fault(fault)
        quantities = (
            reference.follow_over_a_save(sound, faulty)
            if fault.restored
            else reference.follow(faulty)
        )
        yield Comparison.of(f"{_axes(sound)}: {fault.about}", quantities)


def _trainers(mesh: JobConfig) -> dict[str, Trainer]:
    """Return a trainer for each way to reduce gradients, if there are several."""
    syncs = ("update", "microbatch") if token_parallel(declared_sizes(mesh)) > 1 else ("update",)
    return {sync: Trainer(mesh.with_values({"train.grad_sync": sync})) for sync in syncs}


def _axes(trainer: Trainer) -> str:
    return describe_mesh(trainer.program.mesh.shape)


class Key(NamedTuple):
    """An array of an update.

    Attributes:
        quantity: what it is.
        update: number of the update, from 0.
        name: name of the array; empty for a scalar.
    """

    quantity: str
    update: int
    name: str

    def __str__(self) -> str:
        return f"{self.name}{', ' if self.name else ''}update {self.update + 1}"


def _differences(i: int, first: Update, second: Update) -> Iterator[tuple[Key, float]]:
    """Yield the relative difference of each array, in the order in which updates compute them."""
    reference, result = first.quantities, second.quantities
    for quantity, arrays in reference.items():
        for name, array in arrays.items():
            yield Key(quantity, i, name), _difference(array, result[quantity][name])


def _difference(expected: np.ndarray, result: np.ndarray) -> float:
    """Return the largest difference of two arrays over the largest element of the first."""
    if expected.shape != result.shape:
        return np.inf
    if not expected.size:
        return 0.0
    expected, result = expected.astype(np.float64), result.astype(np.float64)
    difference = np.abs(result - expected)
    if not np.isfinite(result).all():
        return np.inf
    return float(difference.max() / max(np.abs(expected).max(), _TINY))
