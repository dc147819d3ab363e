"""Rows of the comparison: values of both models in the order of computation.

Some models exceed the bounds of `lockstep.rounding`, for example with attention scores in the
hundreds. The drift of jaxforge's values under rounded weights widens the tolerance there.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jaxforge.config.job import JobConfig
from torch_compat.formats.lazy import from_array
from torch_compat.lockstep.batches import Arrays
from torch_compat.lockstep.jaxforge_model import (
    JaxforgeValues,
    activation_dtype,
    root_mean_square,
)
from torch_compat.lockstep.module_locations import ModuleLocation, layer_number
from torch_compat.lockstep.rounding import LEAST, ROUNDING, tolerance
from torch_compat.lockstep.torch_model import TorchValues
from torch_compat.names.table import HEAD, NameMap
from torch_compat.names.translation import summarize_names

_SMALL = 0.1  # gradients below this fraction of `_gradient_scales` are compared with that size
_DRIFT_FACTOR = 2  # tolerance: at least this many times the change caused by rounding weights
_MAX_UNEXPLAINED = 0.02  # fraction of a difference that a constant factor may leave
_HEAD = "output_head."
_LAYER = re.compile(r"layers\.(\d+)\.([^.]+)")


@dataclasses.dataclass(frozen=True)
class Row:
    """Comparison of a value in both models.

    Attributes:
        stage: "weights", "forward", "loss", "gradients", "updates" or "second updates".
        name: name in jaxforge.
        other: name in the torch module.
        error: ‖other - first‖ / ‖first‖; inf if either is not finite.
        largest: max |other - first| over the root mean square of the first.
        tolerance: largest `error` that rounding explains.
        note: differing shapes, or the constant factor between the values.
    """

    stage: str
    name: str
    other: str
    error: float
    largest: float
    tolerance: float
    note: str = ""

    @property
    def differs(self) -> bool:
        """True if rounding does not explain the difference."""
        return not self.error <= self.tolerance


class Comparison(NamedTuple):
    """Values of both models.

    Attributes:
        jaxforge: values of jaxforge's model.
        torch: values of the torch model.
        weights: parameters and buffers of the torch module, by its names.
        updates: first and second update of its optimizer for jaxforge's gradients, by its names;
            None: no optimizer.
        dialect: dialect of the module's names.
        config: config of jaxforge's model.
        locations: modules at which values of the forward pass were captured.
    """

    jaxforge: JaxforgeValues
    torch: TorchValues
    weights: Arrays
    updates: tuple[Arrays, Arrays] | None
    dialect: NameMap
    config: JobConfig
    locations: Sequence[ModuleLocation]

    def to_jaxforge_names(self, named: Mapping[str, np.ndarray]) -> Arrays:
        """Return tensors of the module by jaxforge's names, in jaxforge's layout."""
        lazy = {key: from_array(array) for key, array in named.items()}
        tensors = self.dialect.to_jaxforge(lazy, self.jaxforge.params, self.config.model)
        return {name: tensor.all() for name, tensor in tensors.items()}

    def names(self, name: str) -> tuple[str, str]:
        """Return the names of a parameter in both models."""
        return name, self.dialect.key_for(name)

    def tolerance(self, depth: int) -> float:
        """Return the relative error that rounding explains after `depth` sublayers."""
        return tolerance(activation_dtype(self.config), self.config.model.dim, depth)


def comparison_rows(comparison: Comparison) -> Iterator[Row]:
    """Yield a row for each value."""
    for name, theirs in comparison.to_jaxforge_names(comparison.weights).items():
        yield _row("weights", comparison.names(name), comparison.jaxforge.params[name], theirs, 0.0)
    yield from _forward(comparison)
    loss, torch_loss = (np.array([values.loss]) for values in comparison[:2])
    allowed = comparison.tolerance(2 * comparison.config.model.n_layers + 2)
    yield _row("loss", ("loss", "loss"), loss, torch_loss, allowed)
    yield from _gradients(comparison)
    for i, stage in enumerate(("updates", "second updates") if comparison.updates else ()):
        assert comparison.updates is not None
        for name, theirs in comparison.to_jaxforge_names(comparison.updates[i]).items():
            update, param = comparison.jaxforge.updates[i][name], comparison.jaxforge.params[name]
            # An update is a difference of two rounded parameters.
            size = root_mean_square(update)
            rounding = 2 * ROUNDING * root_mean_square(param) / size if size else 0.0
            yield _row(stage, comparison.names(name), update, theirs, LEAST + rounding)


def _forward(comparison: Comparison) -> Iterator[Row]:
    modules = {location.point: location.module for location in comparison.locations}
    for name, value in comparison.jaxforge.points.items():
        if name not in comparison.torch.points:
            continue
        theirs = comparison.torch.points[name]
        if theirs.size == value.size:  # some modules flatten batch and tokens
            theirs = theirs.reshape(value.shape)
        drift = _ratio(comparison.jaxforge.point_drift[name], root_mean_square(value))
        allowed = max(comparison.tolerance(_depth(comparison, name)), _finite(drift))
        yield _row("forward", (name, modules.get(name, name)), value, theirs, allowed)


def _gradients(comparison: Comparison) -> Iterator[Row]:
    grads, layers = comparison.jaxforge.grads, comparison.config.model.n_layers
    theirs, scales = comparison.to_jaxforge_names(comparison.torch.grads), _gradient_scales(grads)
    # The forward pass, and two products backward for each of its sublayers.
    allowed = comparison.tolerance(3 * (2 * layers + 2))
    for name in in_backward_order(theirs, layers):
        least = _SMALL * scales[name]
        size = max(least, root_mean_square(grads[name]))
        drift = _finite(_ratio(comparison.jaxforge.gradient_drift[name], size))
        yield _row(
            "gradients", comparison.names(name), grads[name], theirs[name], max(allowed, drift),
            least=least,
        )  # fmt: skip


def in_backward_order(names: Iterable[str], layers: int) -> list[str]:
    """Sort names of parameters in the order of the backward pass."""

    def order(name: str) -> tuple[int, bool]:
        if match := _LAYER.match(name):
            return 2 + layers - int(match[1]), match[2].startswith("attention")
        return 0 if name.startswith(_HEAD) else 1 if name.startswith("norm.") else 3 + layers, False

    return sorted(names, key=order)


def _gradient_scales(grads: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return for each parameter the RMS of the gradients in its part of the model.

    Gradients that are zero except for rounding, such as those of some biases, must be compared
    relative to this scale.
    """
    part_of = {name: match[0] if (match := _LAYER.match(name)) else name for name in grads}
    parts: dict[str, list[np.ndarray]] = {}
    for name, grad in grads.items():
        parts.setdefault(part_of[name], []).append(grad.ravel())
    sizes = {part: root_mean_square(np.concatenate(x)) for part, x in parts.items()}
    return {name: sizes[part] for name, part in part_of.items()}


