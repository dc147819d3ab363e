"""Norms of a step by layer: activations, gradients, updates, parameters."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxforge.config.model import LAYERS
from jaxforge.config.points import STREAM
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.train_step import Metrics
from jaxforge.step.update_loss import Batch

NORMS = {
    "grad_norms_per_layer": "gradient",
    "update_norms_per_layer": "update",
    "params_norms_per_layer": "parameters",
}
"""Display names of the metrics that a step collects."""


@dataclasses.dataclass(frozen=True)
class LayerNorms:
    """Norms of the layers in a step.

    Attributes:
        parts: names of the parts: "layers.0", ..., then parts outside of layers.
        norms: norms of all parts, [parts], by kind: L2 norms of "gradient", "update" and
            "parameters", and root mean squares of the points of `STREAM` (NaN outside of layers).
    """

    parts: list[str]
    norms: dict[str, np.ndarray]


def activation_norms(
    model: Model, params: Params, batch: Batch
) -> dict[str, Float[Array, "layers"]]:
    """Return the root mean square of each layer's activations at the points of `STREAM`."""

    def square(name: str, x: Array) -> Array:
        return jnp.mean(jnp.square(x.astype(jnp.float32)))

    def of_microbatch(microbatch: Batch) -> dict[str, Float[Array, "rows"]]:
        _, out = model.forward(params, microbatch, capture=Capture(STREAM, square))
        return dict(out.activations)

    squares = jax.lax.map(of_microbatch, spread_sequences(model, batch))
    return {name: model.stack.unstack(jnp.sqrt(jnp.mean(x, 0))) for name, x in squares.items()}


def layer_norms(metrics: Metrics, activations: dict[str, Array]) -> LayerNorms:
    """Return the norms of a step from its metrics (`NORMS`) and its activation norms."""
    collected = jax.device_get({name: metrics[name] for name in NORMS})
    first = collected["grad_norms_per_layer"]
    others = [name for name in first if name != LAYERS]
    parts = [f"{LAYERS}.{i}" for i in range(len(first[LAYERS]))] + others
    norms = {
        shown: np.array([*collected[name][LAYERS], *(collected[name][o] for o in others)])
        for name, shown in NORMS.items()
    }
    outside = np.full(len(others), np.nan)
    for name, layers in jax.device_get(activations).items():
        norms[name] = np.concatenate([layers, outside])
    return LayerNorms(parts, norms)


def rank_deviations(
    step: LayerNorms, neighbours: Sequence[LayerNorms]
) -> list[tuple[str, str, float]]:
    """Return (part, norm, ratio to the other steps' median), the largest deviations first."""
    deviations = []
    for name, values in step.norms.items():
        medians = np.median([neighbour.norms[name] for neighbour in neighbours], axis=0)
        for part, value, median in zip(step.parts, values, medians, strict=True):
            if not np.isnan(median):
                ratio = float(value / median) if median else float("inf")
                deviations.append((part, name, 1.0 if value == median else ratio))
    return sorted(deviations, key=lambda deviation: -_distance(deviation[2]))


def _distance(ratio: float) -> float:
    """Return the distance of a ratio from 1, in either direction; infinite if it is not finite."""
    return abs(float(np.log(ratio))) if np.isfinite(ratio) and ratio > 0 else float("inf")
