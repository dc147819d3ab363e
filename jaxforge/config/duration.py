"""Lengths of training in other units than updates: "10%" of the run, "2ep", "1B tok".

In a `JobConfig` every length is a plain integer. What the user wrote in another unit is held apart
(`config.reading.unresolved`) until the batch and the length of the data are known.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import Field

_FORM = re.compile(
    r"(?P<number>\d[\d_]*\.?\d*|\.\d+)\s*(?:(?P<unit>%|ep)|(?P<size>[KMBT]?)\s*(?P<tok>tok))"
)
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_IN_ANY_UNIT = {"duration": True}
Steps = Annotated[int, Field(ge=0, json_schema_extra=_IN_ANY_UNIT)]
"""The type of a key that counts updates, and may be written in any unit; in the schema, too."""
PositiveSteps = Annotated[int, Field(gt=0, json_schema_extra=_IN_ANY_UNIT)]
"""`Steps` of at least 1."""


@dataclass(frozen=True)
class Duration:
    """A length that is not in updates yet; it neither counts nor compares."""

    amount: Fraction
    """In `unit`, exactly."""
    unit: Literal["run", "epochs", "tokens"]
    """What is counted; 1 run is all of its updates."""
    text: str
    """As the user wrote it."""

    def sequences(self, seq_len: int, per_epoch: int) -> int:
        """The fewest sequences that make it up.

        Args:
            seq_len: tokens of a sequence, padding included.
            per_epoch: sequences of an epoch; any number will do for a length in tokens.
        """
        assert self.unit != "run"
        unit = Fraction(per_epoch) if self.unit == "epochs" else Fraction(1, seq_len)
        return math.ceil(self.amount * unit)

    def share(self, max_steps: int) -> int:
        """Updates of a share of the run, rounded down, as parts are to fit into the whole.

        One at least, so that a config in shares holds for a run of any length.
        """
        assert self.unit == "run"
        return max(math.floor(self.amount * max_steps), 1 if self.amount else 0)


def parse_duration(text: str) -> Duration | None:
    """Reads "10%", "2ep", "0.5 ep", "300M tok"; None for anything else, plain numbers too.

    Args:
        text: A number and its unit; tokens may have one of K, M, B and T (10^3 ... 10^12) before.
    """
    match = _FORM.fullmatch(text.strip())
    if match is None:
        return None
    number = Fraction(match["number"].replace("_", ""))
    if match["unit"] == "%":
        return Duration(number / 100, "run", text)
    if match["unit"] == "ep":
        return Duration(number, "epochs", text)
    return Duration(number * _SIZES[match["size"]], "tokens", text)
