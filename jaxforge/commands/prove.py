"""`jaxforge prove --config FILE`: prove on CPUs that a config computes the same on its mesh."""

import functools
import os
from collections.abc import Sequence

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.storage import trust
from jaxforge.tools.prove import MOST_DEVICES, xla_flags

_ABOUT = """Prove on CPUs that a config computes the same on its mesh as on one device.
A small config of the same structure makes some updates in float32 on both, with both reductions of
gradients, and over a checkpoint that another mesh restores. Settings such as --distributed.tp=2 are
accepted, as by `jaxforge train`."""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the proof; return 1 if something differs, or a planted fault is not found."""
    args, overrides = parser().parse(argv)
    # Before JAX is imported, which reads these variables once.
    os.environ.update(
        JAX_PLATFORMS="cpu",
        XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {xla_flags(MOST_DEVICES)}".strip(),
    )
    trust.use_working_directory()
    from jaxforge.parallel.multihost import enlarge_thread_pool
    from jaxforge.tools.prove import proof_report

    enlarge_thread_pool()
    return proof_report.run(args, overrides)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "prove",
        takes_settings=True,
        usage="%(prog)s --config FILE [options] [--section.key=value ...]",
        description=_ABOUT,
        epilog="The exit code is 1 if a quantity differs, or a planted fault is not found.",
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="TOML config of a run")
    add("--mutate", action="store_true",
        help="also plant known faults, each of which must be found")  # fmt: skip
    add("--json", action="store_true", help="print JSON")
    return parser


entry = functools.partial(run_main, main)
