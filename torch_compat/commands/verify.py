"""`jaxforge verify A B`: compare two checkpoints.

`jaxforge verify CHECKPOINT --torch MODULE:FACTORY` compares a PyTorch model with jaxforge layer by
layer, on the weights of a checkpoint.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.errors import UserError
from torch_compat.commands import add_reading_options, prepare_process, reading_options

if TYPE_CHECKING:
    from torch_compat.convert.verify import VerificationResult

_MAX_SHOWN = 30  # differences that are printed


def main(argv: Sequence[str] | None = None) -> int:
    """Compare and print the differences; return 1 if there are any."""
    args, overrides = parser().parse(argv)
    _check(args)
    prepare_process()
    return (_verify if args.torch is None else _compare_models)(args, overrides)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "verify",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s A B [options] [--section.key=value ...]\n"
        "       %(prog)s CHECKPOINT --torch MODULE:FACTORY [options] [--section.key=value ...]",
        description="Compare two checkpoints; or compare a PyTorch model with jaxforge layer by "
        "layer, on the weights of a checkpoint (docs/torch_compat.md).",
        epilog="The exit code is 1 if they differ.",
    )
    add = parser.add_argument
    add("checkpoints", metavar="A B", nargs="+", help="checkpoints in any readable format")
    add_reading_options(parser, "--dialect")
    add("--json", action="store_true", help="print JSON")
    add("--torch", metavar="MODULE:FACTORY",
        help="factory of the torch module, and optionally its optimizer and loss")  # fmt: skip
    add("--loaded", action="store_true", help="the factory has loaded the weights itself")
    add("--batch", type=Path, metavar="FILE.npz",
        help="input_ids and labels, [b, s]; by default from the config's data")  # fmt: skip
    add("--rows", type=positive_int, help="number of sequences of a sampled batch (2)")
    add("--tokens", type=positive_int, help="tokens of each sampled sequence (64)")
    return parser


def _check(args: argparse.Namespace) -> None:
    n = len(args.checkpoints)
    if n != (expected := 2 if args.torch is None else 1):
        raise UserError(
            f"{n} checkpoints: {' '.join(args.checkpoints)}. Name "
            + ("two, or add --torch MODULE:FACTORY" if expected == 2 else "one with --torch")
        )
    for name in ("loaded", "batch", "rows", "tokens"):
        if args.torch is None and getattr(args, name):
            raise UserError(f"--{name} only applies to --torch. Add it, or remove this")
    for name in ("weights_only", "resize_vocab"):
        if args.torch is not None and getattr(args, name):
            raise UserError(f"--{name.replace('_', '-')} does not apply to --torch. Remove it")


def _verify(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from torch_compat.checkpoint import checkpoints
    from torch_compat.convert.verify import verify

    a, b = map(checkpoints.find, args.checkpoints)
    options = reading_options(args)
    result = verify(a, b, args.config, overrides, options, args.max_memory.bytes)
    if args.json:
        print(json.dumps(dataclasses.asdict(result), indent=2))
    else:
        _print_differences(result)
    return 0 if result.same else 1


def _print_differences(result: "VerificationResult") -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False, width=None if sys.stdout.isatty() else 140)
    if result.differences:
        table = Table("name", "differs in", "largest difference", "")
        for d in result.differences[:_MAX_SHOWN]:
            table.add_row(*map(escape, (d.name, d.what, f"{d.largest:.3g}", d.note)))
        console.print(table)
        if (more := len(result.differences) - _MAX_SHOWN) > 0:
            console.print(f"... and {more} more")
    for note in result.notes:
        console.print(f"note: {note}", markup=False)
    n_settings = sum(d.what == "settings" for d in result.differences)
    counts = {"tensors": (len(result.differences) - n_settings, result.compared)}
    if result.settings:
        counts["place, schedule and optimizer"] = (n_settings, result.settings)
    for what, (differ, of) in counts.items():
        verdict = f"{differ} of {of} differ" if differ else f"{of} are the same"
        console.print(f"{what}: {verdict}")


def _compare_models(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    from torch_compat.lockstep import command  # imports JAX, which takes two seconds

    job = command.Job(
        spec=args.torch, checkpoint=args.checkpoints[0], config=args.config, overrides=overrides,
        batch=args.batch, size=(args.rows or 2, args.tokens or 64), dialect=args.from_dialect,
        loaded=args.loaded,
    )  # fmt: skip
    report = command.lockstep(job)
    command.print_report(report, is_json=args.json)
    return 0 if report.same else 1


entry = functools.partial(run_main, main)
