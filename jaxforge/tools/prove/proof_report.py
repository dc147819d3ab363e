"""Execution and output of `jaxforge prove`."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from jaxforge.cli.running import wide_console
from jaxforge.config.reading.load import load_unresolved
from jaxforge.tools.prove.proof import Comparison, Reference, compare, plant
from jaxforge.tools.prove.smaller import describe, meshes, smaller, unproven

_MOST_SHOWN = 20


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Prove a config, print the result, and return the exit code.

    Args:
        args: parsed command line.
        overrides: settings over the config.

    Raises:
        UserError: the config cannot be read, or not be made smaller.
    """
    config = load_unresolved(args.config, overrides).known
    small = smaller(config)
    of_meshes = meshes(config, small)
    notes = [f"not proven: {each}" for each in unproven(config)]
    if changed := describe(config, small):
        notes.insert(0, f"made smaller: {changed}")
    console = wide_console(sys.stderr if args.json else sys.stdout)
    for note in notes:
        console.print(note, markup=False, soft_wrap=True)
    reference = Reference(small)
    proofs = [*_shown(console, (c for mesh in of_meshes for c in compare(reference, mesh)))]
    faulty = (c for mesh in of_meshes for c in plant(reference, mesh)) if args.mutate else ()
    faults = []
    for comparison in faulty:
        faults.append(comparison)
        first = comparison.first_difference
        verdict = f"found in {first.name}, {first.where}" if first else "NOT FOUND"
        console.print(f"{comparison.about}: {verdict}", markup=False, soft_wrap=True)
    if args.json:
        document = {"notes": notes, "comparisons": proofs, "faults": faults}
        print(json.dumps(document, default=dataclasses.asdict, indent=2))
    return _verdict(console, proofs, faults)


def _shown(console: Console, comparisons: Iterator[Comparison]) -> Iterator[Comparison]:
    """Print each comparison as soon as it is made, and yield it."""
    for comparison in comparisons:
        table = Table(title=comparison.about, title_justify="left")
        for name in ("quantity", "largest difference", "rounding explains", "where"):
            table.add_column(name, justify="left" if name in ("quantity", "where") else "right")
        for each in comparison.quantities:
            style = None if each.is_equal else "bold red"
            row = (each.name, f"{each.difference:.1e}", f"{each.allowed:.1e}", each.where)
            table.add_row(*row, style=style)
        console.print(table)
        for each in comparison.different[:_MOST_SHOWN]:
            line = f"{each.name} {each.where}: {each.difference:.1e}, not {each.allowed:.1e}"
            console.print(line, style="red", markup=False, soft_wrap=True)
        if (more := len(comparison.different) - _MOST_SHOWN) > 0:
            console.print(f"... and {more} more arrays")
        yield comparison


def _verdict(console: Console, proofs: Sequence[Comparison], faults: Sequence[Comparison]) -> int:
    """Print the verdict and return the exit code."""
    for comparison in proofs:
        if first := comparison.first_difference:
            console.print(
                f"DIFFERENT on {comparison.about}: the first quantity that differs is {first.name} "
                f"({first.where}), by {first.difference:.1e} where rounding explains "
                f"{first.allowed:.1e}", markup=False, soft_wrap=True,
            )  # fmt: skip
            return 1
    missed = [comparison.about for comparison in faults if not comparison.first_difference]
    for about in missed:
        console.print(f"NOT FOUND: {about}", markup=False, soft_wrap=True)
    if missed:
        return 1
    planted = f"; {len(faults)} of {len(faults)} planted faults were found" if faults else ""
    console.print(f"the same in {len(proofs)} comparisons{planted}", markup=False, soft_wrap=True)
    return 0
