"""Comparison of two computations: the first value that differs, and by how much.

Two programs that are right still round differently. How far that may take them apart:

    float32   a sum of n products in another order errs by about √n · 2^-24 of its size (a random
              walk of n roundings; Higham and Mary, 2019), and the parts that a value has been
              through add up in the same way: 2 · 2^-24 · √(width · parts), and 1e-5 at least, for
              what exponentials and quotients make of it
    bfloat16  products are added up in float32, and results rounded, by 2^-9 of themselves as a root
              mean square. A part rounds about ten times, in either program: √20 · 2^-9 is 2^-7; and
              where two values of one input are multiplied (gate by up, queries by keys), what was
              wrong with it counts twice: 2^-6 · √parts

Models may be worse than that, as with scores of attention in the hundreds: then the caller says so.
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

SMALL = 0.1
"""Of the gradients beside it (`gradient_scales`): a smaller one is compared with that."""

_LEAST = 1e-5
_ROUNDING = 2**-24  # of float32
_HEAD = "output_head."
_LAYER = re.compile(r"layers\.(\d+)\.([^.]+)")
_OF_PARAMETERS = (
    "weights",
    "gradients",
    "updates",
    "second updates",
)  # a row for each parameter: too many to show
_SHOWN = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One value of both.

    Attributes:
        stage: "weights", "forward", "loss", "gradients", "updates" or "second updates".
        name: the value, as the first calls it.
        other: as the other does.
        error: ‖other - first‖ / ‖first‖, inf where either is not finite.
        largest: max |other - first| over the root mean square of the first.
        tolerance: of `error`.
        hint: what makes such a difference.
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
        """True if the difference exceeds rounding."""
        return not self.error <= self.tolerance


def tolerance(dtype: str, width: int, parts: int) -> float:
    """Return the largest relative difference between two correct programs.

    Args:
        dtype: "float32" or "bfloat16".
        width: products in a sum.
        parts: attentions and feed-forwards that the value has been through.
    """
    if dtype == "bfloat16":
        return 2**-6 * math.sqrt(parts)
    return max(_LEAST, 2 * _ROUNDING * math.sqrt(width * parts))


def update_tolerance(update: np.ndarray, param: np.ndarray) -> float:
    """Return the tolerance of an update by equal gradients: a difference of rounded parameters."""
    size = root_mean_square(update)
    return _LEAST + (2 * _ROUNDING * root_mean_square(param) / size if size else 0.0)


def in_backward_order(names: Iterable[str], layers: int) -> list[str]:
    """Names of parameters in the order of the backward pass."""

    def order(name: str) -> tuple[int, bool]:
        if match := _LAYER.match(name):
            return 2 + layers - int(match[1]), match[2].startswith("attention")
        return 0 if name.startswith(_HEAD) else 1 if name.startswith("norm.") else 3 + layers, False

    return sorted(names, key=order)


def gradient_scales(grads: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Return for each parameter the RMS of the gradients in its part of the model.

    What is zero but for rounding, as gradients of some biases are, is to be compared with these.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for name, grad in grads.items():
        parts.setdefault(_part(name), []).append(grad.ravel())
    sizes = {part: root_mean_square(np.concatenate(of_part)) for part, of_part in parts.items()}
    return {name: sizes[_part(name)] for name in grads}


def row(
    stage: str, names: tuple[str, str], first: np.ndarray, other: np.ndarray, allowed: float,
    *, least: float = 0.0,
) -> Row:  # fmt: skip
    """One value compared.

    Args:
        stage: where.
        names: what each calls it.
        first: the value.
        other: the other's; of another shape it differs.
        allowed: tolerance.
        least: root mean square below which the first counts as that large.
    """
    if first.shape != other.shape:
        shapes = f"{list(first.shape)} and {list(other.shape)}"
        return Row(stage, *names, math.inf, math.inf, allowed, f"shapes: {shapes}")
    a, b = (np.asarray(x, np.float64) for x in (first, other))
    size = max(root_mean_square(a), least)
    apart = b - a
    return Row(
        stage, *names, _ratio(root_mean_square(apart), size),
        _ratio(float(np.max(np.abs(apart), initial=0.0)), size), allowed,
    )  # fmt: skip


def root_mean_square(x: np.ndarray) -> float:
    """√(Σ x² / n)."""
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64)))) if x.size else 0.0


def first_difference(rows: Sequence[Row]) -> Row | None:
    """The first that differs; None where none does."""
    return next((row for row in rows if row.differs), None)


def as_json(rows: Sequence[Row]) -> dict[str, Any]:
    """All of it, for a file; what is infinite is a text."""
    first = first_difference(rows)
    return {
        "same": first is None,
        "first": None if first is None else _entry(first),
        "rows": [_entry(row) for row in rows],
    }


def show(console: Console, rows: Sequence[Row], names: tuple[str, str]) -> None:
    """A table of what was compared, and the first difference.

    Args:
        console: where.
        rows: in the order in which they were made.
        names: what the two are called.
    """
    shown = [row for stage in dict.fromkeys(r.stage for r in rows) for row in _of(rows, stage)]
    table = Table("", *names, "error", "largest", "tolerance", "")
    for row in shown:
        figures = (f"{x:.2g}" for x in (row.error, row.largest, row.tolerance))
        style = "red" if row.differs else None
        mark = "differs" if row.differs else ""
        table.add_row(row.stage, *map(escape, (row.name, row.other)), *figures, mark, style=style)
    console.print(table)
    for stage in _OF_PARAMETERS:
        of_stage = [row for row in rows if row.stage == stage]
        if more := len(of_stage) - sum(row.stage == stage for row in shown):
            console.print(f"{stage}: {more} more, none further apart than these", markup=False)
    console.print(verdict(rows, names), markup=False, soft_wrap=True)


def verdict(rows: Sequence[Row], names: tuple[str, str]) -> str:
    """The first difference in words."""
    first = first_difference(rows)
    if first is None:
        return f"nothing differs: {len(rows)} values, all within their tolerance"
    other = f" ({first.other} of {names[1]})" if first.other != first.name else ""
    text = (
        f"first difference: {first.stage}, {first.name}{other}: {first.error:.3g} apart, where "
        f"rounding makes {first.tolerance:.2g} at most"
    )
    return f"{text}\n{first.hint}" if first.hint else text


def _part(name: str) -> str:
    match = _LAYER.match(name)
    return match[0] if match else name


def _of(rows: Sequence[Row], stage: str) -> list[Row]:
    """Return the rows to show of a stage: all, or the first difference and the largest ones."""
    of_stage = [row for row in rows if row.stage == stage]
    if stage not in _OF_PARAMETERS or len(of_stage) <= _SHOWN:
        return of_stage
    worst = sorted(of_stage, key=lambda row: -row.error)[:_SHOWN]
    first = first_difference(of_stage)
    return [row for row in of_stage if row in worst or row is first]


def _entry(item: Row) -> dict[str, Any]:
    entry = dataclasses.asdict(item) | {"differs": item.differs}
    return {
        key: str(x) if isinstance(x, float) and not math.isfinite(x) else x
        for key, x in entry.items()
    }


def _ratio(apart: float, size: float) -> float:
    if not (math.isfinite(apart) and math.isfinite(size)):
        return math.inf
    if apart == 0:
        return 0.0
    return apart / size if size else math.inf
