"""Units of work of `prepare`: consecutive inputs, or slices of a large input.

    inputs in order   a.txt  b.txt  c.txt │ web.jsonl: bytes 0 to 250 M │ 250 to 500 M │ d.parquet
    unit              000000              │ 000001                      │ 000002       │ 000003

Units follow from names, sizes and options of the inputs alone, so they are the same for any engine
and number of workers. Each unit writes shards of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from jaxforge.data.corpus.records import Input
from jaxforge.errors import UserError

UNIT_BYTES = 256 << 20
"""Default of `--unit-bytes`."""

_MAX_INPUTS = 10_000  # of a unit: opening a file in a bucket takes a tenth of a second
_MAX_UNITS = 1_000_000  # which the names of shards count


@dataclass(frozen=True)
class Unit:
    """Inputs that are prepared together.

    Attributes:
        number: position among the units, from 0.
        inputs: the inputs, in order.
    """

    number: int
    inputs: tuple[Input, ...]

    @property
    def weight(self) -> int:
        """Bytes to read."""
        return sum(source.weight for source in self.inputs)

    @property
    def files(self) -> int:
        """Number of inputs that begin in this unit."""
        return sum(source.begins for source in self.inputs)

    @property
    def where(self) -> str:
        """Name of the unit in messages: its first input, and the number of others."""
        others = len(self.inputs) - 1
        return self.inputs[0].where + (f" and {others} more inputs" if others else "")


def sliced(inputs: Iterable[Input], unit_bytes: int) -> list[Input]:
    """Return the inputs in order, with slices instead of those larger than a unit."""
    return [part for source in inputs for part in source.slices(unit_bytes)]


def plan_units(inputs: Sequence[Input], unit_bytes: int) -> list[Unit]:
    """Group consecutive inputs into units.

    Args:
        inputs: the inputs, `sliced`.
        unit_bytes: bytes of a unit. A larger input that cannot be sliced is a unit of its own.

    Raises:
        UserError: there are too many units.
    """
    units = [Unit(i, group) for i, group in enumerate(_groups(inputs, unit_bytes))]
    if len(units) > _MAX_UNITS:
        raise UserError(
            f"--unit-bytes {unit_bytes:,} divides the inputs into {len(units):,} units, and names "
            f"of shards count {_MAX_UNITS:,}: give larger units"
        )
    return units


def _groups(inputs: Iterable[Input], unit_bytes: int) -> Iterator[tuple[Input, ...]]:
    group: list[Input] = []
    size = 0
    for source in inputs:
        if group and (size + source.weight > unit_bytes or len(group) == _MAX_INPUTS):
            yield tuple(group)
            group, size = [], 0
        group.append(source)
        size += source.weight
    if group:
        yield tuple(group)
