"""`python -m jaxforge.replay RUN --step N` (or `--steps A:B`): makes steps of a run again.

State and batch come from the nearest checkpoint before, exactly, on whatever devices are here. With
one step, says what happened in it: the loss of every document with its text, which documents the
gradient comes from and what the step would have been without them, and layer by layer what differs
from the steps around it. With several, whether they are what was logged. With `--against`, which
value is the first that differs from another run's step, or from its own under other settings.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import check_place, run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Replays, prints tables, writes JSON."""
    args, overrides = parser().parse(argv)
    first, last = _range(args)
    from jaxforge.tools.replay import replay_steps  # here, as JAX takes a second to import

    return replay_steps.run(args, overrides, first, last)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "replay",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN (--step N | --steps A:B) [--against OTHER] [options] "
        "[--section.key=value ...]",
        description="Makes steps of a run again, and says what happened in one.",
        epilog="Settings of the run's config, such as --distributed.tp=2, may follow.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="the step to look at, from 1")
    which.add_argument("--steps", metavar="A:B", help="steps to compare with what was logged")
    add("--around", type=int, default=2, metavar="N",
        help="steps before and after, to compare with (default: 2)")  # fmt: skip
    add("--rows", type=int, default=4, metavar="N",
        help="rows of the batch to take apart into documents (default: 4)")  # fmt: skip
    add("--top", type=int, default=8, metavar="N", help="documents and layers to show (default: 8)")
    add("--against", metavar="OTHER", help="a run whose step to compare with this one's")
    add("--other", metavar="SETTING", action="append", default=[],
        help="of OTHER alone, such as --other=--distributed.tp=2")  # fmt: skip
    add("--json", metavar="FILE", type=Path, help='write all of it as JSON; "-" to stdout')
    add("--html", metavar="FILE", type=Path, help="write the account of a step as a page")
    add(
        "--check", action="store_true", help="exit code 1 unless it is what was logged, bit for bit"
    )
    return parser


def _range(args: argparse.Namespace) -> tuple[int, int]:
    for name, least in (("around", 0), ("rows", 1), ("top", 1)):
        if getattr(args, name) < least:
            raise UserError(f"--{name}: expected {least} or more")
    if args.other and not args.against:
        raise UserError("--other is of the run that --against names, which may be RUN itself")
    if args.steps and args.against:
        raise UserError("--against is for one step: use --step")
    if args.html and (args.steps or args.against):
        raise UserError("--html is for the account of one step: use --step without --against")
    for name in ("json", "html"):
        check_place(f"--{name}", getattr(args, name))
    if args.steps is None:
        return args.step, args.step
    first, colon, last = args.steps.partition(":")
    if not (colon and first.isdigit() and last.isdigit() and 1 <= int(first) <= int(last)):
        raise UserError(f"--steps {args.steps}: expected A:B, the first step and the last, from 1")
    if args.json:
        raise UserError("--json is for one step: use --step")
    return int(first), int(last)


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
