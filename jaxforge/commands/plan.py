"""`jaxforge plan`: compile the train step of a config for target hardware, and report its cost."""

import functools
import os
from collections.abc import Sequence

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.errors import UserError
from jaxforge.storage import trust
from jaxforge.tools.plan.topology import FORMS, Topology

_ABOUT = """Compile the train step of a config for target hardware, which need not be present.
Report whether the config is valid and fits into memory, its communication, and an estimate of its
speed. Settings such as --train.batch_size=2 are accepted, as by `jaxforge train`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; return 2 if the run would be refused or would not fit."""
    args, overrides = parser().parse(argv)
    topology = topology_of(args.topology)
    # Before JAX is imported, which reads these variables once.
    topology.prepare(os.environ)
    trust.use_working_directory()
    from jaxforge.tools.plan import plan_report

    return plan_report.run(args, topology, overrides)


def topology_of(text: str) -> Topology:
    """Parse the value of --topology.

    Raises:
        UserError: the value is invalid.
    """
    try:
        return Topology.parse(text)
    except ValueError as error:
        raise UserError(f"--topology: {error}") from error


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "plan",
        takes_settings=True,
        usage="%(prog)s --config FILE --topology NAME [options] [--section.key=value ...]",
        description=_ABOUT,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="TOML config of a run")
    add("--topology", required=True, metavar="NAME", help=FORMS)
    add("--json", action="store_true", help="print the plan as JSON")
    add("--search", type=positive_int, nargs="?", const=8, metavar="N",
        help="compile the N most promising meshes, batch splits and remat policies (default: 8)",
    )  # fmt: skip
    add("--jobs", type=positive_int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
        help="concurrent compilations")  # fmt: skip
    add("--output", metavar="FILE", help="file for the best config, as TOML")
    add("--save-executable", metavar="FILE", help="save the compiled step for train.executable")
    return parser


entry = functools.partial(run_main, main)
