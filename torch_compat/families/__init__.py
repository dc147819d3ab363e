"""Families of Hugging Face's transformers: `config.json` and parameter names.

Every module-level `Family` of a module of this package is a family: adding a file adds it.
"""

import importlib
import pkgutil

from torch_compat.families.family import Family

__all__ = ["FAMILIES", "Family"]


def discover() -> dict[str, Family]:
    """Return the families of all modules of this package by `model_type`.

    An export uses the first family that fits the model: usual families come first, then the order
    is that of modules by name and of definitions in a module.
    """
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [
        value
        for name in modules
        for value in vars(importlib.import_module(f"{__name__}.{name}")).values()
        if isinstance(value, Family)
    ]
    return {each.model_type: each for each in sorted(families, key=lambda each: not each.is_usual)}


FAMILIES = discover()
"""`model_type` of config.json -> family."""
