"""Inputs and outputs that all layers of a model share."""

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree, UInt32

from jaxforge.aux_outputs import AuxOutputs, LossWeights
from jaxforge.model.plan import LayerKind, LayerPlan
from jaxforge.model.rope import Rotation, rotate
from jaxforge.model.runtime import Runtime


class Context(NamedTuple):
    """Properties of the tokens of a batch, shared by all layers.

    Attributes:
        positions: position of each token in its sequence; None: token i is at position i.
        segment_ids: document of each token; None: each row is one document.
        rotations: rotary angles of the positions for each of `LayerPlan.ropes`.
        loss_weights: weights of the layers' loss terms; None outside of training.
        is_padding: tokens that are routed to no expert; None: there is no padding.
        mask_keys: key of each token for dropout (`model.dropout`); None: nothing is dropped.
        keys: keys and values of earlier layers by name of their mixer, for layers without their
            own (`model.n_kv_shared_layers`).
    """

    positions: Int[Array, "b s"] | None = None
    segment_ids: Int[Array, "b s"] | None = None
    rotations: tuple[Rotation, ...] = ()
    loss_weights: LossWeights | None = None
    is_padding: Bool[Array, "b s"] | None = None
    mask_keys: UInt32[Array, "b s"] | None = None
    keys: Mapping[str, PyTree] = {}

    def with_keys(self, keys: Mapping[str, PyTree] | None) -> "Context":
        """Return the context of layers that also use these keys and values."""
        return self if keys is None else self._replace(keys={**self.keys, **keys})

    def rotation(self, kind: LayerKind, channels: int) -> Rotation:
        """Return the rotation of a kind of layer with heads of `channels` channels."""
        if isinstance(kind.rope, int):
            return self.rotations[kind.rope]
        if len(self.rotations) == 1:
            return self.rotations[0]
        # Angles that are too many belong to layers with wider heads, which have another stack.
        most = max(rotation.cos.shape[-1] for rotation in self.rotations)
        half = min(most, channels // 2)

        def select(*angles: Float[Array, "b s _"]) -> Float[Array, "b s half"]:
            fitting = [x if x.shape[-1] == most else _padded(x, most) for x in angles]
            return jnp.stack(fitting)[kind.rope][..., :half]

        return jax.tree.map(select, *self.rotations)


def _padded(x: Float[Array, "b s _"], size: int) -> Float[Array, "b s size"]:
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1])))


Cache = Mapping[str, PyTree] | list[PyTree]
"""Decoding states of all layers: by stack and stacked by layer, or a list by layer."""


class Capture(NamedTuple):
    """The activations that each layer returns (`LayerOut.activations`).

        attention           output of attention that is added to the residual stream, [b, s, d]
        mlp                 output of the feed-forward or experts, [b, s, d]
        residual            output of the layer, [b, s, d]
        attention_weights   weight of each key for each query, [b, heads, s, s], by an explicit
                            softmax
        max_logits          largest logit of attention before the soft cap, [b, heads]

    Attributes:
        points: names of the activations (`config.points`).
        reduce: (name, value) -> the value to return.
    """

    points: Collection[str] = ()
    reduce: Callable[[str, Array], Array] = lambda name, value: value

    def collect(self, values: Mapping[str, Array | None]) -> dict[str, Array]:
        """Return the captured values of a layer, by name."""
        return {
            name: self.reduce(name, value)
            for name, value in values.items()
            if name in self.points and value is not None
        }


NO_CAPTURE = Capture()


class LayerSettings(NamedTuple):
    """Settings of a layer's forward pass.

    Attributes:
        kind: the layer's kind; its fields are traced where the stages of a pipeline differ.
        plan: masks and rotary positions that `kind` selects from.
        runtime: kernels and rematerialization.
        capture: the activations to return.
        passes_keys: whether to return keys and values, which later layers use.
    """

    kind: LayerKind
    plan: LayerPlan
    runtime: Runtime
    capture: Capture = NO_CAPTURE
    passes_keys: bool = False

    def rotated(
        self, x_BSHp: Float[Array, "b s heads p"], context: Context
    ) -> Float[Array, "b s heads p"]:
        """Rotate the channels that have rotary positions, if the layer has some."""
        if not self.plan.has_rope(self.kind):
            return x_BSHp
        return rotate(
            x_BSHp,
            by=context.rotation(self.kind, x_BSHp.shape[-1]),
            rope_as_matmul=self.runtime.rope_as_matmul,
        )

    def with_point(self, name: str) -> "LayerSettings":
        """Return settings that also capture the activation of this name."""
        capture = self.capture._replace(points={*self.capture.points, name})
        return self._replace(capture=capture)


class LayerOut(NamedTuple):
    """Outputs of a layer in addition to x; outside of the layer scan, stacked by layer.

    All layers of a model use the same names; a layer without a value has 0.

    Attributes:
        cache: the next decoding state, if the layer was given one; None: the layer has none.
        aux: auxiliary outputs.
        activations: the captured activations, by name.
        keys: keys and values for later layers by name of the mixer; None: no layer needs them.
    """

    cache: PyTree
    aux: AuxOutputs = AuxOutputs()
    activations: Mapping[str, Array] = {}
    keys: Mapping[str, PyTree] | None = None
