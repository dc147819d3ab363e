"""Built-in mixers, one file each: importing a module of this package registers its mixer."""

import functools
import importlib
import pkgutil

from jaxforge.config.model import MIXERS, ModelConfig, mixer_names
from jaxforge.model.linear import parameter_shapes
from jaxforge.model.mixer import Mixer
from jaxforge.model.mixers.combined import CombinedMixers
from jaxforge.model.mixers.shared_attention import CLASSES


def discover() -> None:
    """Import all modules of this package, which register their mixers."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")


discover()


def mixer_class(name: str) -> type[Mixer]:
    """Return the class of a name in `model.mixer_pattern`.

    Raises:
        UserError: the name, or a name that it joins, is not registered.
    """
    if name in CLASSES:
        return CLASSES[name]
    # A class is its own builder.
    parts: dict[str, type[Mixer]] = {each: MIXERS[each] for each in mixer_names(name)}  # type: ignore[misc]
    return parts[name] if name in parts else CombinedMixers.of(parts)


def mixer_shapes(config: ModelConfig, mixer: str) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a mixer's parameters in one layer, by name."""
    return parameter_shapes(functools.partial(mixer_class(mixer), config))
