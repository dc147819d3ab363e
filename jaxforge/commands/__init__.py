"""The commands of `jaxforge COMMAND` and `python -m jaxforge.COMMAND`: a module for each."""

from typing import NamedTuple


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
    "prepare": Command("jaxforge.commands.prepare", "text, or conversations, into token shards"),
    "init": Command("jaxforge.commands.init", "a complete config of a known size, to start with"),
    "train": Command("jaxforge.commands.train", "train, or go on training; --help lists every key"),
    "supervise": Command("jaxforge.commands.supervise", "run a command again when it fails"),
    "sweep": Command("jaxforge.commands.sweep", "a grid of settings, or a ladder of sizes"),
    "plan": Command("jaxforge.commands.plan", "what a run needs, on machines that are not here"),
    "report": Command("jaxforge.commands.report", "the curves of runs as one HTML page"),
    "replay": Command("jaxforge.commands.replay", "a step of a run again: what happened in it"),
    "activations": Command(
        "jaxforge.commands.activations", "what a model computes on its way, in files"
    ),
    "evaluate": Command("jaxforge.commands.evaluate", "loss, perplexity and bits per byte"),
    "generate": Command("jaxforge.commands.generate", "continue prompts, or converse"),
    "lm_eval": Command("jaxforge.commands.lm_eval", "tasks of EleutherAI's lm_eval"),
    "capsule": Command("jaxforge.commands.capsule", "what a run is made of, in one file"),
    "convert": Command(_TORCH, "a checkpoint of any format in any other", True),
    "import": Command(_TORCH, "a PyTorch or Hugging Face checkpoint becomes a run", True),
    "export": Command(_TORCH, "a run becomes a PyTorch or Hugging Face checkpoint", True),
    "inspect": Command(_TORCH, "what a checkpoint of any format holds", True),
    "verify": Command(_TORCH, "whether two checkpoints are the same, and where not", True),
    "lockstep": Command(_TORCH, "a torch model beside ours: what differs first", True),
    "pipeline": Command("jaxforge.commands.pipeline", "draw a pipeline's schedule"),
    "doctor": Command(
        "jaxforge.commands.doctor", "what is installed, which devices, what is wrong"
    ),
    "completion": Command("jaxforge.commands.completion", "make a shell complete all of this"),
}
"""Commands by name, in the order of a run's life."""
