"""Norms of a step, layer by layer: of activations, gradients, updates, parameters."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxforge.config.model import LAYERS
from jaxforge.config.points import STREAM
from jaxforge.model.attention import Capture
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.gradients import Batch
from jaxforge.step.train_step import Metrics

NORMS = {
    "grad_norms_per_layer": "gradient",
    "update_norms_per_layer": "update",
    "params_norms_per_layer": "parameters",
}
"""What a step collects, by the name that a reader has for it."""


@dataclasses.dataclass(frozen=True)
class LayerNorms:
    """Norms of the layers in one step.

    Attributes:
        parts: names: "layers.0", ..., and the parts that are no layers.
        norms: by "gradient", "update", "parameters" (L2) and, of layers alone, the points of
            `STREAM` (root mean square): [parts].
    """

    parts: list[str]
    norms: dict[str, np.ndarray]


def activation_norms(
    model: Model, params: Params, batch: Batch
) -> dict[str, Float[Array, "layers"]]:
    """Root mean square of what layers compute for a batch, by the points of `STREAM`."""

    def square(name: str, x: Array) -> Array:
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def of_microbatch(microbatch: Batch) -> dict[str, Float[Array, "rows"]]:
        _, out = model.forward(params, microbatch, capture=Capture(STREAM, square))
        return dict(out.activations)

    squares = jax.lax.map(of_microbatch, spread_sequences(model, batch))
    return {name: model.stack.unstack(jnp.sqrt(jnp.mean(x, 0))) for name, x in squares.items()}


def layer_norms(metrics: Metrics, activations: dict[str, Array]) -> LayerNorms:
    """From what a step collected (`NORMS`) and its activations."""
    collected = jax.device_get({name: metrics[name] for name in NORMS})
    first = collected["grad_norms_per_layer"]
    others = [name for name in first if name != LAYERS]
    parts = [f"{LAYERS}.{i}" for i in range(len(first[LAYERS]))] + others
    norms = {
        shown: np.array([*collected[name][LAYERS], *(collected[name][o] for o in others)])
        for name, shown in NORMS.items()
    }
    nothing = np.full(len(others), np.nan)
    for name, of_layers in jax.device_get(activations).items():
        norms[name] = np.concatenate([of_layers, nothing])
    return LayerNorms(parts, norms)


def rank_deviations(
    step: LayerNorms, neighbours: Sequence[LayerNorms]
) -> list[tuple[str, str, float]]:
    """Return the largest deviations from other steps: (part, norm, ratio to their median)."""
    deviations = []
    for name, values in step.norms.items():
        usual = np.median([deviation.norms[name] for deviation in neighbours], axis=0)
        for part, value, median in zip(step.parts, values, usual, strict=True):
            if not np.isnan(median):
                ratio = float(value / median) if median else float("inf")
                deviations.append((part, name, 1.0 if value == median else ratio))
    return sorted(deviations, key=lambda deviation: -_distance(deviation[2]))


def _distance(ratio: float) -> float:
    """Return the distance of a ratio from 1, in either direction; infinite if it is not finite."""
    return abs(float(np.log(ratio))) if np.isfinite(ratio) and ratio > 0 else float("inf")
