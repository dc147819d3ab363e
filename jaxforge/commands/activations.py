"""`python -m jaxforge.activations RUN --output DIR`: save the activations of a model to files.

The inputs are sequences of an evaluation set (`--set`, by default the run's `[eval]`). With `--step
N` they are the batch of that training step, before its update (docs/replay.md). For each point
(`config/points.py`), DIR gets a NumPy file (`training/activation_files.py`). DIR appears when it is
complete.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser
from jaxforge.config.points import POINTS


def main(argv: Sequence[str] | None = None) -> int:
    """Save activations and print their location; return the exit code."""
    args, overrides = parser().parse(argv)
    from jaxforge.tools.replay import captured_activations  # JAX takes a second to import

    return captured_activations.run(args, overrides)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "activations",
        takes_settings=True,
        uses_runs=True,
        usage="%(prog)s RUN --output DIR [options] [--section.key=value ...]",
        description="Save the activations of a model to NumPy files.",
    )
    add: Callable[..., Any] = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--output", metavar="DIR", type=Path, required=True, help="new directory")
    add("--points", default="residual", metavar="A,B",
        help=f"of {', '.join(POINTS)}; or patterns such as 'res*' (default: residual)")  # fmt: skip
    add("--layers", metavar="0,5", help="layer indices (default: all)")
    add("--sequences", default="64", metavar="N",
        help="number of sequences, a range 10:20, or indices 3,17 (default: 64)")  # fmt: skip
    add(
        "--step",
        type=int,
        metavar="N",
        help="use the batch of this training step, before its update",
    )
    add("--set", metavar="NAME=DIR", action="append", default=[], help="token shards to read")
    return parser


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main, uses_devices=True, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
