"""Kernels of other platforms, imported when they are called.

JAX's kernels for GPUs and TPUs take time to import, and not every version of JAX has all of them.
"""

import importlib
from collections.abc import Callable
from typing import Any


def on_first_use(module: str, name: str) -> Callable[..., Any]:
    """Return a function of a module of this package that is imported at the first call."""

    def function(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 (as the function)
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*inputs, **options)

    return function
