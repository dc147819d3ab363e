"""`python -m jaxforge.plan`: the command line. JAX is imported when the environment is ready."""

import os
from collections.abc import Sequence

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, count
from jaxforge.errors import UserError
from jaxforge.storage import trust
from jaxforge.tools.plan.topology import FORMS, Topology

DESCRIPTION = """Compiles the real step of a configuration for a machine that is not here, and says
whether it is valid, whether it fits, what travels, and how fast it will be (an estimate).
Settings such as --train.batch_size=2 may follow, as with jaxforge.train."""


def main(argv: Sequence[str] | None = None) -> int:
    """Plans and prints; exit code 2 where the run would be refused or would not fit."""
    args, overrides = parser().parse(argv)
    topology = topology_of(args.topology)
    topology.prepare(os.environ)
    trust.use_working_directory()
    from jaxforge.tools.plan import plan_report

    return plan_report.run(args, topology, overrides)


def topology_of(text: str) -> Topology:
    """Reads --topology.

    Raises:
        UserError: it is none.
    """
    try:
        return Topology.parse(text)
    except ValueError as error:
        raise UserError(f"--topology: {error}") from error


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser("plan", takes_settings=True, description=DESCRIPTION)
    parser.add_argument("--config", required=True, metavar="FILE", help="TOML, as of a run")
    parser.add_argument("--topology", required=True, help=FORMS)
    parser.add_argument("--json", action="store_true", help="for machines, on standard output")
    parser.add_argument(
        "--price", type=float, metavar="N", help="of a device and hour, in any currency"
    )
    parser.add_argument(
        "--search", type=count, nargs="?", const=8, metavar="N",
        help="compile the N most promising meshes, batch splits and rematerialisations (8)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=count, default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
        help="compilers at a time",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="where the best found goes, as TOML")
    parser.add_argument("--html", metavar="FILE", help="a page with pictures, that loads nothing")
    parser.add_argument(
        "--save-executable", metavar="FILE", help="keep the compiled step for train.executable"
    )
    parser.add_argument("--compare", metavar="FILE", help="another configuration, side by side")
    return parser


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main)


if __name__ == "__main__":
    raise SystemExit(entry())
