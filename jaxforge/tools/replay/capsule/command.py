"""What `python -m jaxforge.capsule` does and prints."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jaxforge.cli.running import STDOUT, wide_console, write_json
from jaxforge.parallel import host_memory, multihost
from jaxforge.storage import urls
from jaxforge.telemetry.console import setup_logging
from jaxforge.tools.replay.capsule import archive
from jaxforge.tools.replay.capsule.make import capsule_of
from jaxforge.tools.replay.capsule.verify import Verification
from jaxforge.tools.replay.capsule.verify import verify as made_again

_STEPS = 3  # made again, unless a number is given
_SHOWN = 8  # differences of an ingredient


def make(args: argparse.Namespace) -> int:
    """Writes a run's capsule; the exit code."""
    _begin()
    run = urls.path(args.what[0])
    output = args.output or Path(f"{run.absolute().name}.capsule.zip")
    urls.local(output, "--output", "copy it there afterwards")
    made = capsule_of(run)
    if jax.process_index() == 0:
        archive.write(output, made)
        print(f"{output}: {output.stat().st_size:,} bytes")
    return 0


def verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Makes steps again and says what came of it; the exit code."""
    _begin()
    run = urls.local(args.run, "--run", "copy the checkpoint here") if args.run else None
    capsule = archive.read(Path(args.what[1]))
    found = made_again(capsule, args.steps or _STEPS, run, overrides)
    if jax.process_index() == 0:
        if args.json:
            _write(args.json, found)
        if args.json != STDOUT:
            _print(found)
    return 0 if found.holds else 1


def _begin() -> None:
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    multihost.initialize()


def _print(found: Verification) -> None:
    console = wide_console()
    table = Table("ingredient", "here", title="ingredients", title_justify="left")
    for one in found.ingredients:
        more = len(one.differences) - _SHOWN
        lines = [*one.differences[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        table.add_row(one.name, "\n".join(lines).replace("[", "\\[") or "the same")
    console.print(table)
    for made, allowed in zip(found.steps, found.tolerances, strict=True):
        apart = f"{made.difference:.1e} apart" if made.difference else "the same"
        limit = f", up to {allowed:.1e} is rounding" if allowed else ""
        line = f"step {made.step:6}  loss {made.loss:.9g}  {apart}{limit}"
        console.print(line, highlight=False)
    console.print(verdict(found), soft_wrap=True, markup=False)


def verdict(found: Verification) -> str:
    """What came of it, in a sentence."""
    if found.differing(["data"]):
        return ("the data are not those of the run: nothing was made again; name the right ones "
                "(--data.dataset_path=DIR)")  # fmt: skip
    n, differing = len(found.steps), ", ".join(found.differing())
    exact = not any(found.tolerances)
    if found.holds:
        how = "bit for bit" if exact else f"to within rounding; what differs: {differing}"
        return f"{n} steps came out as they were logged, {how}"
    why = f"what differs: {differing}" if differing else "although every ingredient is the same"
    return f"not every step came out as it was logged; {why}"


def _write(path: Path, found: Verification) -> None:
    document = {
        "holds": found.holds,
        "verdict": verdict(found),
        "ingredients": {one.name: one.differences for one in found.ingredients},
        "steps": [
            dataclasses.asdict(made) | {"difference": made.difference, "tolerance": allowed}
            for made, allowed in zip(found.steps, found.tolerances, strict=True)
        ],
    }
    write_json(path, document, indent=2)
