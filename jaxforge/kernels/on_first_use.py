"""Lazy import of kernels for specific platforms.

Importing JAX's kernels for GPUs and TPUs takes time, and not every version of JAX has all of them.
"""

import importlib
from collections.abc import Callable
from typing import Any


def on_first_use(module: str, name: str) -> Callable[..., Any]:
    """Return a function that imports a module of this package when it is first called.

    Args:
        module: name of the module within `jaxforge.kernels`.
        name: name of the function in the module.
    """

    def function(*inputs: Any, **options: Any) -> Any:  # noqa: ANN401 (types of the kernel)
        return getattr(importlib.import_module(f"{__package__}.{module}"), name)(*inputs, **options)

    return function
