"""`jaxforge sweep --config FILE [--grid KEY=A,B ...]`: train variants."""

import argparse
import functools
import sys
from collections.abc import Sequence

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.storage import trust

_ABOUT = """\
`jaxforge sweep --config FILE [--grid KEY=A,B ...]`: train variants.

    --grid optimizer.lr=1e-3,3e-3 --grid model.dim=128,256      all combinations: four runs

Each point is trained as a separate run in `<checkpoint.dir>/<its values>`, one after another. Other
settings apply to all runs. After a stop or kill, the same command resumes and skips finished runs.
All configs are checked before the first run starts. At the end, the points are listed by loss.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the points of a sweep; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args, settings = parser().parse(arguments)
    trust.use_working_directory()
    from jaxforge.tools.sweep import (
        run_sweep,  # imported here, because JAX takes two seconds
    )

    return run_sweep.run(arguments, args, settings)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "sweep", takes_settings=True, description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="base config")
    add("--grid", action="append", default=[], metavar="KEY=A,B", help="values of a key")
    add("--dry-run", action="store_true", help="check and list the points without running them")
    add("--results", action="store_true", help="only report the finished points")
    add("--slurm", nargs="?", const="-", metavar="FILE",
        help="write an sbatch script: a job array with a task per point")  # fmt: skip
    add("--devices", type=int, metavar="N", help="devices per run (default: those of this machine)")
    add("--point", type=int, metavar="I", help="run only this point, counted from 0")
    return parser


entry = functools.partial(run_main, main, outlives_reader=True)
