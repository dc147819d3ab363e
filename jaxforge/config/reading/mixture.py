"""Reading of `data.mixture_file`: datasets and phases of a mixture in a file of their own.

The file is expanded into `data.datasets` and `data.phases`. All other code knows only these keys.
"""

import os
from collections.abc import Iterator, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError

from jaxforge.cli.suggestions import choices, hint
from jaxforge.config.data import DatasetSource
from jaxforge.config.duration import TokenCount, parse_duration
from jaxforge.config.reading import toml
from jaxforge.config.reading.other_formats import parse_yaml
from jaxforge.config.reading.schema import dotted
from jaxforge.config.reading.toml import read_text
from jaxforge.config.section import Flag, Section, Weights, WeightTable
from jaxforge.errors import UserError
from jaxforge.storage import urls

_KEY = "mixture_file"
_YAML = (".yaml", ".yml")
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

    def _problems(self) -> Iterator[str]:
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

    def _problems(self) -> Iterator[str]:
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


def tables(file: str, temperature: object) -> dict[str, Any]:
    """Return `datasets` and `phases` of `[data]` from a mixture file.

    Raises:
        UserError: the file cannot be read, or is invalid.
    """
    local = urls.local(os.path.expanduser(file), f"data.{_KEY}", "copy the file to this machine")
    mixture = read(local)
    if temperature != 1 and any(phase.tokens for phase in mixture.phases):
        raise UserError(
            f'data.{_KEY} = "{file}" has phases with tokens, which data.mix_temperature = '
            f"{temperature} would change: set data.mix_temperature to 1, or give weights"
        )
    return mixture.tables()


def read(path: Path) -> MixtureFile:
    """Read a mixture file, TOML or YAML.

    Raises:
        UserError: the file cannot be read, or is invalid.
    """
    text = read_text(path, f"data.{_KEY}")
    is_yaml = path.suffix.lower() in _YAML
    values = parse_yaml(text, path) if is_yaml else toml.parse(text, str(path))
    try:
        return MixtureFile.model_validate(values)
    except ValidationError as error:
        raise UserError("\n".join(f"{path}: {each}" for each in _messages(error))) from None


def _messages(error: ValidationError) -> list[str]:
    """Return a message for each problem."""
    messages = []
    for details in error.errors():
        path, kind = details["loc"], details["type"]
        prefix = f"{dotted(path)}: " if path else ""
        if kind == "value_error":
            rules = str(details["ctx"]["error"]).splitlines()
            messages += [f"{prefix}{rule}" for rule in rules]
        elif kind == "extra_forbidden":
            meant = hint(str(path[-1]), _keys(path))
            messages.append(f"unknown key {dotted(path)}{meant}")
        else:
            message = details["msg"]
            messages.append(f"{prefix}{message[:1].lower()}{message[1:]}")
    return list(dict.fromkeys(messages))


def _keys(path: tuple[int | str, ...]) -> list[str]:
    """Return the keys of the table of a path."""
    table = {1: MixtureFile, 3: DatasetSource if path[0] == "datasets" else MixturePhase}
    return list(table.get(len(path), MixtureFile).model_fields)
