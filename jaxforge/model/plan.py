"""Kinds of layers, and the period in which kinds repeat.

Layers with the same parameters are stacked, and differ in what they do with them: how far they look
back, how they turn positions. Where some have experts and others have none, there are two stacks.
Where kinds repeat, one period of them is compiled, and a scan runs over the periods, so that
compile time does not grow with depth.
"""

import functools
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from jaxforge.config.model import ModelConfig, RopeScaling
from jaxforge.kernels.masking import Mask
from jaxforge.parallel.stages import Stack


class Rope(NamedTuple):
    """Rotary positions.

    Attributes:
        theta: base of the frequencies.
        scaling: how they are stretched; None: not.
    """

    theta: float
    scaling: RopeScaling | None


class LayerKind(NamedTuple):
    """Structure of a layer, apart from its parameters.

    Known when it is compiled; or, where the stages of a pipeline run one program, by each device.

    Attributes:
        mask: which of `LayerPlan.masks` says how far it looks back.
        rope: which of `LayerPlan.ropes` turns its queries and keys.
        in_bf16: whether its products stay in bf16 where others' are in 8 bits (`model.fp8`); None
            where all layers are alike in this.
    """

    mask: int | Int[Array, "..."]
    rope: int | Int[Array, "..."]
    in_bf16: bool | Bool[Array, "..."] | Bool[np.ndarray, "..."] | None = None


class LayerPlan(NamedTuple):
    """The kinds of all layers.

    Attributes:
        masks: how far tokens see.
        ropes: rotary positions; None: none.
        layers: the kind of each layer.
        stacks: name of the stack of parameters that each layer is in (`ModelConfig.stacks`).
    """

    masks: tuple[Mask, ...]
    ropes: tuple[Rope | None, ...]
    layers: tuple[LayerKind, ...]
    stacks: tuple[str, ...]

    @property
    def is_uniform(self) -> bool:
        """Return whether all layers are of one kind, with one stack of parameters."""
        return len(set(self.layers)) == 1 and len(set(self.stacks)) == 1

    @property
    def period(self) -> "Period":
        """Period of layers that a scan iterates over."""
        return period_of(tuple(zip(self.layers, self.stacks, strict=True)))

    def rows_in(self, stack: str, layers: slice) -> slice:
        """The rows of a stack that belong to some consecutive layers."""
        first, end, _ = layers.indices(len(self.stacks))
        return slice(self.stacks[:first].count(stack), self.stacks[:end].count(stack))

    def turns(self, kind: LayerKind) -> bool:
        """Return whether layers of a kind may have rotary positions."""
        ropes = self.ropes[kind.rope : kind.rope + 1] if isinstance(kind.rope, int) else self.ropes
        return ropes != (None,)

    def of_rows(self, stack: Stack) -> LayerKind:
        """The kind of each row of stacked parameters, as arrays; of one without a layer, any."""
        layers = [self.layers[row] for row in stack.rows()]  # -1 is the last
        masks, ropes = np.array([kind[:2] for kind in layers], np.int32).T
        stay = [kind.in_bf16 for kind in layers]
        return LayerKind(masks, ropes, None if stay[0] is None else np.array(stay))


class Period(NamedTuple):
    """Some layers that lead, then one group of kinds again and again, then the others.

    Attributes:
        leading: layers before the first group.
        length: layers of a group.
        repeats: how many groups there are.
    """

    leading: int
    length: int
    repeats: int

    @property
    def end(self) -> int:
        """The first layer after the groups."""
        return self.leading + self.length * self.repeats


def plan_of(config: ModelConfig) -> LayerPlan:
    """The plan that `[model]` describes."""
    masks = [Mask(*of_layer) for of_layer in zip(config.windows, config.chunks, strict=True)]
    ropes = [None if rope is None else Rope(*rope) for rope in config.ropes]
    all_masks, all_ropes = tuple(dict.fromkeys(masks)), tuple(dict.fromkeys(ropes))
    layers = zip(map(all_masks.index, masks), map(all_ropes.index, ropes), strict=True)
    stack_of = {i: name for name, rows in config.stacks.items() for i in rows}
    stacks = tuple(stack_of[i] for i in range(config.n_layers))
    return LayerPlan(all_masks, all_ropes, tuple(LayerKind(*kind) for kind in layers), stacks)


@functools.cache
def period_of(kinds: Sequence[Hashable]) -> Period:
    """Return the shortest period of the kinds of layers, so that the fewest layers are compiled.

    Args:
        kinds: of each layer, a tuple.
    """
    best = Period(0, 1, 1)
    for length in range(1, len(kinds) // 2 + 1):
        leading = 0
        for layer in range(length, len(kinds)):
            if kinds[layer] != kinds[layer - length]:
                leading = layer - length + 1
            period = Period(leading, length, (layer + 1 - leading) // length)
            if length * (period.repeats - 1) > best.length * (best.repeats - 1):
                best = period
    return best
