"""`python -m jaxforge.capsule RUN`: a run's ingredients and its curve in one file.

`python -m jaxforge.capsule verify CAPSULE` makes steps of it again where the same data are, and
says of each ingredient whether it is the same here. The file holds no secrets, and no data.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError

_VERIFY = "verify"


def main(argv: Sequence[str] | None = None) -> int:
    """Makes a capsule, or verifies one: exit code 1 where its steps do not come out the same."""
    args, overrides = parser().parse(argv)
    verifies = len(args.what) == 2 and args.what[0] == _VERIFY
    _check(args, overrides, verifies)
    from jaxforge.tools.replay import capsule  # here, as JAX takes a second to import

    return capsule.run_verify(args, overrides) if verifies else capsule.make(args)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "capsule",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN [--output FILE]\n"
        "       %(prog)s verify CAPSULE [options] [--section.key=value ...]",
        description="Puts what a run is made of, and its curve, into one file; or makes steps "
        "again by such a file, and compares losses with its curve.",
        epilog="After verify, settings of the run's config, such as --data.dataset_path=DIR, may "
        "follow.",
    )
    add = parser.add_argument
    add("what", metavar="RUN, or verify CAPSULE", nargs="+",
        help="run directory; or a file that this command made")  # fmt: skip
    add("--output", metavar="FILE", type=Path,
        help="new file (default: the run's name and .capsule.zip)")  # fmt: skip
    add("--steps", type=int, metavar="K", help="verify: logged steps to make again (default: 3)")
    add("--run", metavar="RUN",
        help="verify: begin from this run's newest checkpoint that steps follow, or from this "
        "checkpoint (default: from the start)")  # fmt: skip
    add("--json", metavar="FILE", type=Path,
        help='verify: write all of it as JSON; "-" to stdout')  # fmt: skip
    return parser


def _check(args: argparse.Namespace, overrides: Sequence[str], verifies: bool) -> None:
    if not verifies and len(args.what) > 1:
        raise UserError(f"{' '.join(args.what)}: expected RUN, or {_VERIFY} CAPSULE")
    of_the_other = ["output"] if verifies else ["steps", "run", "json"]
    for name in of_the_other:
        if getattr(args, name) is not None:
            raise UserError(f"--{name} is for {'RUN' if verifies else f'{_VERIFY} CAPSULE'}")
    if not verifies and overrides:
        raise UserError(f"{overrides[0]}: a capsule is of the run as it was; it takes no settings")
    if args.steps is not None and args.steps < 1:
        raise UserError("--steps: expected 1 or more")


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
