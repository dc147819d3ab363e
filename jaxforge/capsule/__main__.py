"""`python -m jaxforge.capsule RUN`: a run's ingredients and its curve in one file.

`python -m jaxforge.capsule verify CAPSULE` makes steps of it again where the same data are, and
says of each ingredient whether it is the same here. The file holds no secrets, and no data.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console
from rich.table import Table

from jaxforge import storage
from jaxforge.capsule import archive
from jaxforge.capsule.make import capsule_of
from jaxforge.capsule.verify import Verification, verify
from jaxforge.cli import run_main
from jaxforge.errors import UserError
from jaxforge.parallel import host_memory, multihost
from jaxforge.telemetry.console import setup_logging

_STDOUT = Path("-")
_SHOWN = 8  # differences of an ingredient


def main(argv: Sequence[str] | None = None) -> int:
    """Makes a capsule, or verifies one: exit code 1 where its steps do not come out the same."""
    given = list(sys.argv[1:] if argv is None else argv)
    verifies = given[:1] == ["verify"]
    parser = _verifying() if verifies else _making()
    args, overrides = parser.parse_known_args(given[1:] if verifies else given)
    setup_logging(Console(stderr=True))
    host_memory.keep_freed_memory()
    multihost.initialize()
    return _verify(args, overrides) if verifies else _make(args, overrides)


def _making() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxforge.capsule",
        usage="%(prog)s RUN [--output FILE]\n       %(prog)s verify CAPSULE [options]",
        description="Puts what a run is made of, and its curve, into one file.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", help="run directory")
    parser.add_argument("--output", metavar="FILE", type=Path,
                        help="new file (default: the run's name and .capsule.zip)")  # fmt: skip
    return parser


def _verifying() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxforge.capsule verify",
        usage="%(prog)s CAPSULE [options] [--section.key=value ...]",
        description="Makes steps of a capsule again, and compares losses with its curve.",
        epilog="Settings of the run's config, such as --data.dataset_path=DIR, may follow.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("capsule", metavar="CAPSULE", type=Path, help="file that this command made")
    add("--steps", type=int, default=3, metavar="K",
        help="logged steps to make again (default: 3)")  # fmt: skip
    add("--run", metavar="RUN",
        help="the run, or one of its checkpoints, to begin from (default: the start)")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help='write all of it as JSON; "-" to stdout')
    return parser


def _make(args: argparse.Namespace, others: Sequence[str]) -> int:
    if others:
        raise UserError(f"{others[0]}: a capsule is of the run as it was; it takes no settings")
    run = storage.path(args.run)
    output = args.output or Path(f"{run.absolute().name}.capsule.zip")
    storage.local(output, "--output", "copy it there afterwards")
    made = capsule_of(run)
    if jax.process_index() == 0:
        archive.write(output, made)
        print(f"{output}: {output.stat().st_size:,} bytes")
    return 0


def _verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    if args.steps < 1:
        raise UserError("--steps: expected 1 or more")
    run = storage.local(args.run, "--run", "copy the checkpoint here") if args.run else None
    found = verify(archive.read(args.capsule), args.steps, run, overrides)
    if jax.process_index() == 0:
        if args.json:
            _write(args.json, found)
        if args.json != _STDOUT:
            _print(found)
    return 0 if found.holds else 1


def _print(found: Verification) -> None:
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table("ingredient", "here", title="ingredients", title_justify="left")
    for one in found.ingredients:
        more = len(one.differences) - _SHOWN
        lines = [*one.differences[:_SHOWN], *([f"and {more} more"] if more > 0 else [])]
        table.add_row(one.name, "\n".join(lines).replace("[", "\\[") or "the same")
    console.print(table)
    for made, allowed in zip(found.steps, found.tolerances, strict=True):
        apart = "the same" if made.difference == 0 else f"{made.difference:.1e} apart"
        limit = "" if allowed == 0 else f", up to {allowed:.1e} is rounding"
        console.print(
            f"step {made.step:6}  loss {made.loss:.9g}  {_logged(made.difference, apart)}{limit}"
        )
    console.print(verdict(found), soft_wrap=True, markup=False)


def _logged(difference: float | None, apart: str) -> str:
    return "not logged" if difference is None else apart


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
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    if path == _STDOUT:
        sys.stdout.write(text)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from error


if __name__ == "__main__":
    raise SystemExit(run_main(functools.partial(main, None), uses_devices=True))
