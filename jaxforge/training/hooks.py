"""Your own code in the loop: subclass `Hook`, name it in `plugins.hooks` or pass it to `run`."""

import importlib

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.training.callbacks.callback import Callback, StepContext

__all__ = ["Hook", "StepContext", "named_callbacks", "named_hook"]

Hook = Callback
"""Name of `Callback` in code and configs that were written before callbacks had intervals."""


def named_hook(path: str) -> Callback:
    """Return a new instance of a class that `plugins.hooks` names.

    Args:
        path: such as "my_module.MyHook".

    Raises:
        UserError: the class is no subclass of `Hook`.
    """
    module, _, name = path.rpartition(".")
    hook = getattr(importlib.import_module(module), name)
    if not (isinstance(hook, type) and issubclass(hook, Callback)):
        raise UserError(f"plugins.hooks: {path} is no subclass of jaxforge.training.hooks.Hook")
    return hook()


def named_callbacks(config: JobConfig) -> list[Callback]:
    """Return the callbacks that `plugins.hooks` names.

    Raises:
        UserError: a name is not a class of callbacks.
    """
    return [named_hook(path) for path in config.plugins.hooks]
