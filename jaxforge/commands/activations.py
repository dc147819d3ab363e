"""`python -m jaxforge.activations RUN --output DIR`: what a model computes on its way, in files.

Of sequences of a set (`--set`, by default the run's `[eval]`) as a checkpoint sees them; or, with
`--step N`, of the very batch of a training step, before the step is made (docs/replay.md). For each
point (`config/points.py`) DIR gets a file that NumPy reads (`training/activation_files.py`), which
grows sequence by sequence; DIR is there when all of it is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.config.points import POINTS


def main(argv: Sequence[str] | None = None) -> int:
    """Captures, and says where."""
    args, overrides = parser().parse(argv)
    from jaxforge.tools.replay import captured_activations  # here, as JAX takes a second to import

    return captured_activations.run(args, overrides)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "activations",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN --output DIR [options] [--section.key=value ...]",
        description="Writes what a model computes on its way to files that NumPy reads.",
    )
    add: Callable[..., Any] = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--output", metavar="DIR", type=Path, required=True, help="a new directory")
    add("--points", default="residual", metavar="A,B",
        help=f"of {', '.join(POINTS)}; also patterns, as 'res*' (default: residual)")  # fmt: skip
    add("--layers", metavar="0,5", help="numbers of layers (default: all)")
    add("--sequences", default="64", metavar="N",
        help="at most so many, the first; or which: 10:20, or 3,17 (default: 64)")  # fmt: skip
    add("--step", type=int, metavar="N", help="the batch of this training step, before it is made")
    add("--set", metavar="NAME=DIR", action="append", default=[], help="token shards to read from")
    return parser


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
