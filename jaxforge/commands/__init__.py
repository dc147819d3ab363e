"""Commands of `jaxforge COMMAND` and `python -m jaxforge.COMMAND`, a module each."""

from typing import NamedTuple


class Command(NamedTuple):
    """A command of `jaxforge`.

    Attributes:
        module: module whose `entry` runs the command.
        about: one-line description.
        is_subcommand: whether the module has several commands and gets the name as an argument.
    """

    module: str
    about: str
    is_subcommand: bool = False


_TORCH = "torch_compat.__main__"
COMMANDS = {
    "prepare": Command(
        "jaxforge.commands.prepare", "convert text or conversations to token shards"
    ),
    "init": Command("jaxforge.commands.init", "write a config for a preset, a depth or a budget"),
    "train": Command("jaxforge.commands.train", "train or resume a run; --help lists all keys"),
    "supervise": Command(
        "jaxforge.commands.supervise", "run a command and restart it when it fails"
    ),
    "sweep": Command("jaxforge.commands.sweep", "train a grid of settings or a ladder of sizes"),
    "plan": Command("jaxforge.commands.plan", "check a run for target hardware, and its cost"),
    "report": Command("jaxforge.commands.report", "plot the metrics of runs as one HTML page"),
    "replay": Command("jaxforge.commands.replay", "repeat steps of a run and explain them"),
    "activations": Command(
        "jaxforge.commands.activations", "save the activations of a model to files"
    ),
    "teacher_logits": Command(
        "jaxforge.commands.teacher_logits", "save the logits of a teacher for a distillation"
    ),
    "evaluate": Command("jaxforge.commands.evaluate", "compute loss, perplexity and bits per byte"),
    "generate": Command("jaxforge.commands.generate", "continue prompts, or chat with a model"),
    "lm_eval": Command("jaxforge.commands.lm_eval", "evaluate on tasks of EleutherAI's lm_eval"),
    "capsule": Command("jaxforge.commands.capsule", "pack the description of a run into one file"),
    "convert": Command(_TORCH, "convert a checkpoint between formats", True),
    "import": Command(_TORCH, "make a run from a PyTorch or Hugging Face checkpoint", True),
    "export": Command(_TORCH, "write a run as PyTorch or Hugging Face checkpoint", True),
    "average": Command(_TORCH, "average the weights of several checkpoints", True),
    "inspect": Command(_TORCH, "show the content of a checkpoint in any readable format", True),
    "verify": Command(_TORCH, "compare two checkpoints", True),
    "lockstep": Command(_TORCH, "compare a PyTorch model with jaxforge layer by layer", True),
    "pipeline": Command("jaxforge.commands.pipeline", "draw a pipeline schedule"),
    "doctor": Command("jaxforge.commands.doctor", "check the installation and the devices"),
    "completion": Command("jaxforge.commands.completion", "print the shell completion"),
}
"""Commands by name, in the order of their use for a run."""
