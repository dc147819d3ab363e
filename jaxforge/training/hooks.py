"""Callbacks of the user: subclass `Hook`, name it in `plugins.hooks` or pass it to `train`."""

import importlib

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.training.callbacks.callback import Callback, StepContext

__all__ = ["Hook", "StepContext", "named_callbacks", "named_hook"]

Hook = Callback
"""Earlier name of `Callback`, for existing code and configs."""


def named_hook(path: str) -> Callback:
    """Return a new instance of a class that `plugins.hooks` names.

    Args:
        path: module and class, such as "my_module.MyHook".

    Raises:
        UserError: the class is not a subclass of `Hook`.
    """
    module, _, name = path.rpartition(".")
    hook = getattr(importlib.import_module(module), name)
    if not (isinstance(hook, type) and issubclass(hook, Callback)):
        raise UserError(f"plugins.hooks: {path} is not a subclass of jaxforge.training.hooks.Hook")
    return hook()


def named_callbacks(config: JobConfig) -> list[Callback]:
    """Return the callbacks that `plugins.hooks` names.

    Raises:
        UserError: a name is not a class of callbacks.
    """
    return [named_hook(path) for path in config.plugins.hooks]