def _depth(comparison: Comparison, point: str) -> int:
    """Return how many attentions and feed-forwards precede a value; the embedding counts as one."""
    if point == "embed":
        return 1
    layer = layer_number(point)
    if layer is None:
        return 2 * comparison.config.model.n_layers + 2
    return 2 * layer + (2 if "attention" in point else 3)


def _row(
    stage: str, names: tuple[str, str], first: np.ndarray, other: np.ndarray, allowed: float,
    *, least: float = 0.0,
) -> Row:  # fmt: skip
    """Compare a value.

    Args:
        stage: stage of the step.
        names: names in both models.
        first: value in jaxforge.
        other: value in the torch module; another shape is a difference.
        allowed: tolerance of the relative error.
        least: lower bound on the root mean square of the first value.
    """
    if first.shape != other.shape:
        shapes = f"shapes: {list(first.shape)} and {list(other.shape)}"
        return Row(stage, *names, math.inf, math.inf, allowed, shapes)
    # float64: the comparison rounds far below the values.
    a, b = (np.asarray(x, np.float64) for x in (first, other))
    size, error = max(root_mean_square(a), least), root_mean_square(b - a)
    squares = float(np.vdot(a, a))
    # Least squares: the factor f that minimizes ‖b - f a‖.
    factor = float(np.vdot(a, b)) / squares if squares > 0 else 1.0
    is_multiple = root_mean_square(b - factor * a) < _MAX_UNEXPLAINED * error
    return Row(
        stage, *names, _ratio(error, size),
        _ratio(float(np.max(np.abs(b - a), initial=0.0)), size), allowed,
        f"PyTorch's is {factor:.6g} times jaxforge's" if is_multiple else "",
    )  # fmt: skip


def _ratio(difference: float, size: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf


def _finite(drift: float) -> float:
    return _DRIFT_FACTOR * drift if math.isfinite(drift) else 0.0


def comparison_notes(comparison: Comparison) -> Iterator[str]:
    """Yield notes on what was not compared."""
    if missing := [
        name for name in comparison.jaxforge.points if name not in comparison.torch.points
    ]:
        yield f"not compared, because no torch module computes it: {summarize_names(missing)}"
    known = {comparison.dialect.find_key(name) for name in comparison.jaxforge.params}
    # A tied head is no parameter here, and its gradient is part of the embedding's.
    known.add(comparison.dialect.find_key(HEAD))
    if unknown := [name for name in comparison.torch.grads if name not in known]:
        names = summarize_names(unknown)
        yield f"not compared, because {comparison.dialect.name} has no such name: {names}"
    if comparison.updates is None:
        yield "updates were not compared: the factory returned no optimizer"


def first_difference(rows: Sequence[Row]) -> Row | None:
    """Return the first row that differs; None if no row differs."""
    return next((row for row in rows if row.differs), None)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return all rows as plain values; numbers that are not finite become text."""
    entries = [
        {
            key: str(x) if isinstance(x, float) and not math.isfinite(x) else x
            for key, x in {**dataclasses.asdict(row), "differs": row.differs}.items()
        }
        for row in rows
    ]
    first = next((entry for entry in entries if entry["differs"]), None)
    return {"same": first is None, "first": first, "rows": entries}


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print the value of each stage that is farthest apart, and the first difference."""
    table = Table("", "values", "farthest apart", "error", "largest", "tolerance", "")
    for stage in dict.fromkeys(row.stage for row in rows):
        of_stage = [row for row in rows if row.stage == stage]
        row = max(of_stage, key=lambda row: row.error)
        figures = (f"{x:.2g}" for x in (row.error, row.largest, row.tolerance))
        n_differ = sum(row.differs for row in of_stage)
        mark, style = (f"{n_differ} differ", "red") if n_differ else ("", None)
        table.add_row(stage, str(len(of_stage)), escape(row.name), *figures, mark, style=style)
    console.print(table)
    console.print(_verdict(rows), markup=False, soft_wrap=True)


def _verdict(rows: Sequence[Row]) -> str:
    first = first_difference(rows)
    if first is None:
        return f"nothing differs: {len(rows)} values, all within their tolerance"
    other = f" ({first.other} of PyTorch)" if first.other != first.name else ""
    text = (
        f"first difference: {first.stage}, {first.name}{other}: {first.error:.3g} apart; "
        f"rounding explains at most {first.tolerance:.2g}"
    )
    return f"{text}\n{first.note}" if first.note else text
