"""`python -m jaxforge.pipeline --schedule NAME --stages N --microbatches M`: a schedule, drawn.

Prints the table of what each stage does in each tick, and what the schedule costs; `--svg FILE`
draws it as well. Needs no devices.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError
from jaxforge.parallel.pipeline.drawing import as_svg, as_text
from jaxforge.parallel.pipeline.schedule import SCHEDULES, Schedule

_INTERLEAVED = "interleaved_1f1b"


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the drawing, if there is to be one, and prints the table.

    Args:
        argv: arguments; by default the process's.

    Returns:
        0.

    Raises:
        UserError: there is no such schedule, or the file cannot be written.
        SystemExit: `--help`.
    """
    args = parser().parse_args(argv)
    schedule = _schedule(args)
    if args.svg:
        _write(args.svg, as_svg(schedule))
    print(as_text(schedule), end="", flush=True)
    return 0


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "pipeline",
        description="Shows what each pipeline stage does in each tick of a schedule.",
    )
    add = parser.add_argument
    add("--schedule", required=True, metavar="NAME", help=", ".join(SCHEDULES))
    add("--stages", required=True, type=int, metavar="N", help="pipeline stages")
    add("--microbatches", required=True, type=int, metavar="M", help="microbatches of an update")
    add(
        "--chunks", type=int, metavar="V",
        help=f"virtual stages of each stage, for {_INTERLEAVED} (default: 2)",
    )  # fmt: skip
    add("--svg", type=Path, metavar="FILE", help="draw it to FILE, too")
    return parser


def _schedule(args: argparse.Namespace) -> Schedule:
    if args.schedule not in SCHEDULES:
        raise UserError(f"--schedule {args.schedule}: choose one of {', '.join(SCHEDULES)}")
    for name in ("stages", "microbatches"):
        if (number := getattr(args, name)) < 1:
            raise UserError(f"--{name} {number}: give 1 at least")
    chunks = _chunks(args)
    if chunks > 1 and args.microbatches % args.stages:
        raise UserError(
            f"--microbatches {args.microbatches} must be a multiple of --stages {args.stages} with "
            f"{_INTERLEAVED}: change it to {-(-args.microbatches // args.stages) * args.stages}"
        )
    return SCHEDULES[args.schedule](args.stages, args.microbatches, chunks)


def _chunks(args: argparse.Namespace) -> int:
    if args.schedule != _INTERLEAVED:
        if args.chunks is not None:
            raise UserError(f"--chunks goes with --schedule {_INTERLEAVED}, not {args.schedule}")
        return 1
    if args.chunks is not None and args.chunks < 2:
        raise UserError(f"--chunks {args.chunks}: give 2 at least; 1f1b is {_INTERLEAVED} with one")
    return args.chunks or 2


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
