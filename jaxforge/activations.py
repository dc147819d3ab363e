"""`python -m jaxforge.activations RUN --output DIR`: what a model computes on its way, in files.

Of sequences of a set (`--set`, by default the run's `[eval]`) as a checkpoint sees them; or, with
`--step N`, of the very batch of a training step, before the step is made (docs/replay.md). For each
point (`model/capture.py`, and "logits") DIR gets a file that NumPy reads,

    <point>.npy     float32 [sequences, layers, tokens, dim]; logits [sequences, tokens, vocabulary]
    tokens.npy      int32 [sequences, tokens]

and `activations.json`, which says whose they are. Files grow batch by batch; DIR is there when all
of it is.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli import run_main
from jaxforge.command_line import CommandParser


def main(argv: Sequence[str] | None = None) -> int:
    """Captures, and says where."""
    args, overrides = parser().parse(argv)
    from jaxforge.replay import activations  # here, as JAX and all that needs it take two seconds

    return activations.run(args, overrides)


def parser() -> CommandParser:
    """Its options."""
    parser = CommandParser(
        "activations",
        takes_settings=True,
        usage="%(prog)s RUN --output DIR [options] [--section.key=value ...]",
        description="Writes what a model computes on its way to files that NumPy reads.",
    )
    add: Callable[..., Any] = parser.add_argument
    add("run", metavar="RUN", help="run directory, or one of its checkpoints")
    add("--output", metavar="DIR", type=Path, required=True, help="a new directory")
    add("--points", default="residual", metavar="A,B", help="of attention, mlp, residual, logits")
    add("--layers", metavar="0,5", help="numbers of layers (default: all)")
    add("--sequences", type=int, default=64, metavar="N", help="at most so many (default: 64)")
    add("--step", type=int, metavar="N", help="the batch of this training step, before it is made")
    add("--set", metavar="NAME=DIR", action="append", default=[], help="token shards to read from")
    return parser


def entry() -> int:
    """The command as this process was called; its exit code."""
    return run_main(main, uses_devices=True)


if __name__ == "__main__":
    raise SystemExit(entry())
