"""`python -m jaxforge.pipeline --schedule NAME --stages N --microbatches M`: draw a schedule.

The command prints a table of the work of each stage in each tick, and the cost of the schedule.
`--svg FILE` also draws it. No devices are required.
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
    """Print the table of a schedule, and draw it if requested.

    Args:
        argv: arguments; by default those of the process.

    Returns:
        0.

    Raises:
        UserError: the schedule is unknown, or the file cannot be written.
        SystemExit: `--help`.
    """
    args = parser().parse_args(argv)
    schedule = _schedule(args)
    if args.svg:
        _write(args.svg, as_svg(schedule))
    print(as_text(schedule), end="", flush=True)
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "pipeline",
        description="Show the work of each pipeline stage in each tick of a schedule.",
    )
    add = parser.add_argument
    add("--schedule", required=True, metavar="NAME", help=", ".join(SCHEDULES))
    add("--stages", required=True, type=int, metavar="N", help="pipeline stages")
    add("--microbatches", required=True, type=int, metavar="M", help="microbatches per update")
    add(
        "--chunks", type=int, metavar="V",
        help=f"virtual stages per stage, for {_INTERLEAVED} (default: 2)",
    )  # fmt: skip
    add("--svg", type=Path, metavar="FILE", help="also draw the schedule to FILE")
    return parser


def _schedule(args: argparse.Namespace) -> Schedule:
    if args.schedule not in SCHEDULES:
        raise UserError(f"--schedule {args.schedule}: choose one of {', '.join(SCHEDULES)}")
    for name in ("stages", "microbatches"):
        if (number := getattr(args, name)) < 1:
            raise UserError(f"--{name} {number}: must be at least 1")
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
            raise UserError(f"--chunks requires --schedule {_INTERLEAVED}, not {args.schedule}")
        return 1
    if args.chunks is not None and args.chunks < 2:
        raise UserError(f"--chunks {args.chunks}: must be at least 2; use 1f1b for a single chunk")
    return args.chunks or 2


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
