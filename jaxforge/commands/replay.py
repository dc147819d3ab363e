"""`python -m jaxforge.replay RUN --step N` (or `--steps A:B`): repeat steps of a run.

State and batch are restored exactly from the nearest earlier checkpoint, on any devices.

- One step: report the loss of each document with its text, the contribution of documents to the
  gradient and the step without them, and differences per layer from the surrounding steps.
- Several steps: report whether they match the log.
- `--against`: report the first value that differs from a step of another run, or of the same run
  with other settings.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import check_parent_directory, run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Replay steps, print tables and write JSON; return the exit code."""
    args, overrides = parser().parse(argv)
    first, last = _range(args)
    from jaxforge.tools.replay import replay_steps  # JAX takes a second to import

    return replay_steps.run(args, overrides, first, last)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "replay",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN (--step N | --steps A:B) [--against OTHER] [options] "
        "[--section.key=value ...]",
        description="Repeat steps of a run, and explain a step.",
        epilog="Settings of the run's config, such as --distributed.tp=2, are accepted.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="step to explain, from 1")
    which.add_argument("--steps", metavar="A:B", help="steps to compare with the log")
    add("--around", type=int, default=2, metavar="N",
        help="surrounding steps to compare with (default: 2)")  # fmt: skip
    add("--rows", type=int, default=4, metavar="N",
        help="rows of the batch to split into documents (default: 4)")  # fmt: skip
    add("--top", type=int, default=8, metavar="N", help="documents and layers to show (default: 8)")
    add("--against", metavar="OTHER", help="run with which to compare the step")
    add("--other", metavar="SETTING", action="append", default=[],
        help="setting of OTHER only, such as --other=--distributed.tp=2")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help='write the result as JSON; "-" for stdout')
    add("--html", metavar="FILE", type=Path, help="write the report of a step as HTML")
    add("--check", action="store_true", help="exit with 1 unless the step matches the log bitwise")
    return parser


def _range(args: argparse.Namespace) -> tuple[int, int]:
    for name, least in (("around", 0), ("rows", 1), ("top", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} {getattr(args, name)}: must be at least {least}")
    if args.other and not args.against:
        raise UserError("--other requires --against, which may be RUN itself")
    if args.steps and args.against:
        raise UserError("--against supports one step only: use --step")
    if args.html and (args.steps or args.against):
        raise UserError("--html supports one step only: use --step without --against")
    for name in ("json", "html"):
        check_parent_directory(f"--{name}", getattr(args, name))
    if args.steps is None:
        return args.step, args.step
    first, colon, last = args.steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"--steps {args.steps}: must be A:B, the first and last step, from 1")
    if args.json:
        raise UserError("--json supports one step only: use --step")
    return int(first), int(last)


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
