"""Location of the model among the keys of a state dict, and the dialect of its names."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch_compat.checkpoint.name_maps import NAME_MAPS, name_map
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import NameMap, detect_dialect
from torch_compat.names.translation import summarize_names

PREFIXES = (
    "state_dict.model.", "state.model.model.", "state.model.", "model_state_dict.", "app.model.",
    "model.model.", "state_dict.", "model.", "module.",
)  # fmt: skip
"""What stands before a model's keys: AppState and Lightning, Composer, tutorials, KempnerForge,
MindSpeed's engine. torchtitan has nothing."""


class ModelKeys(NamedTuple):
    """The model of a state dict.

    Attributes:
        dialect: whose names it has; None if no dialect knows them.
        params: its keys without the prefix -> tensor.
        prefix: what stood before its keys.
        left_out: keys that are outside the model.
    """

    dialect: NameMap | None
    params: dict[str, LazyTensor]
    prefix: str = ""
    left_out: tuple[str, ...] = ()

    def owner(self, key: str) -> str:
        """Return the parameter of an optimizer's key, which may have parts of the prefix."""
        tails = (part for part in _tails(self.prefix) if key.startswith(part))
        return next(
            (name for part in tails if (name := key.removeprefix(part)) in self.params), key
        )


def find_model(tensors: Mapping[str, LazyTensor], name: str | None = None) -> ModelKeys:
    """Find the model among tensors.

    If no prefix is before all keys, those with the prefix of a model are the model, or else those
    with a dot in them: trainers keep counters and random states at the root.

    Args:
        tensors: key without wrappers -> tensor.
        name: the dialect; None finds it.
    """
    candidates = [name_map(name)] if name else list(NAME_MAPS.values())
    for prefix in ("", *PREFIXES):
        if tensors and all(key.startswith(prefix) for key in tensors):
            location = _below(tensors, prefix, candidates)
            if location.dialect:
                return location
    for prefix in PREFIXES:
        location = _below(tensors, prefix, candidates)
        if location.dialect:
            return location
    dotted = {key: tensor for key, tensor in tensors.items() if "." in key}
    if dialect := detect_dialect(list(dotted), candidates):
        return ModelKeys(dialect, dotted, "", tuple(key for key in tensors if key not in dotted))
    return ModelKeys(name_map(name) if name else None, dict(tensors))


def _below(tensors: Mapping[str, LazyTensor], prefix: str, candidates: list[NameMap]) -> ModelKeys:
    """The model below a prefix, with a dialect if one of the candidates knows all of its keys."""
    params = {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }
    others = tuple(key for key in tensors if not key.startswith(prefix))
    return ModelKeys(detect_dialect(list(params), candidates), params, prefix, others)


def _tails(prefix: str) -> Iterator[str]:
    """Parts of a prefix that an optimizer's keys may have: none, all, the last ones."""
    yield ""
    while prefix:
        yield prefix
        prefix = prefix.partition(".")[2]


def unknown(tensors: Mapping[str, LazyTensor], where: str) -> str:
    """Return the message for names that no dialect knows."""
    if not tensors:
        return f"{where}: it holds no model: no tensor outside optimizer state"

    def is_known(dialect: NameMap, key: str) -> bool:
        return any(dialect.knows(key.removeprefix(prefix)) for prefix in ("", *PREFIXES))

    nearest = max(NAME_MAPS.values(), key=lambda item: sum(is_known(item, key) for key in tensors))
    strange = [key for key in tensors if not is_known(nearest, key)]
    return (
        f"{where}: these names are none of {', '.join(NAME_MAPS)}; nearest is {nearest.name}, "
        f"which does not know {summarize_names(strange or tensors)}"
    )
