"""Commands of `jaxforge COMMAND`: a module each, with `main`, `parser` and `entry`."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of `jaxforge`.

    Attributes:
        module: module whose `entry` runs the command.
        about: one-line description.
    """

    module: str
    about: str


COMMANDS = {
    "prepare": Command("jaxforge.commands.prepare", "convert text to token shards"),
    "init": Command("jaxforge.commands.init", "write a config for a preset, a depth or a budget"),
    "train": Command("jaxforge.commands.train", "train or resume a run; --help lists all keys"),
    "supervise": Command(
        "jaxforge.commands.supervise", "run a command and restart it when it fails"
    ),
    "sweep": Command("jaxforge.commands.sweep", "train a grid of settings"),
    "plan": Command("jaxforge.commands.plan", "check a run for target hardware, and its cost"),
    "prove": Command("jaxforge.commands.prove", "prove that a config's mesh computes the same"),
    "report": Command("jaxforge.commands.report", "plot the metrics of runs as one HTML page"),
    "replay": Command("jaxforge.commands.replay", "repeat steps of a run and explain them"),
    "evaluate": Command("jaxforge.commands.evaluate", "compute loss, perplexity and bits per byte"),
    "generate": Command("jaxforge.commands.generate", "continue prompts, or chat with a model"),
    "lm_eval": Command("jaxforge.commands.lm_eval", "evaluate on tasks of EleutherAI's lm_eval"),
    "convert": Command(
        "torch_compat.commands.convert",
        "convert checkpoints between jaxforge, PyTorch and Hugging Face",
    ),
    "inspect": Command(
        "torch_compat.commands.inspect", "show the content of a checkpoint in any readable format"
    ),
    "verify": Command(
        "torch_compat.commands.verify", "compare two checkpoints, or a PyTorch model with jaxforge"
    ),
    "doctor": Command("jaxforge.commands.doctor", "check the installation and the devices"),
}
"""Commands by name, in the order of their use for a run."""
