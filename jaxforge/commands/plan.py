"""`jaxforge plan`: compile the train step of a config for target hardware, and report its cost.

`jaxforge plan --schedule NAME --stages N --microbatches M` prints a table of the work of each
pipeline stage in each tick instead, and the cost of the schedule. `--svg FILE` also draws it.
"""

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import run_main, write_text
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.errors import UserError
from jaxforge.parallel.pipeline.drawing import as_svg, as_text
from jaxforge.parallel.pipeline.schedule import SCHEDULES, Schedule
from jaxforge.storage import trust
from jaxforge.tools.plan.topology import FORMS, Topology

_ABOUT = """Compile the train step of a config for target hardware, which need not be present.
Report whether the config is valid and fits into memory, its communication, and an estimate of its
speed. Settings such as --train.batch_size=2 are accepted, as by `jaxforge train`. With --schedule,
draw a pipeline schedule instead."""
_SCHEDULE = ("stages", "microbatches", "chunks", "svg")
_INTERLEAVED = "interleaved_1f1b"


def main(argv: Sequence[str] | None = None) -> int:
    """Print a plan; return 2 if the run would be refused or would not fit."""
    line = parser()
    args, overrides = line.parse(argv)
    if args.schedule is not None:
        line.check_options(args, {"schedule", *_SCHEDULE}, "--schedule")
        _draw(args, line)
        return 0
    line.check_options(args, vars(args).keys() - {*_SCHEDULE}, "a plan without --schedule")
    if missing := [name for name in ("config", "topology") if getattr(args, name) is None]:
        names = ", ".join(f"--{name}" for name in missing)
        line.error(f"the following arguments are required: {names}")
    topology = topology_of(args.topology)
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
        usage="%(prog)s --config FILE --topology NAME [options] [--section.key=value ...]\n"
        "       %(prog)s --schedule NAME --stages N --microbatches M [--chunks V] [--svg FILE]",
        description=_ABOUT,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML config of a run")
    parser.add_argument("--topology", metavar="NAME", help=FORMS)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    parser.add_argument(
        "--price", type=float, metavar="N", help="price per device and hour, in any currency"
    )
    parser.add_argument(
        "--search", type=positive_int, nargs="?", const=8, metavar="N",
        help="compile the N most promising meshes, batch splits and remat policies (default: 8)",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", type=positive_int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N",
        help="concurrent compilations",
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="file for the best config, as TOML")
    parser.add_argument(
        "--save-executable", metavar="FILE", help="save the compiled step for train.executable"
    )
    parser.add_argument("--compare", metavar="FILE", help="config to compare side by side")
    schedule = parser.add_argument_group("drawing of a pipeline schedule")
    add = schedule.add_argument
    add("--schedule", metavar="NAME", help=", ".join(SCHEDULES))
    add("--stages", type=positive_int, metavar="N", help="pipeline stages")
    add("--microbatches", type=positive_int, metavar="M", help="microbatches per update")
    add("--chunks", type=positive_int, metavar="V",
        help=f"virtual stages per stage, for {_INTERLEAVED} (default: 2)")  # fmt: skip
    add("--svg", type=Path, metavar="FILE", help="also draw the schedule to FILE")
    return parser


def _draw(args: argparse.Namespace, line: CommandParser) -> None:
    """Print the table of a schedule, and draw it to a file if requested.

    Raises:
        UserError: the schedule is unknown, or the file cannot be written.
    """
    if missing := [name for name in ("stages", "microbatches") if getattr(args, name) is None]:
        line.error(f"the following arguments are required: --{missing[0]}")
    schedule = _schedule(args)
    if args.svg:
        write_text("--svg", args.svg, as_svg(schedule))
    print(as_text(schedule), end="", flush=True)


def _schedule(args: argparse.Namespace) -> Schedule:
    if args.schedule not in SCHEDULES:
        raise UserError(f"--schedule {args.schedule}: choose one of {', '.join(SCHEDULES)}")
    is_interleaved = args.schedule == _INTERLEAVED
    if args.chunks is not None and not is_interleaved:
        raise UserError(f"--chunks requires --schedule {_INTERLEAVED}, not {args.schedule}")
    if args.chunks == 1:
        raise UserError("--chunks 1: must be at least 2; use 1f1b for a single chunk")
    if is_interleaved and args.microbatches % args.stages:
        raise UserError(
            f"--microbatches {args.microbatches} must be a multiple of --stages {args.stages} with "
            f"{_INTERLEAVED}: change it to {-(-args.microbatches // args.stages) * args.stages}"
        )
    chunks = args.chunks or (2 if is_interleaved else 1)
    return SCHEDULES[args.schedule](args.stages, args.microbatches, chunks)


entry = functools.partial(run_main, main)
