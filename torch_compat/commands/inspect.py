"""`jaxforge inspect PATH`: describe the contents of a checkpoint."""

import functools
import json
from collections.abc import Sequence

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from torch_compat.commands import prepare_process


def main(argv: Sequence[str] | None = None) -> int:
    """Print the description; return the exit code."""
    args, _ = parser().parse(argv)
    prepare_process()
    from torch_compat.checkpoint import checkpoints, inspection

    report = inspection.inspect(checkpoints.find(args.path))
    print(json.dumps(report) if args.json else inspection.as_text(report))
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser("inspect", description="Describe the contents of a checkpoint.")
    parser.add_argument("path", metavar="PATH", help="a run, or a checkpoint in a readable format")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


entry = functools.partial(run_main, main)
