"""The outer optimizer: the update of the global weights by the mean change of the groups."""

import jax
import optax
from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.config.outer_optimizer import NESTEROV
from jaxforge.optim.freezing import frozen_paths, trained_only
from jaxforge.optim.from_optax import named_optax


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
    no_decay = jax.tree.map(lambda _: 0.0, axes, is_leaf=lambda node: isinstance(node, tuple))
    rule = named_optax(name, lambda _: outer.lr, options, 0.0, no_decay, section="outer_optimizer")
    frozen = frozen_paths(axes, config)
    # A chain, because checkpoints name the fields of its links.
    return optax.chain(trained_only(rule, frozen) if frozen else rule)
