"""Parameters that do not change (`optimizer.freeze_patterns`, and all but adapters with LoRA).

A frozen parameter has no moments, no decay and no part in the gradient norm, as if PyTorch's
`requires_grad` were False. The loss is not differentiated with respect to it (`step.gradients`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict
from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.optim.trees import Path, join, split


def frozen_paths(axes: PyTree, config: JobConfig) -> frozenset[Path]:
    """Return the paths of the frozen parameters.

    Args:
        axes: a tree with the structure of the parameters.
        config: the whole config.
    """
    return frozenset(path for path in flatten_dict(axes) if config.freezes(".".join(path)))


def keep_frozen(params: PyTree, before: PyTree, frozen: frozenset[Path]) -> PyTree:
    """Return parameters with the frozen ones of `before`."""
    if not frozen:
        return params
    return join(split(params, frozen)[1], split(before, frozen)[0])


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
