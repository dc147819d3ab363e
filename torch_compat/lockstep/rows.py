"""Rows of the comparison of two computations: the first value that differs, and by how much.

Some models exceed the bounds of `lockstep.rounding`, for example with attention scores in the
hundreds. Callers then add a hint to the row.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from torch_compat.lockstep.rounding import LEAST, ROUNDING

SMALL = 0.1
"""Fraction of `gradient_scales`: smaller gradients are compared relative to this size."""

_HEAD = "output_head."
_LAYER = re.compile(r"layers\.(\d+)\.([^.]+)")
_PARAMETER_STAGES = ("weights", "gradients", "updates", "second updates")
"""Stages with a row for each parameter, of which only some are printed."""
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """Comparison of a value in both computations.

    Attributes:
        stage: "weights", "forward", "loss", "gradients", "updates" or "second updates".
        name: name in the first computation.
        other: name in the other computation.
        error: ‖other - first‖ / ‖first‖; inf if either is not finite.
        largest: max |other - first| over the root mean square of the first.
        tolerance: largest `error` that rounding explains.
        hint: likely cause of a difference.
    """

    stage: str
    name: str
    other: str
    error: float
    largest: float
    tolerance: float
    hint: str = ""

    @property
    def differs(self) -> bool:
        """True if rounding does not explain the difference."""
        return not self.error <= self.tolerance


def update_tolerance(update: np.ndarray, param: np.ndarray) -> float:
    """Return the tolerance of an update by equal gradients, a difference of rounded parameters."""
    size = root_mean_square(update)
    return LEAST + (2 * ROUNDING * root_mean_square(param) / size if size else 0.0)


def in_backward_order(names: Iterable[str], layers: int) -> list[str]:
    """Sort names of parameters in the order of the backward pass."""

    def order(name: str) -> tuple[int, bool]:
        if match := _LAYER.match(name):
            return 2 + layers - int(match[1]), match[2].startswith("attention")
        return 0 if name.startswith(_HEAD) else 1 if name.startswith("norm.") else 3 + layers, False

    return sorted(names, key=order)


def gradient_scales(grads: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return for each parameter the RMS of the gradients in its part of the model.

    Gradients that are zero except for rounding, such as those of some biases, must be compared
    relative to this scale.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for name, grad in grads.items():
        parts.setdefault(_part(name), []).append(grad.ravel())
    sizes = {part: root_mean_square(np.concatenate(x)) for part, x in parts.items()}
    return {name: sizes[_part(name)] for name in grads}


def row(
    stage: str, names: tuple[str, str], first: np.ndarray, other: np.ndarray, allowed: float,
    *, least: float = 0.0,
) -> Row:  # fmt: skip
    """Compare a value.

    Args:
        stage: stage of the step.
        names: names in both computations.
        first: value in the first computation.
        other: value in the other computation; another shape is a difference.
        allowed: tolerance of the relative error.
        least: lower bound on the root mean square of the first value.
    """
    if first.shape != other.shape:
        shapes = f"{list(first.shape)} and {list(other.shape)}"
        return Row(stage, *names, math.inf, math.inf, allowed, f"shapes: {shapes}")
    a, b = (np.asarray(x, np.float64) for x in (first, other))
    size = max(root_mean_square(a), least)
    difference = b - a
    return Row(
        stage, *names, _ratio(root_mean_square(difference), size),
        _ratio(float(np.max(np.abs(difference), initial=0.0)), size), allowed,
    )  # fmt: skip


def root_mean_square(x: np.ndarray) -> float:
    """Return √(Σ x² / n); 0 for an empty array."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def first_difference(rows: Sequence[Row]) -> Row | None:
    """Return the first row that differs; None if no row differs."""
    return next((row for row in rows if row.differs), None)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """Return all rows as plain values; numbers that are not finite become text."""
    first = first_difference(rows)
    return {
        "same": first is None,
        "first": None if first is None else _entry(first),
        "rows": [_entry(row) for row in rows],
    }


def print_rows(console: Console, rows: Sequence[Row], names: tuple[str, str]) -> None:
    """Print a table of the rows, and the first difference.

    Args:
        console: console to print to.
        rows: rows in the order of the computation.
        names: names of the two computations.
    """
    stages = dict.fromkeys(row.stage for row in rows)
    shown = [row for stage in stages for row in _shown_rows(rows, stage)]
    table = Table("", *names, "error", "largest", "tolerance", "")
    for row in shown:
        figures = (f"{x:.2g}" for x in (row.error, row.largest, row.tolerance))
        style = "red" if row.differs else None
        mark = "differs" if row.differs else ""
        table.add_row(row.stage, *map(escape, (row.name, row.other)), *figures, mark, style=style)
    console.print(table)
    for stage in _PARAMETER_STAGES:
        count = sum(row.stage == stage for row in rows)
        if more := count - sum(row.stage == stage for row in shown):
            console.print(f"{stage}: {more} more with smaller differences", markup=False)
    console.print(verdict(rows, names), markup=False, soft_wrap=True)


def verdict(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """Describe the first difference."""
    first = first_difference(rows)
    if first is None:
        return f"nothing differs: {len(rows)} values, all within their tolerance"
    other = f" ({first.other} of {names[1]})" if first.other != first.name else ""
    text = (
        f"first difference: {first.stage}, {first.name}{other}: {first.error:.3g} apart; "
        f"rounding explains at most {first.tolerance:.2g}"
    )
    return f"{text}\n{first.hint}" if first.hint else text


def _part(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name


def _shown_rows(rows: Sequence[Row], stage: str) -> list[Row]:
    """Return the rows of a stage to print: all, or the first and the largest differences."""
    stage_rows = [row for row in rows if row.stage == stage]
    if stage not in _PARAMETER_STAGES or len(stage_rows) <= _SHOWN:
        return stage_rows
    worst = sorted(stage_rows, key=lambda row: -row.error)[:_SHOWN]
    first = first_difference(stage_rows)
    return [row for row in stage_rows if row in worst or row is first]


def _entry(item: Row) -> dict[str, Any]:
    entry = dataclasses.asdict(item) | {"differs": item.differs}
    return {
        key: str(x) if isinstance(x, float) and not math.isfinite(x) else x
        for key, x in entry.items()
    }


def _ratio(difference: float, size: float) -> float:
    if not (math.isfinite(difference) and math.isfinite(size)):
        return math.inf
    if difference == 0:
        return 0.0
    return difference / size if size else math.inf
