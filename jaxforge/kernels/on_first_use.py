"""Kernels of other machines, imported when they run.

To import JAX's for GPUs and TPUs takes a while, and not every JAX has them all.
"""

import importlib
from collections.abc import Callable
from typing import Any


def on_first_use(module: str, name: str) -> Callable[..., Any]:
    """A function of a module of this package, which is imported when it is called."""

    def function(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 (those of what it stands for)
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*inputs, **options)

    return function
