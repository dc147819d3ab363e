"""What layers and losses tell beside their main result: terms of the loss, metrics, statistics.

Layers, microbatches, devices and pipeline stages each tell their part, and parts are merged: what
is told is a sum, a `Mean` or a `Max`. So a term is the part's share of the loss, already weighted
(`LossWeights`); the terms of all parts together are what is trained.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class LossWeights(NamedTuple):
    """What a microbatch's numbers count for in the loss of the update.

    A term that adds up one of them times a value is right on any mesh, with any number of
    microbatches.

    Attributes:
        token: of each valid token, in the mean that `train.loss_norm` asks for.
        position: of each position that is no padding, with a label or not, in the mean over all.
        sequence: of each sequence that is not all padding, in the mean over all.
    """

    token: Float[Array, ""]
    position: Float[Array, ""] | float = 0.0
    sequence: Float[Array, ""] | float = 0.0


class Mean(NamedTuple):
    """A metric that is a mean: two sums.

    Attributes:
        total: Σ weight · value.
        weight: Σ weight.
    """

    total: Float[Array, "..."]
    weight: Float[Array, "..."]


class Max(NamedTuple):
    """A metric that is a maximum, over numbers of at least 0.

    Attributes:
        value: the largest so far.
    """

    value: Float[Array, "..."]


Metric = Array | Mean | Max
"""A bare array is a sum. No gradient is taken of it."""


class Side(NamedTuple):
    """What a part of an update tells.

    Attributes:
        terms: its share of the loss, by name.
        metrics: what is logged, by name.
        stats: what untrained state is updated from, a tree of metrics.
    """

    terms: Mapping[str, Float[Array, ""]]
    metrics: Mapping[str, Metric]
    stats: PyTree

    @property
    def loss(self) -> Float[Array, ""]:
        """The sum of the terms."""
        return functools.reduce(jnp.add, self.terms.values()) if self.terms else jnp.zeros(())

    def joined_by(self, layers: "Side") -> "Side":
        """With the terms of stacked layers."""
        more = {name: jnp.sum(by_layer, axis=0) for name, by_layer in layers.terms.items()}
        both = {name: self.terms[name] + more[name] for name in self.terms.keys() & more.keys()}
        return self._replace(terms={**self.terms, **more, **both})


NOTHING = Side({}, {}, {})


def merge(*parts: PyTree) -> PyTree:
    """What two parts tell together."""
    return combine(jnp.add, jnp.maximum, *parts)


def combine(add: Callable[..., Array], largest: Callable[..., Array], *parts: PyTree) -> PyTree:
    """Maps trees of metrics leaf by leaf.

    Args:
        add: what is done with sums.
        largest: what is done with maxima.
        parts: the trees.
    """

    def one(*leaves: Any) -> Any:  # noqa: ANN401 (a Max or an array)
        if isinstance(leaves[0], Max):
            return Max(largest(*(leaf.value for leaf in leaves)))
        return add(*leaves)

    return jax.tree.map(one, *parts, is_leaf=lambda node: isinstance(node, Max))


def value_of(metric: Metric) -> Float[Array, "..."]:
    """The number that a metric stands for; NaN for a mean of nothing."""
    if isinstance(metric, Mean):
        return metric.total / metric.weight
    return metric.value if isinstance(metric, Max) else metric
