"""Locations in a torch module of the values that `model.capture` names.

They follow from the names of the parameters:

    embed               input of layer 0
    layers.N.*_norm     output of the module that owns the norm's weight
    layers.N.attention  output of the common parent of its parameters, or of its post-norm
    after_attention     input of the norm before the feed-forward
    layers.N.residual   output of layer N
"""

import dataclasses
import re
from collections.abc import Collection, Iterable

from jaxforge.config.model import ModelConfig
from torch_compat.checkpoint.stacking import layer_of
from torch_compat.names.table import NameMap, strip_wrappers

_NORM = "norm.weight"


@dataclasses.dataclass(frozen=True)
class ModuleLocation:
    """Location of a value in a torch module.

    Attributes:
        point: name of the value: "embed", "layers.3.attention", ..., "final_norm".
        module: path of the module, without wrappers.
        is_input: whether the value is the input of the module instead of its output.
        factor: jaxforge's value divided by the module's: a multiplier that the torch model applies
            elsewhere.
    """

    point: str
    module: str
    is_input: bool = False
    factor: float = 1.0


def locations(
    entries: Collection[str], dialect: NameMap, model: ModelConfig, modules: Collection[str]
) -> list[ModuleLocation]:
    """Return the locations of values in the module; values without a module are left out.

    Args:
        entries: names of jaxforge's parameters.
        dialect: dialect of the module's names.
        model: the `[model]` section.
        modules: paths of the submodules.
    """
    keys = {name: key for name in entries if (key := dialect.find_key(name)) is not None}
    locations = [ModuleLocation("embed", _layer(keys, 0), is_input=True)]
    for i in range(model.n_layers):
        locations += _layer_locations(keys, i, model)
    # jaxforge divides the logits, so that its final norm equals the module's.
    scale = 1 / model.logits_scaling
    locations.append(ModuleLocation("final_norm", _owner(keys.get(_NORM, "")), factor=scale))
    locations = [_in_memory(location, modules) for location in locations]
    return [location for location in locations if location.module in modules]


def _in_memory(location: ModuleLocation, modules: Collection[str]) -> ModuleLocation:
    """Return the location of experts whose module names differ from file names, as in Mixtral."""
    if location.module in modules or not location.point.endswith(".mlp"):
        return location
    return dataclasses.replace(location, module=f"{_owner(location.module)}.mlp")


def _layer_locations(keys: dict[str, str], i: int, model: ModelConfig) -> list[ModuleLocation]:
    at, times = f"layers.{i}", model.residual_multiplier
    norms = {part: keys.get(f"{at}.{part}_norm.weight") for part in ("shared", "attention", "mlp")}
    mixer = _part(keys, f"{at}.attention", model.layer_parts[i].mixer)
    locations = [ModuleLocation(f"{at}.attention", mixer, factor=times)]
    # With parallel residuals, the input of this norm is that of the layer.
    if norms["mlp"] is not None and not model.parallel_residual:
        locations.append(
            ModuleLocation(f"{at}.after_attention", _owner(norms["mlp"]), is_input=True)
        )
    locations += [
        ModuleLocation(f"{at}.{part}_norm", _owner(key)) for part, key in norms.items() if key
    ]
    locations.append(ModuleLocation(f"{at}.mlp", _part(keys, f"{at}.mlp", "mlp"), factor=times))
    locations.append(ModuleLocation(f"{at}.residual", _layer(keys, i)))
    return locations


def _part(keys: dict[str, str], part: str, name: str) -> str:
    """Return the module of a mixer or feed-forward, or of the norm after it.

    Args:
        keys: jaxforge's names -> keys of the dialect.
        part: the part as in names of norms, such as "layers.3.attention".
        name: name of the part in the names of its parameters, such as "mamba2".
    """
    if (after := keys.get(f"{part}_post_norm.weight")) is not None:
        return _owner(after)
    beginning = f"{part.rpartition('.')[0]}.{name}."
    return _common(key for name, key in keys.items() if name.startswith(beginning))


def _layer(keys: dict[str, str], i: int) -> str:
    return _common(key for name, key in keys.items() if layer_of(name) == i)


def _common(keys: Iterable[str]) -> str:
    """Return the longest common path of the modules that own parameters."""
    paths = [_owner(key).split(".") for key in keys]
    prefix = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        prefix.append(parts[0])
    return ".".join(prefix)


def _owner(key: str) -> str:
    return key.rpartition(".")[0]


def modules_by_path(named: Iterable[tuple[str, object]]) -> dict[str, object]:
    """Return modules by their paths without wrappers; a wrapper takes the path of its content."""
    locations: dict[str, object] = {}
    for name, module in named:
        locations.setdefault(strip_wrappers(name), module)
    return locations


def layer_number(point: str) -> int | None:
    """Return the layer of a point, or None."""
    match = re.match(r"layers\.(\d+)\.", point)
    return int(match[1]) if match else None
