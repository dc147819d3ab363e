"""The load of experts over a run, in memory that does not grow with its length."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxforge.telemetry.expert_load import LOAD

_VALUES = 600_000  # of a run, all layers and experts: what its pictures may take of the page
_FEWEST, _MOST = 32, 300  # columns; a picture is some hundred pixels wide


class Loads(NamedTuple):
    """The load of experts in columns: each the mean of some consecutive logged steps.

    Attributes:
        layers: [L], those that have experts.
        step: [n], increasing: the mean of a column's steps.
        value: [n, L, E], an expert's assignments relative to an even load; NaN where not finite.
        each: logged steps in a column; the last one may have fewer.
        most: bound of n.
        last_step: the last one logged.
        last: [L, E], of that step alone.
    """

    layers: list[int]
    step: np.ndarray
    value: np.ndarray
    each: int
    most: int
    last_step: int
    last: np.ndarray


class LoadReader:
    """Takes the lists of one logged step after the other.

    Where there would be more columns than `Loads.most`, two become one, and later ones take as
    many steps. So which steps a column has depends on nothing but the run.
    """

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._most, self._each = 0, 1
        self._sums: list[np.ndarray] = []  # of each column, [1 + L E]: of steps, then of loads
        self._counts: list[int] = []  # of each column, logged steps
        self._last = np.empty(0)

    def take(self, line: Mapping[str, Any]) -> None:
        """Adds the loads of a line of metrics.jsonl, if it has any."""
        lists = {int(name.removeprefix(LOAD)): line[name] for name in line if name.startswith(LOAD)}
        if not lists:
            return
        if not self._layers:
            self._layers = list(lists)
            self._most = _columns(sum(map(len, lists.values())))
        loads = _finite_or_nan([lists[layer] for layer in self._layers])
        self._last = np.concatenate([[line["step"]], loads.ravel()])
        self._add(self._last)

    def _add(self, row: np.ndarray) -> None:
        if not self._counts or self._counts[-1] == self._each:
            if len(self._counts) == self._most:
                self._halve()
            self._sums.append(np.zeros_like(row))
            self._counts.append(0)
        self._sums[-1] += row
        self._counts[-1] += 1

    def _halve(self) -> None:
        """All columns are full here, and their number is even."""
        pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
        self._sums = [first + second for first, second in pairs]
        self._each *= 2
        self._counts = [self._each] * len(self._sums)

    def loads(self) -> Loads | None:
        """All that was taken; None where no line had a load."""
        if not self._layers:
            return None
        columns = np.stack(self._sums) / np.array(self._counts)[:, None]
        shape = (len(self._layers), -1)
        return Loads(
            layers=self._layers,
            step=columns[:, 0],
            value=columns[:, 1:].reshape(len(columns), *shape),
            each=self._each,
            most=self._most,
            last_step=int(self._last[0]),
            last=self._last[1:].reshape(shape),
        )


def _columns(values: int) -> int:
    """Most columns of so many values: an even number."""
    return min(max(_VALUES // values, _FEWEST), _MOST) // 2 * 2


def _finite_or_nan(rows: Sequence[Sequence[float | None]]) -> np.ndarray:
    return np.array(rows, float)  # None becomes NaN
