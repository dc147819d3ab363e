"""Pre-training of decoder language models in JAX, with the semantics of PyTorch training loops."""

import os
import sys
from types import ModuleType

# Only modules that `python -m` has already loaded: see `_leave_working_directory`.

TYPE_CHECKING = False
if TYPE_CHECKING:
    from jaxforge.aux_outputs import AuxOutputs as AuxOutputs
    from jaxforge.config.reading.load import load_config as load_config
    from jaxforge.data.sources import register_dataset as register_dataset
    from jaxforge.inference.run import Run as Run
    from jaxforge.model.mixer import Mixer as Mixer
    from jaxforge.model.mixer import register_mixer as register_mixer
    from jaxforge.model.transformer import register_model as register_model
    from jaxforge.optim.optimizer import register_optimizer as register_optimizer
    from jaxforge.optim.schedule import register_scheduler as register_scheduler
    from jaxforge.program import Program as Program
    from jaxforge.step.losses import register_loss as register_loss
    from jaxforge.training.callbacks.callback import Callback as Callback
    from jaxforge.training.eval_functions import register_eval_function as register_eval_function
    from jaxforge.training.launch import train as train

__version__ = "0.1.0"  # pyproject.toml reads it here


def _leave_working_directory() -> None:
    """Remove the working directory from `sys.path`, where `python -m` puts it first.

    A command may run inside an untrusted run directory, in which any file could shadow a module of
    a library. The directory is not removed if this package is imported from it.
    """
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    module = sys.orig_argv[-len(sys.argv)].rpartition("-m")[2]  # `-m NAME`, or `-mNAME`
    is_ours = module.partition(".")[0] in ("jaxforge", "torch_compat")
    if is_ours and sys.path[:1] in ([""], [os.getcwd()]) and os.getcwd() != home:
        del sys.path[0]


def _end_at_interrupt() -> None:
    """Let Ctrl-C end a command immediately, with the default action of the system.

    Commands can be ended at any time without loss. Python's default handler raises an exception
    inside some library, which not all libraries survive, and not while compiled code runs.
    `training.preemption` and `cli.run_main` install other handlers.
    """
    import signal  # here, because the working directory is no longer on the path

    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


# `python -m jaxforge.NAME` runs the command NAME, in `commands/NAME.py`.
__path__.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "commands"))
if sys.argv[:1] == ["-m"]:  # a command, which Python has not imported yet
    _leave_working_directory()
if sys.argv[:1] == ["-m"] or os.path.basename("".join(sys.argv[:1])) == "jaxforge":
    _end_at_interrupt()


_PUBLIC = {
    "AuxOutputs": "jaxforge.aux_outputs",
    "Callback": "jaxforge.training.callbacks.callback",
    "Mixer": "jaxforge.model.mixer",
    "Program": "jaxforge.program",
    "Run": "jaxforge.inference.run",
    "load_config": "jaxforge.config.reading.load",
    "register_dataset": "jaxforge.data.sources",
    "register_eval_function": "jaxforge.training.eval_functions",
    "register_loss": "jaxforge.step.losses",
    "register_mixer": "jaxforge.model.mixer",
    "register_model": "jaxforge.model.transformer",
    "register_optimizer": "jaxforge.optim.optimizer",
    "register_scheduler": "jaxforge.optim.schedule",
    "train": "jaxforge.training.launch",
}
"""The module of each public name. Modules are imported on first use, since JAX takes seconds."""
__all__ = list(_PUBLIC)


class _Package(ModuleType):
    """This package, in which the modules of commands do not hide public names.

    Python makes every imported submodule an attribute of its package, so `import jaxforge.train`
    (the command's module) would replace the function `jaxforge.train`.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _PUBLIC and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> object:
    """Import a public name on first use."""
    if name in _PUBLIC:
        from importlib import import_module

        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'jaxforge' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names."""
    return [*__all__, "__version__"]
