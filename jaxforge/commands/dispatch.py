"""`jaxforge COMMAND ...`: choice of the command.

The module of a command is imported on use, and JAX after the command line has been parsed.
"""

import importlib
import sys
from collections.abc import Sequence

import jaxforge
from jaxforge.cli import suggestions
from jaxforge.cli.running import run_main
from jaxforge.commands import COMMANDS
from jaxforge.errors import UserError


def entry() -> int:
    """Run the command of this process; return its exit code."""
    return run_main(main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that the first argument names; return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:  # like git: `help train` is `train --help`
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    name, *options = arguments
    if name in ("--version", "-V", "version"):
        print(f"jaxforge {jaxforge.__version__}")
        return 0
    if name not in COMMANDS:
        raise UserError(_problem_of(name))
    # Entry points of commands parse the arguments of the process.
    sys.argv = ["jaxforge", *options]
    return run_command(name)


def run_command(name: str) -> int:
    """Run a command with the arguments of this process; return its exit code."""
    return importlib.import_module(COMMANDS[name].module).entry()


def _problem_of(name: str) -> str:
    if name.startswith("-"):
        return f"a command is required before {name}: `jaxforge --help` lists the commands"
    hint = suggestions.hint(name, COMMANDS, quote="") or ";"
    return f"unknown command {name}{hint} `jaxforge --help` lists the commands"


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
