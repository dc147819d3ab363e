"""Kinds of layers, and the period in which they repeat.

Layers with the same parameter shapes are stacked. Their kinds may differ: attention mask, rotary
positions, precision. If only some layers have experts, there are two stacks. One period of kinds is
compiled, and a scan runs over the periods, so that compile time does not grow with depth.
"""

import functools
import itertools
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from jaxforge.config.model import ModelConfig, Rope
from jaxforge.kernels.masking import Mask
from jaxforge.parallel.stages import Stack


class LayerKind(NamedTuple):
    """Structure of a layer, apart from its parameters.

    Fields are Python values at compile time, or traced arrays if the stages of a pipeline run one
    program.

    Attributes:
        mask: index of the layer's mask in `LayerPlan.masks`.
        rope: index of the layer's rotary positions in `LayerPlan.ropes`.
        in_bf16: whether products stay in bf16 in a model with 8-bit products (`model.fp8_layers`);
            None: all layers have the same precision.
    """

    mask: int | Int[Array, "..."]
    rope: int | Int[Array, "..."]
    in_bf16: bool | Bool[Array, "..."] | Bool[np.ndarray, "..."] | None = None


class LayerPlan(NamedTuple):
    """Kinds of all layers.

    Attributes:
        masks: distinct attention masks.
        ropes: distinct rotary positions; None: no rotation.
        layers: kind of each layer.
        stacks: name of each layer's stack of parameters (`ModelConfig.stacks`).
        key_sources: layers whose keys and values later layers use, in order.
    """

    masks: tuple[Mask, ...]
    ropes: tuple[Rope | None, ...]
    layers: tuple[LayerKind, ...]
    stacks: tuple[str, ...]
    key_sources: tuple[int, ...] = ()

    def parts(self) -> Iterator["PlanPart"]:
        """Return consecutive parts of the plan: each layer of `key_sources` is one of its own."""
        inner = {edge for layer in self.key_sources for edge in (layer, layer + 1)}
        for first, end in itertools.pairwise(sorted({0, *inner, len(self.layers)})):
            layers = slice(first, end)
            plan = self._replace(layers=self.layers[layers], stacks=self.stacks[layers])
            yield PlanPart(plan, layers, first in self.key_sources)

    @property
    def is_uniform(self) -> bool:
        """True if all layers are of one kind, with one stack of parameters."""
        return len(set(self.layers)) == 1 and len(set(self.stacks)) == 1

    @property
    def period(self) -> "Period":
        """Period of layers that a scan iterates over."""
        return shortest_period(tuple(zip(self.layers, self.stacks, strict=True)))

    def stack_rows(self, stack: str, layers: slice) -> slice:
        """Return the rows of a stack that belong to consecutive layers."""
        first, end, _ = layers.indices(len(self.stacks))
        return slice(self.stacks[:first].count(stack), self.stacks[:end].count(stack))

    def has_rope(self, kind: LayerKind) -> bool:
        """Return whether layers of a kind may have rotary positions."""
        ropes = self.ropes[kind.rope : kind.rope + 1] if isinstance(kind.rope, int) else self.ropes
        return ropes != (None,)

    def rotates(self, kind: LayerKind) -> bool | Bool[Array, ""]:
        """Return whether layers of a kind have rotary positions; an array if the kind is traced."""
        has_rope = [rope is not None for rope in self.ropes]
        if isinstance(kind.rope, int) or len(set(has_rope)) == 1:
            return has_rope[kind.rope if isinstance(kind.rope, int) else 0]
        return jnp.asarray(has_rope)[kind.rope]

    def kinds_by_row(self, stack: Stack) -> LayerKind:
        """Return the kinds of rows of stacked parameters as arrays; arbitrary for padding rows."""
        layers = [self.layers[row] for row in stack.rows()]  # padding is -1: any layer will do
        masks, ropes = np.array([kind[:2] for kind in layers], np.int32).T
        in_bf16 = [kind.in_bf16 for kind in layers]
        return LayerKind(masks, ropes, None if in_bf16[0] is None else np.array(in_bf16))

    def stage_period(self, stack: Stack) -> tuple[str, ...]:
        """Return the stacks of consecutive layers that repeat in every virtual stage.

        Stages run one program, so they scan over repetitions of these layers. (): stages have
        different layers, whose parameters are at `Stack.locations`.
        """
        if not stack.has_equal_stages:
            return ()
        if stack.is_padded or len(set(self.stacks)) == 1:
            return self.stacks[:1]
        lengths = (n for n in range(1, stack.per_chunk + 1) if stack.per_chunk % n == 0)
        return next(self.stacks[:n] for n in lengths if _repeats(self.stacks, n))


class PlanPart(NamedTuple):
    """Consecutive layers of a plan.

    Attributes:
        plan: plan of these layers.
        layers: their indices in the whole plan.
        passes_keys: whether later layers use their keys and values.
    """

    plan: LayerPlan
    layers: slice
    passes_keys: bool


def _repeats(names: Sequence[str], length: int) -> bool:
    """Return whether a sequence consists of repetitions of its first `length` names."""
    return all(name == names[i % length] for i, name in enumerate(names))


class Period(NamedTuple):
    """Leading layers, repetitions of a group of kinds, and remaining layers.

    Attributes:
        leading: number of layers before the first group.
        length: number of layers of a group.
        repeats: number of groups.
    """

    leading: int
    length: int
    repeats: int

    @property
    def end(self) -> int:
        """Index of the first layer after the groups."""
        return self.leading + self.length * self.repeats


def build_layer_plan(config: ModelConfig) -> LayerPlan:
    """Return the plan of the layers that `[model]` describes."""
    masks = [Mask(*limits) for limits in zip(config.windows, config.chunks, strict=True)]
    ropes = config.ropes
    all_masks, all_ropes = tuple(dict.fromkeys(masks)), tuple(dict.fromkeys(ropes))
    layers = zip(map(all_masks.index, masks), map(all_ropes.index, ropes), strict=True)
    stack_of = {i: name for name, rows in config.stacks.items() for i in rows}
    stacks = tuple(stack_of[i] for i in range(config.n_layers))
    kinds = tuple(LayerKind(*kind) for kind in layers)
    return LayerPlan(all_masks, all_ropes, kinds, stacks, config.key_sources)


@functools.cache
def shortest_period(kinds: Sequence[Hashable]) -> Period:
    """Return the period of kinds for which the fewest layers are compiled.

    Args:
        kinds: kind of each layer, a tuple.
    """
    best = Period(0, 1, 1)
    for length in range(1, len(kinds) // 2 + 1):
        leading = 0
        for layer in range(length, len(kinds)):
            if kinds[layer] != kinds[layer - length]:
                leading = layer - length + 1
            period = Period(leading, length, (layer + 1 - leading) // length)
            # The scan saves the compilation of all groups but one.
            if length * (period.repeats - 1) > best.length * (best.repeats - 1):
                best = period
    return best
