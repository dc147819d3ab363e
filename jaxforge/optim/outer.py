"""The outer optimizer: the update of the global weights by the mean change of the groups."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.config.outer_optimizer import NESTEROV
from jaxforge.optim.freezing import frozen_paths, trained_only
from jaxforge.optim.from_optax import named_optax
from jaxforge.optim.trees import split


def build_outer_optimizer(config: JobConfig, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of `[outer_optimizer]`; its gradient is the mean change of the groups.

    With Nesterov momentum (Sutskever et al., 2013), momentum m and gradient g = old - mean of new:

        v <- m v + g,   weights <- weights - lr (g + m v)

    Args:
        config: the whole config.
        axes: logical axes of every parameter (`Model.axes`).
    """
    outer = config.outer_optimizer
    name, options = outer.name, dict(outer.options)
    if name == NESTEROV:
        name, options = "optax.sgd", {"momentum": outer.momentum, "nesterov": True}
    frozen = frozen_paths(axes, config)
    trained = split(axes, frozen)[1]
    no_decay = jax.tree.map(lambda _: 0.0, trained, is_leaf=lambda node: isinstance(node, tuple))
    rule = named_optax(name, lambda _: outer.lr, options, 0.0, no_decay, section="outer_optimizer")
    # A chain, because checkpoints name the fields of its links.
    return _in_float32(optax.chain(trained_only(rule, frozen) if frozen else rule))


def _in_float32(
    rule: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    """Return the rule with moments and updates in float32, whatever the dtype of the parameters."""

    def update(
        grads: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, PyTree]:
        params = None if params is None else _float32(params)
        return rule.update(_float32(grads), state, params, **extra)

    return optax.GradientTransformationExtraArgs(lambda params: rule.init(_float32(params)), update)


def _float32(tree: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)
