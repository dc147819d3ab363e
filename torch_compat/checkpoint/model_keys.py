"""Location of the model among the keys of a state dict, and the dialect of its names."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from torch_compat.checkpoint.name_maps import NAME_MAPS, name_map
from torch_compat.formats.lazy import LazyTensor
from torch_compat.names.table import NameMap, detect_dialect
from torch_compat.names.translation import summarize_names

PREFIXES = (
    "state_dict.model.", "state.model.model.", "state.model.", "model_state_dict.", "app.model.",
    "model.model.", "state_dict.", "model.", "module.",
)  # fmt: skip
"""Prefixes of a model's keys in AppState and Lightning, Composer, tutorials, KempnerForge and
MindSpeed's engine. torchtitan has none."""


_MAX_WRAPPERS = 4  # modules around a model whose names are removed


class DcpKeys(NamedTuple):
    """Keys of a checkpoint by purpose.

    Attributes:
        dialect: dialect of the parameter names; None if unknown.
        params: parameter name without wrappers and prefixes -> tensor.
        state: parameter name -> field -> tensor or number.
        groups: main settings of each parameter group.
        unassigned: all other keys.
        left_out: keys in `unassigned` of tensors outside the model.
        masters: parameter name -> the float32 copy that the optimizer updates, if the model's own
            parameters are rounded.
        unmapped: reason why optimizer state cannot be assigned to parameters; "" if it can.
    """

    dialect: NameMap | None
    params: dict[str, LazyTensor]
    state: dict[str, dict[str, Any]]
    groups: list[dict[str, Any]]
    unassigned: list[str]
    left_out: tuple[str, ...] = ()
    masters: Mapping[str, LazyTensor] = MappingProxyType({})
    unmapped: str = ""


class ModelKeys(NamedTuple):
    """Model of a state dict.

    Attributes:
        dialect: dialect of the names; None if no dialect knows them.
        params: key without prefix -> tensor.
        prefix: prefix of the keys.
        left_out: keys outside the model.
    """

    dialect: NameMap | None
    params: dict[str, LazyTensor]
    prefix: str = ""
    left_out: tuple[str, ...] = ()

    def owner(self, key: str) -> str:
        """Return the parameter of an optimizer's key, which may have a part of the prefix."""
        tails = (part for part in _tails(self.prefix) if key.startswith(part))
        return next(
            (name for part in tails if (name := key.removeprefix(part)) in self.params), key
        )


def find_model(tensors: Mapping[str, LazyTensor], name: str | None = None) -> ModelKeys:
    """Find the model among tensors.

    Candidates in this order: all keys share a known prefix; the keys with a known prefix; the keys
    with a dot, because trainers store counters and random states at the root; the keys that share
    the prefix of a user's module around the model.

    Args:
        tensors: key without wrappers -> tensor.
        name: name of the dialect. None: detect it.
    """
    candidates = [name_map(name)] if name else list(NAME_MAPS.values())
    # A prefix of all keys leaves nothing out, so that it comes before any prefix of some keys.
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
    for known in ("", *PREFIXES):
        for prefix in shared_prefixes([key for key in dotted if key.startswith(known)]):
            location = _below(tensors, prefix, candidates)
            if location.dialect:
                return location
    return ModelKeys(name_map(name) if name else None, dict(tensors))


def shared_prefixes(keys: Sequence[str]) -> list[str]:
    """Return the prefixes that end in a dot and that all keys share, the shortest first."""
    parts = [key.split(".")[: _MAX_WRAPPERS + 1] for key in keys]
    columns = itertools.takewhile(lambda names: len({*names}) == 1, zip(*parts, strict=False))
    shared = [column[0] for column in columns]
    return [".".join(shared[:n]) + "." for n in range(1, min(len(shared), _MAX_WRAPPERS) + 1)]


def _below(tensors: Mapping[str, LazyTensor], prefix: str, candidates: list[NameMap]) -> ModelKeys:
    """Return the model below a prefix; its dialect is the candidate that knows all keys."""
    params = {
        key.removeprefix(prefix): tensor
        for key, tensor in tensors.items()
        if key.startswith(prefix)
    }
    left_out = tuple(key for key in tensors if not key.startswith(prefix))
    return ModelKeys(detect_dialect(list(params), candidates), params, prefix, left_out)


def _tails(prefix: str) -> Iterator[str]:
    """Yield the suffixes of a prefix, which an optimizer's keys may have; the empty one first."""
    yield ""
    while prefix:
        yield prefix
        prefix = prefix.partition(".")[2]


def unknown(tensors: Mapping[str, LazyTensor], where: str) -> str:
    """Return the error message for names that no dialect knows."""
    if not tensors:
        return f"{where}: it holds no model: no tensor outside optimizer state"

    def is_known(dialect: NameMap, key: str) -> bool:
        return any(dialect.knows(key.removeprefix(prefix)) for prefix in ("", *PREFIXES))

    nearest = max(NAME_MAPS.values(), key=lambda item: sum(is_known(item, key) for key in tensors))
    unknown_keys = [key for key in tensors if not is_known(nearest, key)]
    return (
        f"{where}: these names are none of {', '.join(NAME_MAPS)}; nearest is {nearest.name}, "
        f"which does not know {summarize_names(unknown_keys or tensors)}"
    )
