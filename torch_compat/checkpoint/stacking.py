"""Correspondence of a model's stacked arrays and their entries per layer and expert.

    array                                   shape         entries
    layers.attention.q_proj.weight          [L, ...]      layers.{i}.attention.q_proj.weight
    moe_layers.mlp.experts.up_proj.weight   [n, E, ...]   layers.{i}.mlp.experts.{j}.up_proj.weight
    mtp.{k}.mlp_norm.weight                 [...]         layers.{L + k}.mlp_norm.weight

i is the index of the layer in the model, whichever stack (`ModelConfig.stacks`) holds the layer.
Modules of multi-token prediction are the layers from L = n_layers on, as in DeepSeek-V3's files.
"""

import functools
import re
from collections.abc import Iterator, Mapping

from jaxforge.config.model import LAYERS, MTP, ModelConfig
from jaxforge.errors import UserError
from torch_compat.formats.lazy import LazyTensor, stack

Index = tuple[int, ...]
"""Position of an entry in its array: (), (row,) or (row, expert); (expert,) in modules of
multi-token prediction."""

EXPERTS = "mlp.experts."
_LAYER = re.compile(rf"{LAYERS}\.(\d+)\.(.+)")
_EXPERT = re.compile(rf"{re.escape(EXPERTS)}(\d+)\.(.+)")


def layer_of(entry: str) -> int | None:
    """Return the layer of an entry; None for entries outside layers."""
    match = _LAYER.fullmatch(entry)
    return int(match[1]) if match else None


class Stacking:
    """Stacking of layers and experts in arrays."""

    def __init__(self, model: ModelConfig) -> None:
        self._stacks, self._experts = model.stacks, model.num_experts
        self._n_layers, self._depths = model.n_layers, model.mtp_depth
        self._has_experts = (*model.has_experts, *model.has_experts[-1:] * model.mtp_depth)
        self._rows = {
            layer: (name, row)
            for name, layers in self._stacks.items()
            for row, layer in enumerate(layers)
        }

    def entries(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Index]]:
        """Yield the entries of an array and their positions.

        Raises:
            UserError: the array has another number of layers or experts than the model.
        """
        stacked, _, tail = name.partition(".")
        if stacked == MTP:
            yield from self._module_entries(tail, shape)
            return
        layers = self._stacks.get(stacked)
        if layers is None or not tail:
            yield name, ()
            return
        # [layers, experts, ...] for weights of experts, [layers, ...] for all others.
        has_experts = self._has_experts[layers[0]] and tail.startswith(EXPERTS)
        experts, inner = self._experts, tail.removeprefix(EXPERTS)
        sizes = (len(layers), experts) if has_experts else (len(layers),)
        if shape[: len(sizes)] != sizes:
            raise UserError(f"{name} is {list(shape)}, but the model has {list(sizes)} entries")
        for row, layer in enumerate(layers):
            if not has_experts:
                yield f"{LAYERS}.{layer}.{tail}", (row,)
                continue
            for expert in range(experts):
                yield f"{LAYERS}.{layer}.{EXPERTS}{expert}.{inner}", (row, expert)

    def _module_entries(self, tail: str, shape: tuple[int, ...]) -> Iterator[tuple[str, Index]]:
        """Yield the entries of an array of a module of multi-token prediction."""
        depth, _, tail = tail.partition(".")
        layer = f"{LAYERS}.{self._n_layers + int(depth)}."
        if not (self._has_experts[self._n_layers - 1] and tail.startswith(EXPERTS)):
            yield layer + tail, ()
            return
        if shape[:1] != (self._experts,):
            raise UserError(
                f"{MTP}.{depth}.{tail} is {list(shape)}, but the model has {self._experts} experts"
            )
        for expert in range(self._experts):
            yield f"{layer}{EXPERTS}{expert}.{tail.removeprefix(EXPERTS)}", (expert,)

    def array_of(self, entry: str) -> str:
        """Return the array of an entry."""
        return self._index_of(entry)[0]

    def expert_of(self, entry: str) -> str | None:
        """Return the expert of an entry, "layers.3.mlp.experts.5"; None for other entries.

        Experts of modules of multi-token prediction are not counted (`optim.idle_experts`).
        """
        _, index = self._index_of(entry)
        if len(index) < len(("row", "expert")):
            return None
        return f"{entry.partition(EXPERTS)[0]}{EXPERTS}{index[1]}"

    def split(self, name: str, tensor: LazyTensor) -> dict[str, LazyTensor]:
        """Split an array into entries.

        Raises:
            UserError: the array has another number of layers or experts than the model.
        """
        return {
            entry: functools.reduce(LazyTensor.part, index, tensor)
            for entry, index in self.entries(name, tensor.shape)
        }

    def join(self, entries: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
        """Join all entries into arrays.

        Raises:
            UserError: the entries of an array differ in dtype.
        """
        arrays: dict[str, dict[Index, LazyTensor]] = {}
        for entry, tensor in entries.items():
            name, index = self._index_of(entry)
            arrays.setdefault(name, {})[index] = tensor
        for name, parts in arrays.items():
            if len({tensor.dtype for tensor in parts.values()}) > 1:
                raise UserError(
                    f"{name} has several dtypes in different layers; import it with --dtype "
                    "float32 or another dtype"
                )
        return {name: _stack_entries(parts) for name, parts in arrays.items()}

    def _index_of(self, entry: str) -> tuple[str, Index]:
        match = _LAYER.fullmatch(entry)
        if not match:
            return entry, ()
        layer, tail = int(match[1]), match[2]
        depth = layer - self._n_layers
        if 0 <= depth < self._depths:
            expert = _EXPERT.fullmatch(tail) if self._has_experts[layer] else None
            if expert:
                return f"{MTP}.{depth}.{EXPERTS}{expert[2]}", (int(expert[1]),)
            return f"{MTP}.{depth}.{tail}", ()
        if layer not in self._rows:
            return entry, ()
        name, row = self._rows[layer]
        expert = _EXPERT.fullmatch(tail) if self._has_experts[layer] else None
        if expert:
            return f"{name}.{EXPERTS}{expert[2]}", (row, int(expert[1]))
        return f"{name}.{tail}", (row,)


def _stack_entries(parts: Mapping[Index, LazyTensor]) -> LazyTensor:
    """Stack entries along one leading axis per number of their positions."""
    if () in parts:
        return parts[()]
    rows: dict[int, dict[Index, LazyTensor]] = {}
    # Recursion over the positions: first the row of the layer, then the expert.
    for (row, *tail), tensor in parts.items():
        rows.setdefault(row, {})[tuple(tail)] = tensor
    return stack([_stack_entries(rows[row]) for row in range(len(rows))])
