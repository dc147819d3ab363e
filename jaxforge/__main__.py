"""`jaxforge COMMAND ...`: entry point of all commands.

The module of a command is imported on use, and JAX after the command line has been parsed.
"""

import importlib
import os
import sys
from collections.abc import Sequence

import jaxforge
from jaxforge.cli import suggestions
from jaxforge.cli.running import run_main
from jaxforge.commands import COMMANDS, completion
from jaxforge.errors import UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:  # like git: `help train` is `train --help`
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("--version", "-V", "version"):
        print(f"jaxforge {jaxforge.__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        hint = suggestions.hint(name, COMMANDS, quote="") or ";"
        if name.startswith("-"):
            raise UserError(
                f"a command is required before {name}: `jaxforge --help` lists the commands"
            )
        raise UserError(f"unknown command {name}{hint} `jaxforge --help` lists the commands")
    command = COMMANDS[name]
    sys.argv = ["jaxforge", *arguments[0 if command.is_subcommand else 1 :]]
    return importlib.import_module(command.module).entry()


def entry() -> int:
    """Run the command of this process; return its exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell requests completions
        completion.answer(COMMANDS)
    return run_main(main)


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = (f"  {name:{width}}  {command.about}" for name, command in COMMANDS.items())
    return "\n".join(
        (
            "usage: jaxforge COMMAND ...",
            "",
            *rows,
            "",
            "jaxforge COMMAND --help shows the options of a command.",
        )
    )


if __name__ == "__main__":
    raise SystemExit(entry())
