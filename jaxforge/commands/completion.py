"""`jaxforge completion bash|zsh|fish`: print the shell completion of commands, options and keys."""

import argparse
import functools
import importlib
import os
from collections.abc import Mapping, Sequence

from jaxforge.cli.running import run_main
from jaxforge.commands import Command
from jaxforge.commands.command_line import CommandParser

_ABOUT = """\
`jaxforge completion bash|zsh|fish`: print the shell completion of commands, options and keys.

eval "$(jaxforge completion bash)"       in ~/.bashrc; for zsh in ~/.zshrc
jaxforge completion fish | source        in ~/.config/fish/config.fish
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Print the completion script of a shell; return the exit code."""
    args = parser().parse_args(argv)
    import argcomplete

    print(argcomplete.shellcode(["jaxforge"], shell=args.shell))
    return 0


def parser() -> CommandParser:
    """Return the parser of the command line."""
    parser = CommandParser(
        "completion", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))
    return parser


def answer(commands: Mapping[str, Command]) -> None:
    """Print the completions that the shell requests in the environment, and end the process.

    Args:
        commands: commands by name.
    """
    import argcomplete

    line = os.environ["COMP_LINE"][: int(os.environ["COMP_POINT"])]
    words = line.split()
    typed = commands.get(words[1]) if len(words) > 1 and not line.endswith(words[1]) else None
    argcomplete.autocomplete(_parser(commands, typed, words), always_complete_options=False)


def _parser(
    commands: Mapping[str, Command], typed: Command | None, words: Sequence[str]
) -> argparse.ArgumentParser:
    """Return the parser of the whole program, with the options of the typed command."""
    options = importlib.import_module(typed.module).parser() if typed else None
    if options and any(word.startswith("--") for word in words[-2:]):
        options.add_settings()
    program = argparse.ArgumentParser(prog="jaxforge")
    subcommands = program.add_subparsers()
    for name, command in commands.items():
        parents = [options] if options and command is typed else []
        subcommands.add_parser(name, parents=parents, add_help=False, help=command.about)
    return program


entry = functools.partial(run_main, main)
