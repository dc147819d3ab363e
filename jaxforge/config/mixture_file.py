"""Schema of `data.mixture_file`: datasets and phases of a mixture in a file of their own.

`MixtureFile.tables` expands the file into `data.datasets` and `data.phases` when a config is read.
All other code knows only these keys.
"""

from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt

from jaxforge.cli.suggestions import choices
from jaxforge.config.data import DatasetSource
from jaxforge.config.duration import TokenCount, parse_duration
from jaxforge.config.facts import Flag
from jaxforge.config.section import Section, Weights, WeightTable

_UPDATES = "updates"
_SUFFIXES = {"tokens": " tok", "samples": " samples", "run": "%"}


class MixturePhase(Section):
    """`[[phases]]`: a span of the run with its own mixture."""

    length: PositiveInt | str | None = None
    """Updates, or a duration such as "2B tok"; the last phase lasts until the end of the run."""
    weights: WeightTable = Field(default_factory=Weights)
    """Sampling weights by dataset; other datasets have their weight in datasets."""
    tokens: Annotated[Mapping[str, TokenCount], Flag.HOST_INTEGER] = Field(default_factory=dict)
    """Tokens by dataset, instead of length and weights; other datasets are not drawn."""
    lr_scale: PositiveFloat = 1.0
    """Factor on the learning rate during the phase."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the keys of this table."""
        if self.tokens and (self.length is not None or self.weights):
            yield "tokens give length and weights: remove tokens, or length and weights"
        duration = parse_duration(self.length) if isinstance(self.length, str) else None
        if isinstance(self.length, str) and (duration is None or duration.unit == "epochs"):
            yield (
                f'length = "{self.length}": expected updates, or a duration like "2B tok", '
                '"5M samples" or "10%"; max_epochs of a dataset counts its epochs'
            )

    def amount(self) -> tuple[str, Fraction] | None:
        """Return unit and amount of the length; None without a length."""
        if self.tokens:
            return "tokens", Fraction(sum(self.tokens.values()))
        if isinstance(self.length, int):
            return _UPDATES, Fraction(self.length)
        duration = parse_duration(self.length or "")
        return (duration.unit, duration.amount) if duration else None


class MixtureFile(Section):
    """Content of a mixture file."""

    datasets: Mapping[str, DatasetSource]
    """Sources by name, with the keys of data.datasets."""
    phases: tuple[MixturePhase, ...] = ()
    """Phases in order; without phases, the weights of datasets hold during the whole run."""

    def problems(self) -> Iterator[str]:
        """Yield the broken rules between the tables of this file."""
        if not self.datasets:
            yield "datasets has no dataset: add a table such as [datasets.web] with a path"
        for name, source in self.datasets.items():
            if source.name:
                yield f"datasets.{name}.name: the name of the table is the name; remove this key"
        for i, phase in enumerate(self.phases):
            for name in (*phase.weights, *phase.tokens):
                if name not in self.datasets:
                    near = choices(name, list(self.datasets))
                    yield f'phases[{i}] names "{name}", which is not in datasets{near}'
            if not phase.amount() and phase is not self.phases[-1]:
                yield f"phases[{i}] requires length or tokens, because another phase follows"
        units = {amount[0] for phase in self.phases[:-1] if (amount := phase.amount())}
        if len(units) > 1:
            yield f"lengths of phases have different units ({', '.join(sorted(units))}): use one"

    def tables(self) -> dict[str, list[dict[str, Any]]]:
        """Return `datasets` and `phases` of `[data]`."""
        datasets = [
            {"name": name, **source.model_dump(exclude_unset=True)}
            for name, source in self.datasets.items()
        ]
        amounts = [phase.amount() or (_UPDATES, Fraction(0)) for phase in self.phases]
        starts = accumulate((amount for _, amount in amounts[:-1]), initial=Fraction(0))
        unit = amounts[0][0] if amounts else _UPDATES
        phases = [
            {
                "start_step": _written(start, unit),
                "dataset_weights": self._weights(phase),
                "lr_scale": phase.lr_scale,
            }
            for phase, start in zip(self.phases, starts, strict=False)
        ]
        return {"datasets": datasets, "phases": phases}

    def _weights(self, phase: MixturePhase) -> dict[str, float]:
        if phase.tokens:
            return {name: float(phase.tokens.get(name, 0)) for name in self.datasets}
        return dict(phase.weights)


def _written(start: Fraction, unit: str) -> int | str:
    """Return a start as a number of updates, or as a duration."""
    if unit == _UPDATES or not start:
        return int(start)
    shown = start * 100 if unit == "run" else start
    return f"{Decimal(shown.numerator) / Decimal(shown.denominator):f}{_SUFFIXES[unit]}"
