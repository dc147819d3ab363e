"""`python -m jaxforge.sweep --config FILE [--grid KEY=A,B ...] [--ladder FILE]`: many runs of one.

    --grid optimizer.lr=1e-3,3e-3 --grid model.dim=128,256      every combination: four runs
    --ladder sizes.toml         a run for each table [[point]] of the file, whose keys go together

Trains each point as a run of its own, `<checkpoint.dir>/<its values>`, one after another; other
settings are for all of them. The same command goes on where it was stopped or killed: what is
finished is not run again. All configs are checked before the first run begins. At the end come the
points by loss, with the law that the sizes of a ladder follow, here and in
`<checkpoint.dir>/sweep.html`.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.storage import trust


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs the points, returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, settings = parser().parse(arguments)
    trust.use_working_directory()
    from jaxforge.tools.sweep import (
        run_sweep,  # here, as JAX and all that needs it take two seconds
    )

    return run_sweep.run(arguments, args, settings)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "sweep", takes_settings=True, description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the base config")
    add("--grid", action="append", default=[], metavar="KEY=A,B", help="values of a key")
    add("--ladder", type=Path, metavar="FILE", help="TOML with tables [[point]]")
    add("--dry-run", action="store_true", help="check and list the points, and run nothing")
    add("--results", action="store_true", help="only the table and the page of what is finished")
    add("--slurm", nargs="?", const="-", metavar="FILE",
        help="write a script for sbatch: an array with a task for each point")  # fmt: skip
    add("--devices", type=int, metavar="N", help="of each run; by default those of this machine")
    add("--point", type=int, metavar="I", help="run only this one, counted from 0")
    return parser


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
