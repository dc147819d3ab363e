"""`python -m jaxforge.capsule RUN`: pack config, versions and metrics of a run into one file.

`python -m jaxforge.capsule verify CAPSULE` repeats steps of the run on a machine with the same
data, and reports differences of the environment. The file contains no secrets and no data.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError

_VERIFY = "verify"


def main(argv: Sequence[str] | None = None) -> int:
    """Create or verify a capsule; return 1 if verified steps differ."""
    args, overrides = parser().parse(argv)
    verifies = len(args.what) == 2 and args.what[0] == _VERIFY
    _check(args, overrides, verifies)
    from jaxforge.tools.replay import capsule  # imported here, because JAX takes a second

    return capsule.run_verify(args, overrides) if verifies else capsule.make(args)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "capsule",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN [--output FILE]\n"
        "       %(prog)s verify CAPSULE [options] [--section.key=value ...]",
        description="Pack the description and metrics of a run into one file; or repeat steps from "
        "such a file and compare the losses.",
        epilog="verify accepts settings of the run's config, such as --data.dataset_path=DIR.",
    )
    add = parser.add_argument
    add("what", metavar="RUN, or verify CAPSULE", nargs="+",
        help="run directory, or a capsule")  # fmt: skip
    add("--output", metavar="FILE", type=Path,
        help="new file (default: RUN.capsule.zip)")  # fmt: skip
    add(
        "--steps",
        type=int,
        metavar="K",
        help="verify: number of logged steps to repeat (default: 3)",
    )
    add("--run", metavar="RUN",
        help="verify: start from this checkpoint, or from the newest suitable checkpoint of "
        "this run (default: from the first step)")  # fmt: skip
    add("--json", metavar="FILE", type=Path,
        help='verify: write the result as JSON; "-" for stdout')  # fmt: skip
    return parser


def _check(args: argparse.Namespace, overrides: Sequence[str], verifies: bool) -> None:
    if not verifies and len(args.what) > 1:
        raise UserError(f"{' '.join(args.what)}: expected RUN, or {_VERIFY} CAPSULE")
    unsupported = ["output"] if verifies else ["steps", "run", "json"]
    for name in unsupported:
        if getattr(args, name) is not None:
            raise UserError(f"--{name} is for {'RUN' if verifies else f'{_VERIFY} CAPSULE'}")
    if not verifies and overrides:
        raise UserError(f"{overrides[0]}: a capsule records the run unchanged; remove this setting")
    if args.steps is not None and args.steps < 1:
        raise UserError(f"--steps {args.steps}: must be at least 1")


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
