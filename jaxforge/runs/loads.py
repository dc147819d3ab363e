"""The load of experts over a run, in memory that does not grow with its length."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxforge.storage.untrusted_json import is_number
from jaxforge.telemetry.expert_load import LOAD

_NAME = re.compile(rf"{re.escape(LOAD)}[0-9]{{1,6}}$")
_EXPERTS = 1 << 16  # of a layer
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
        self._shape: tuple[int, ...] = ()  # layers, experts
        self._most, self._each = 0, 1
        self._sums: list[np.ndarray] = []  # of each column, [1 + L E]: of steps, then of loads
        self._counts: list[int] = []  # of each column, logged steps
        self._last = np.empty(0)

    def take(self, line: Mapping[str, Any]) -> str:
        """Add the loads of a line of metrics.jsonl, if it has any.

        Returns:
            Why the loads are left out; empty where they are not.
        """
        lists = {int(name.removeprefix(LOAD)): line[name] for name in line if _NAME.match(name)}
        if not lists:
            return ""
        if not all(map(_is_load, lists.values())) or len(set(map(len, lists.values()))) > 1:
            return "the load of experts is not as many numbers for each layer"
        loads = np.array([*lists.values()], float)  # None becomes NaN
        if not self._layers:
            self._layers, self._shape = list(lists), loads.shape
            self._most = min(max(_VALUES // loads.size, _FEWEST), _MOST) // 2 * 2
        if self._layers != list(lists) or self._shape != loads.shape:
            return "the load of experts has other layers or experts than before"
        self._last = np.concatenate([[line["step"]], loads.ravel()])
        self._add(self._last)
        return ""

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
        return Loads(
            layers=self._layers,
            step=columns[:, 0],
            value=columns[:, 1:].reshape(len(columns), *self._shape),
            each=self._each,
            most=self._most,
            last_step=int(self._last[0]),
            last=self._last[1:].reshape(self._shape),
        )


def _is_load(values: Sequence[Any]) -> bool:
    """Tell whether a list has a number for each of some experts, null where not finite."""
    known = (value is None or isinstance(value, float) or is_number(value) for value in values)
    return 0 < len(values) <= _EXPERTS and all(known)
