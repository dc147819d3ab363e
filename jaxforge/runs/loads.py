"""Load of experts over a run, in bounded memory."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxforge.storage.untrusted_json import is_number
from jaxforge.telemetry.expert_load import LOAD

_NAME = re.compile(rf"{re.escape(LOAD)}[0-9]{{1,6}}$")
_EXPERTS = 1 << 16  # limit per layer
_VALUES = 600_000  # limit per run over all layers and experts, for the size of the page
_FEWEST, _MOST = 32, 300  # columns; a figure is a few hundred pixels wide


class Loads(NamedTuple):
    """Load of experts in columns, each the mean of consecutive logged steps.

    Attributes:
        layers: [L], layers with experts.
        step: [n], increasing, mean step of each column.
        value: [n, L, E], assignments of an expert relative to an even load; NaN if not finite.
        each: logged steps per column; the last column may have fewer.
        most: upper bound of n.
        last_step: the last logged step.
        last: [L, E], load at the last logged step.
    """

    layers: list[int]
    step: np.ndarray
    value: np.ndarray
    each: int
    most: int
    last_step: int
    last: np.ndarray


class LoadReader:
    """Accumulator of the expert loads of logged steps.

    When the number of columns would exceed `Loads.most`, pairs of columns are merged, and later
    columns hold as many steps. So the steps of a column depend on the run alone.
    """

    def __init__(self) -> None:
        self._layers: list[int] = []
        self._shape: tuple[int, ...] = ()  # layers, experts
        self._most, self._each = 0, 1
        self._sums: list[np.ndarray] = []  # by column, [1 + L E]: sum of steps, sums of loads
        self._counts: list[int] = []  # by column: number of logged steps
        self._last = np.empty(0)

    def take(self, line: Mapping[str, Any]) -> str:
        """Add the loads of a line of metrics.jsonl, if it has any.

        Returns:
            The reason why the loads are skipped, or "".
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
        """Merge pairs of columns; all columns are full, and their number is even."""
        pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
        self._sums = [first + second for first, second in pairs]
        self._each *= 2
        self._counts = [self._each] * len(self._sums)

    def loads(self) -> Loads | None:
        """Return the accumulated loads; None if no line had any."""
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
    """Return whether a list holds a number or null for each expert."""
    known = (value is None or isinstance(value, float) or is_number(value) for value in values)
    return 0 < len(values) <= _EXPERTS and all(known)
