"""Lengths of training in other units than updates: "10%", "2ep", "1B tok", "5M samples".

In a `JobConfig` every length is a plain integer. `config.reading.unresolved` holds lengths in other
units until the batch size and the length of the data are known.
"""

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from jaxforge.config.section import Interval

_FORM = re.compile(
    r"(?P<number>\d[\d_]*\.?\d*|\.\d+)\s*"
    r"(?:(?P<unit>%|ep)|(?P<size>[KMBT]?)\s*(?P<item>tok|samples))"
)
_LONG = 100  # characters; no duration is as long, and the time of the pattern grows as its square
_SIZES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}

_IN_ANY_UNIT = {"duration": True}
Steps = Annotated[int, Field(ge=0, json_schema_extra=_IN_ANY_UNIT)]
"""Type of a key that counts updates and accepts a duration; the JSON schema marks it as such."""
PositiveSteps = Annotated[int, Field(gt=0, json_schema_extra=_IN_ANY_UNIT)]
"""`Steps` of at least 1."""
Every = Annotated[int, Field(ge=0), Interval()]
"""Type of a key with the updates between two events; 0: never."""


def token_count(value: object) -> object:
    """Return the number of tokens of "2B tok" or "300M"; any other value unchanged."""
    if not isinstance(value, str):
        return value
    duration = parse_duration(value) or parse_duration(f"{value} tok")
    is_count = duration and duration.unit == "tokens" and duration.amount.denominator == 1
    return int(duration.amount) if duration and is_count else value


TokenCount = Annotated[int, BeforeValidator(token_count), Field(gt=0)]
"""Type of a key that counts tokens, given as a number or as text such as "2B tok"."""


@dataclass(frozen=True)
class Duration:
    """A length that is not yet resolved to updates; it supports no arithmetic or comparison."""

    amount: Fraction
    """Exact number of units."""
    unit: Literal["run", "epochs", "tokens", "samples"]
    """Unit of `amount`; 1 run is all updates of the run."""
    text: str
    """Text as written by the user."""

    def sequences(self, seq_len: int, per_epoch: int) -> int:
        """Return the number of sequences, rounded up.

        Args:
            seq_len: tokens per sequence, padding included.
            per_epoch: sequences per epoch; ignored for a length in tokens.
        """
        assert self.unit != "run"
        epoch, token = Fraction(per_epoch), Fraction(1, seq_len)
        per_unit = {"epochs": epoch, "tokens": token, "samples": Fraction(1)}
        return math.ceil(self.amount * per_unit[self.unit])

    def share(self, max_steps: int) -> int:
        """Return the updates of a share of the run, rounded down so that parts fit into the run.

        The result is at least 1 unless the share is 0, so that the config suits runs of any length.
        """
        assert self.unit == "run"
        return max(math.floor(self.amount * max_steps), 1 if self.amount else 0)


def parse_duration(text: str) -> Duration | None:
    """Parse "10%", "0.5 ep", "300M tok" or "5M samples"; return None for numbers and other text.

    Args:
        text: A number and its unit; K, M, B or T (10^3 ... 10^12) may precede "tok" or "samples".
    """
    match = _FORM.fullmatch(text.strip()) if len(text) < _LONG else None
    if match is None:
        return None
    # Exact: a share of 10^12 tokens must not depend on binary rounding.
    number = Fraction(match["number"].replace("_", ""))
    if match["unit"] == "%":
        return Duration(number / 100, "run", text)
    if match["unit"] == "ep":
        return Duration(number, "epochs", text)
    unit: Literal["tokens", "samples"] = "tokens" if match["item"] == "tok" else "samples"
    return Duration(number * _SIZES[match["size"]], unit, text)
