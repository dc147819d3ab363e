"""`python -m jaxforge.train --config FILE [--section.key=value ...]`: trains, or goes on training.

A run is one directory, `checkpoint.dir`: `config.toml` (resolved), `metrics.jsonl`, `logs/`,
`tokenizer/`, `checkpoints/`. The same command on the same directory resumes from its newest
checkpoint. `--help` lists every key, `exit_codes` the exit codes.
"""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, NoReturn

from jaxforge.cli import leave, run_main, wide_console
from jaxforge.config.job import JobConfig
from jaxforge.config.reading import help, load
from jaxforge.config.reading.unresolved import UnresolvedConfig
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit

if TYPE_CHECKING:
    from jaxforge.training.hooks import Hook


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, returns the exit code."""
    config = parse_command_line(sys.argv[1:] if argv is None else argv)
    return 0 if config is None else run(config).code


def parse_command_line(argv: Sequence[str]) -> UnresolvedConfig | None:
    """`--config FILE` (or `--config=FILE`) and overrides; None when it was only `--help`."""
    if {"-h", "--help"} & set(argv):
        print(f"{__doc__}\n")
        help.print_help(wide_console())
        return None
    arguments, path = list(argv), None
    for i, argument in enumerate(arguments):
        if argument == "--config" and i + 1 < len(arguments):
            path, arguments[i : i + 2] = arguments[i + 1], []
            break
        if argument.startswith("--config="):
            path = arguments.pop(i).removeprefix("--config=")
            break
    if path is None:
        raise UserError("say what to train: --config FILE (configs/quickstart.toml is an example)")
    return load.load_unresolved(path, arguments)


def run(config: JobConfig | UnresolvedConfig, hooks: "Sequence[Hook]" = ()) -> Exit:
    """Trains from the newest checkpoint of the run directory, or from the start.

    Args:
        config: as read; lengths in epochs or tokens are turned into updates here.
        hooks: your own code, called in order at each event.
    """
    from jaxforge import launch  # here, as JAX and all that needs it take two seconds

    return launch.run(config, hooks)


def entry() -> NoReturn:
    """The command as this process was called."""
    leave(run_main(main, uses_devices=True))


if __name__ == "__main__":
    entry()
