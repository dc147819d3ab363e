"""`jaxforge evaluate RUN [--set NAME=DIR ...]`: loss, perplexity and bits per byte.

RUN is a run directory, or one of its checkpoints (`RUN/checkpoints/step_100`). The evaluation sets
are those of the run's `[eval]`, or of `--set`. Settings such as `--distributed.tp=2` define the
device mesh; by default all devices are used (`dp_shard`).
"""

import functools
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import STDOUT, check_parent_directory, run_main
from jaxforge.commands.command_line import CommandParser, add_weights_option
from jaxforge.errors import UserError
from jaxforge.storage import urls


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate and print a table; return the exit code."""
    args, overrides = parser().parse(argv)
    for name, value in (("steps", args.steps), ("batch-size", args.batch_size)):
        if value is not None and value < 1:
            raise UserError(f"--{name} {value}: must be at least 1")
    if args.json and args.json != STDOUT:
        urls.local(args.json, "--json", "copy the file there afterwards")
    check_parent_directory("--json", args.json)
    from jaxforge.inference import evaluation  # imported here, because JAX takes a second

    return evaluation.run(args, overrides)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "evaluate",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN [options] [--section.key=value ...]",
        description="Compute loss, perplexity and bits per byte of a trained model.",
        epilog="Settings of the run's config, such as --distributed.tp=2, are accepted.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--step", type=int, help="checkpoint to evaluate (default: the newest)")
    add_weights_option(parser)
    add("--set", metavar="NAME=DIR", action="append", default=[],
        help="directory of token shards, or a pattern such as DIR/*.bin; repeatable "
        "(default: the run's [eval])")  # fmt: skip
    add("--steps", type=int, help="batches per set (default: all)")
    add("--batch-size", type=int, help="sequences per batch, over all devices (default: the run's)")
    add("--json", metavar="FILE", type=Path, help='also write the result as JSON; "-" for stdout')
    return parser


entry = functools.partial(run_main, main, uses_devices=True)
