"""`python -m jaxforge.teacher_logits --config FILE --output DIR`: save the logits of a teacher.

FILE is the config of a distillation. The teacher runs once over each sequence of its training data,
and DIR gets the `distillation.top_k` largest logits of each token. A run with
`distillation.logits = DIR` reads them, so that it needs no teacher.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jaxforge.cli.running import run_main
from jaxforge.commands.command_line import CommandParser, positive_int
from jaxforge.storage import trust


def main(argv: Sequence[str] | None = None) -> int:
    """Save the logits; return the exit code."""
    args, overrides = parser().parse(argv)
    trust.use_working_directory()
    from jaxforge.tools import save_teacher_logits  # JAX takes a second to import

    return save_teacher_logits.run(args, overrides)


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "teacher_logits",
        takes_settings=True,
        usage="%(prog)s --config FILE --output DIR [options] [--section.key=value ...]",
        description="Save the largest logits of a teacher for the training data of a distillation.",
    )
    add: Callable[..., Any] = parser.add_argument
    add("--config", required=True, metavar="FILE", help="config of the distillation (TOML)")
    add("--output", required=True, metavar="DIR", type=Path, help="new directory")
    add("--dtype", choices=("float32", "float16"), default="float32",
        help="dtype of the logits (default: float32, as a teacher in memory has them)")  # fmt: skip
    add("--sequences-per-file", type=positive_int, metavar="N",
        help="sequences in a file; a killed command repeats at most one file (default: as many as "
        "take 256 MB)")  # fmt: skip
    add("--overwrite", action="store_true", help="replace logits in DIR")
    return parser


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main, uses_devices=True, outlives_reader=True)


if __name__ == "__main__":
    raise SystemExit(entry())
