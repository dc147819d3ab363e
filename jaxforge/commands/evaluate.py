"""`python -m jaxforge.evaluate RUN [--set NAME=DIR ...]`: loss, perplexity and bits per byte.

RUN is a run directory, or one of its checkpoints (`RUN/checkpoints/step_100`). The sets are those
of the run's `[eval]` unless `--set` gives others. Settings such as `--distributed.tp=2` lay the
model out over several devices; by default all take part (`dp_shard`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from jaxforge.cli.running import STDOUT, check_place, run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.errors import UserError
from jaxforge.storage import urls


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates, prints a table, writes JSON."""
    args, overrides = parser().parse(argv)
    _check(args)
    from jaxforge.inference import evaluation  # here, as JAX and all that needs it take a second

    return evaluation.run(args, overrides)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "evaluate",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN [options] [--section.key=value ...]",
        description="Loss, perplexity and bits per byte of a trained model.",
        epilog="Settings of the run's config, such as --distributed.tp=2, may follow.",
    )
    add = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--step", type=int, help="the checkpoint to evaluate (default: the newest)")
    add("--set", metavar="NAME=DIR", action="append", default=[],
        help="a directory of token shards, or a pattern such as DIR/*.bin; repeatable "
        "(default: the run's [eval])")  # fmt: skip
    add("--steps", type=int, help="batches of each set (default: all)")
    add("--batch-size", type=int, help="sequences per batch, over all devices (default: the run's)")
    add("--json", metavar="FILE", type=Path, help='also write JSON; "-" to stdout')
    return parser


def _check(args: argparse.Namespace) -> None:
    for name, value in (("steps", args.steps), ("batch-size", args.batch_size)):
        if value is not None and value < 1:
            raise UserError(f"--{name}: expected 1 or more")
    if args.json and args.json != STDOUT:
        urls.local(args.json, "--json", "copy it there afterwards")
    check_place("--json", args.json)


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
