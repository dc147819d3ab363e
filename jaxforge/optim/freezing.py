"""Parameters that do not change (`optimizer.freeze_patterns`).

A frozen parameter has no moments, no decay and no part in the gradient norm, as if PyTorch's
`requires_grad` were False. The products of its gradient are not computed: nothing uses them, so the
compiler removes them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, PyTree

from jaxforge.config.optimizer import OptimizerConfig
from jaxforge.optim.rounding import Apply
from jaxforge.optim.trees import Path, join, split


def frozen_paths(axes: PyTree, optimizer: OptimizerConfig) -> frozenset[Path]:
    """Return the paths of the frozen parameters.

    Args:
        axes: a tree with the structure of the parameters.
        optimizer: the `[optimizer]` section.
    """
    return frozenset(path for path in flatten_dict(axes) if optimizer.freezes(".".join(path)))


def zero_frozen(grads: PyTree, frozen: frozenset[Path]) -> PyTree:
    """Return gradients with zeros for frozen parameters."""
    if not frozen:
        return grads
    flat = flatten_dict(grads)
    return unflatten_dict({p: jnp.zeros_like(g) if p in frozen else g for p, g in flat.items()})


def keep_frozen(params: PyTree, before: PyTree, frozen: frozenset[Path]) -> PyTree:
    """Return parameters with the frozen ones of `before`."""
    if not frozen:
        return params
    return join(split(params, frozen)[1], split(before, frozen)[0])


def applied_to_trained(apply: Apply, frozen: frozenset[Path]) -> Apply:
    """Return a function that adds updates to the trained parameters alone."""
    if not frozen:
        return apply

    def apply_to_trained(
        params: PyTree, updates: PyTree, opt_state: PyTree, step: Array
    ) -> tuple[PyTree, PyTree]:
        idle, trained = split(params, frozen)
        trained, opt_state = apply(trained, split(updates, frozen)[1], opt_state, step)
        return join(trained, idle), opt_state

    return apply_to_trained


def trained_only(
    rule: optax.GradientTransformation, frozen: frozenset[Path]
) -> optax.GradientTransformationExtraArgs:
    """Return a transform that applies `rule` to the trained parameters; others do not change.

    Args:
        rule: a transform for the tree of trained parameters.
        frozen: paths of the frozen parameters.
    """
    rule = optax.with_extra_args_support(rule)

    def init(params: PyTree) -> Any:  # noqa: ANN401 (the state of any rule)
        return rule.init(split(params, frozen)[1])

    def update(
        grads: PyTree,
        state: Any,  # noqa: ANN401
        params: PyTree | None = None,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, Any]:
        idle, trained = split(grads, frozen)
        of_trained = None if params is None else split(params, frozen)[1]
        updates, state = rule.update(trained, state, of_trained, **extra)
        return join(updates, jax.tree.map(jnp.zeros_like, idle)), state

    return optax.GradientTransformationExtraArgs(init, update)
