"""`jaxforge COMMAND ...`: all commands behind one name; `python -m jaxforge.COMMAND` as well.

A command's module is imported when it is asked for, and JAX when its command line has been read.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jaxforge
from jaxforge import completion, near
from jaxforge.cli import run_main
from jaxforge.errors import UserError


class Command(NamedTuple):
    """A command.

    Attributes:
        module: whose `entry` it is.
        about: one line.
        is_subcommand: whether its name goes on to the module, which has several.
    """

    module: str
    about: str
    is_subcommand: bool = False


_TORCH = "torch_compat.__main__"
COMMANDS = {
    "prepare": Command("jaxforge.prepare", "text, or conversations, into token shards"),
    "init": Command("jaxforge.init", "a complete config of a known size, to start with"),
    "train": Command("jaxforge.train", "train, or go on training; --help lists every key"),
    "supervise": Command("jaxforge.supervise", "run a command again when it fails"),
    "sweep": Command("jaxforge.sweep.__main__", "a grid of settings, or a ladder of sizes"),
    "plan": Command("jaxforge.plan.__main__", "what a run needs, on machines that are not here"),
    "report": Command("jaxforge.report.__main__", "the curves of runs as one HTML page"),
    "replay": Command("jaxforge.replay.__main__", "a step of a run again: what happened in it"),
    "activations": Command("jaxforge.activations", "what a model computes on its way, in files"),
    "evaluate": Command("jaxforge.evaluate", "loss, perplexity and bits per byte"),
    "generate": Command("jaxforge.generate", "continue prompts, or converse"),
    "lm_eval": Command("jaxforge.lm_eval.__main__", "tasks of EleutherAI's lm_eval"),
    "capsule": Command("jaxforge.capsule.__main__", "what a run is made of, in one file"),
    "import": Command(_TORCH, "a PyTorch or Hugging Face checkpoint becomes a run", True),
    "export": Command(_TORCH, "a run becomes a PyTorch or Hugging Face checkpoint", True),
    "inspect": Command(_TORCH, "what a checkpoint of any format holds", True),
    "verify": Command(_TORCH, "whether two checkpoints are the same, and where not", True),
    "lockstep": Command(_TORCH, "a torch model beside ours: what differs first", True),
    "pipeline": Command("jaxforge.pipeline.__main__", "draw a pipeline's schedule"),
    "doctor": Command("jaxforge.doctor", "what is installed, which devices, what is wrong"),
    "completion": Command("jaxforge.completion", "make a shell complete all of this"),
}
"""By name, in the order of a run's life."""


def main(argv: Sequence[str] | None = None) -> int:
    """Hands the command line over to the command that it begins with."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["help"]:  # as git has it: `help train` is `train --help`
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    if arguments[0] in ("version", "--version"):
        print(f"jaxforge {jaxforge.__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        hint = near.hint(name, COMMANDS, quote="") or ";"
        raise UserError(f"there is no command {name}{hint} `jaxforge --help` lists them")
    command = COMMANDS[name]
    sys.argv = ["jaxforge", *arguments[0 if command.is_subcommand else 1 :]]
    return importlib.import_module(command.module).entry()


def entry() -> int:
    """The command as this process was called; its exit code."""
    if "_ARGCOMPLETE" in os.environ:  # a shell asks what may follow
        completion.answer(COMMANDS)
    return run_main(main)


def _help() -> str:
    width = max(map(len, COMMANDS))
    rows = (f"  {name:{width}}  {command.about}" for name, command in COMMANDS.items())
    return "\n".join(
        ("usage: jaxforge COMMAND ...", "", *rows, "", "jaxforge COMMAND --help tells more.")
    )


if __name__ == "__main__":
    raise SystemExit(entry())
