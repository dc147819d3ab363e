"""Built-in mixers, one file each: importing a module of this package registers its mixer."""

import importlib
import pkgutil

from jaxforge.config.model import MIXERS
from jaxforge.model.mixer import Mixer


def discover() -> None:
    """Import all modules of this package, which register their mixers."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


discover()


def mixer_class(name: str) -> type[Mixer]:
    """Return the mixer that is registered as a name of `model.mixer_pattern`.

    Raises:
        UserError: the name is not registered.
    """
    mixer: type[Mixer] = MIXERS[name]  # type: ignore[assignment]  # a class is its own builder
    return mixer
