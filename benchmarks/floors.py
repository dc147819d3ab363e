"""Minimum ratios to other programs, per kind of machine: `floors.toml`.

A benchmark below a floor exits with code 1 and publishes nothing, so that a ratio only decreases in
a commit that lowers its floor and gives the reason. Only comparisons with another program that does
the same work have floors (`is_claim`): a limit on jaxforge alone is in the benchmark that measures
it. Ratios of different machines are not comparable: each floor names words that describe its
machine in a result (`machine`).
"""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

FLOORS = Path(__file__).with_name("floors.toml")
PROGRAMS = ("torch", "transformers", "lm_eval", "plain JAX", "MaxText", "differentiated pipeline",
            "datasets.map", "preprocess_data", "datatrove")  # fmt: skip
"""Beginnings of the names of peers that are other programs, not a part or setting of jaxforge."""


def read_floors(path: Path = FLOORS) -> dict[str, dict[str, dict[str, float]]]:
    """Return {result: {words of a machine: {row: ratio}}}."""
    return tomllib.loads(path.read_text())


def row_key(row: Mapping[str, Any]) -> str:
    """Return the name of a row in `floors.toml`."""
    return f"{row['case']} | {row['unit']} | {row['peer']}"


def is_claim(row: Mapping[str, Any]) -> bool:
    """Return whether a row compares jaxforge with another program."""
    return "ratio" in row and row["peer"].startswith(PROGRAMS)


def floors_for(
    floors: Mapping[str, Mapping[str, Mapping[str, float]]], result: str, machine: str
) -> Mapping[str, float]:
    """Return the floors of a machine: the section with most words among those that match.

    Args:
        floors: the result of `read_floors`.
        result: the stem of a file in `results/`, for example "step-cpu".
        machine: the result's `machine`, for example "x86_64 GenuineIntel avx2 avx512f, 2 cores".
    """
    has = set(machine.replace(",", " ").split())
    matching = [words for words in floors.get(result, {}) if has >= set(words.split())]
    if not matching:
        return {}
    return floors[result][max(matching, key=lambda words: len(words.split()))]


def below_floor(
    floors: Mapping[str, float], rows: Sequence[Mapping[str, Any]], *, complete: bool = True
) -> list[str]:
    """Return a message for each row below its floor, and for each floor without a row.

    Args:
        floors: floors of this machine, from `floors_for`.
        rows: rows of a result, each with `ratio`.
        complete: False if the rows are a part of the result, so that floors may have no row.
    """
    ratios = {row_key(row): row["ratio"] for row in rows}
    fallen = [
        f"{key}: ratio {ratios[key]:.3g} is below its floor of {floor:.3g}"
        for key, floor in floors.items()
        if key in ratios and ratios[key] < floor
    ]
    missing = [f"{key}: not measured" for key in floors if key not in ratios]
    return fallen + missing * complete
