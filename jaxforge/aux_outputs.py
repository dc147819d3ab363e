"""Auxiliary outputs of layers and losses (loss terms, metrics, statistics) and how they are merged.

Layers, microbatches, devices and pipeline stages each return auxiliary outputs for their part of an
update. Merging adds sums and `Mean`s and takes the larger of two `Max`. A loss term is therefore
the part's share of the loss, already weighted (`LossWeights`): the sum over all parts is trained.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


class LossWeights(NamedTuple):
    """Weights of a microbatch's numbers in the loss of the update.

    A loss term that sums one of these weights times a value is correct on any mesh, with any number
    of microbatches.

    Attributes:
        token: weight of each valid token, in the mean that `train.loss_norm` selects.
        position: weight of each position without padding, labeled or not, in the mean over these.
        sequence: weight of each sequence that is not all padding, in the mean over these.
        further: `token` for the labels of each depth of multi-token prediction.
    """

    token: Float[Array, ""]
    position: Float[Array, ""] | float = 0.0
    sequence: Float[Array, ""] | float = 0.0
    further: tuple[Float[Array, ""], ...] = ()


class Mean(NamedTuple):
    """A metric that is a mean, as two sums.

    Attributes:
        total: Σ weight · value.
        weight: Σ weight.
    """

    total: Float[Array, "..."]
    weight: Float[Array, "..."]


class Max(NamedTuple):
    """A metric that is a maximum over numbers of at least 0.

    Attributes:
        value: the maximum so far.
    """

    value: Float[Array, "..."]


Metric = Array | Mean | Max
"""A bare array is a sum. Metrics have no gradient."""


LossTerms = Mapping[str, Float[Array, ""]]
"""Shares of the loss, by name."""


class AuxOutputs(NamedTuple):
    """Auxiliary outputs of a part of an update.

    Attributes:
        loss_terms: the part's share of the loss, by name.
        metrics: values to log, by name.
        statistics: inputs to the update of non-trainable state, trees of metrics by name.
    """

    loss_terms: Mapping[str, Float[Array, ""]] = {}
    metrics: Mapping[str, Metric] = {}
    statistics: Mapping[str, PyTree] = {}

    @property
    def loss(self) -> Float[Array, ""]:
        """The sum of the loss terms."""
        terms = self.loss_terms.values()
        return functools.reduce(jnp.add, terms) if terms else jnp.zeros(())

    def with_layer_losses(self, layers: "AuxOutputs") -> "AuxOutputs":
        """Return these outputs with the loss terms of stacked layers added."""
        terms = dict(self.loss_terms)
        for name, by_layer in layers.loss_terms.items():
            # [layers] -> []: the loss terms of all layers of a stack add up.
            total = jnp.sum(by_layer, axis=0)
            terms[name] = terms[name] + total if name in terms else total
        return self._replace(loss_terms=terms)


def join(*parts: AuxOutputs) -> AuxOutputs:
    """Return the auxiliary outputs of parts that have different names."""
    fields = zip(*parts, strict=True)
    return AuxOutputs(*(
        {name: value for values in field for name, value in values.items()} for field in fields
    ))  # fmt: skip


def merge(*parts: PyTree) -> PyTree:
    """Merge the auxiliary outputs of parts of an update."""
    return combine(jnp.add, jnp.maximum, *parts)


def combine(add: Callable[..., Array], largest: Callable[..., Array], *parts: PyTree) -> PyTree:
    """Map trees of metrics leaf by leaf.

    Args:
        add: reduction of sums.
        largest: reduction of maxima.
        parts: the trees.
    """

    def combine_leaves(*leaves: Any) -> Any:  # noqa: ANN401 (a Max or an array)
        # A sum of maxima would depend on the number of parts, such as microbatches.
        if isinstance(leaves[0], Max):
            return Max(largest(*(leaf.value for leaf in leaves)))
        return add(*leaves)

    return jax.tree.map(combine_leaves, *parts, is_leaf=lambda node: isinstance(node, Max))


def metric_value(metric: Metric) -> Float[Array, "..."]:
    """Return the number that a metric stands for; NaN for a mean without weight."""
    if isinstance(metric, Mean):
        return metric.total / metric.weight
    return metric.value if isinstance(metric, Max) else metric
