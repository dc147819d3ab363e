"""Update rules as optax transforms, built from arithmetic per parameter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxforge.optim.moments import (
    MomentRule,
    MomentStorage,
    MomentUpdate,
    join_scales,
    param_infos,
    split_scales,
)
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import unzip

State = Any
"""State of an update rule: a named tuple."""


class UpdateStep(NamedTuple):
    """One update.

    Attributes:
        lr: learning rate, multiplied by `lr_scale`.
        lr_scale: factor on the learning rate.
        moment_update: the update of the moments.
    """

    lr: Float[Array, "..."]
    lr_scale: Float[Array, ""] | float
    moment_update: MomentUpdate

    def advance(
        self,
        state: State,
        moments: tuple[str, ...],
        rule: MomentRule,
        change: Callable[..., tuple[Array, ...]],
        params: PyTree,
        grads: PyTree,
        *trees: PyTree,
        weights: tuple[str, ...] = (),
        scalars: tuple[Array, ...] = (),
    ) -> tuple[PyTree, State]:
        """Return the change of every parameter, and the state after one more update.

        Args:
            state: named tuple with the count `updates`, the moments, their scales as
                `<moment>_scales`, and `weights`.
            moments: names of the moments, in the order of `rule`.
            rule: computes the direction and the new moments.
            change: (parameter, direction, *leaves of `weights` and `trees`) -> the change of the
                parameter, *leaves of `weights`.
            params: the parameters; gradients and `trees` have the same structure.
            grads: gradients.
            *trees: further values per parameter; None stands for 1.0 each.
            weights: names of trees that the optimizer stores in addition to moments.
            scalars: further arguments of `rule`.
        """
        n = len(moments)

        def update_leaf(p: Array, g: Array, info: Any, *leaves: Any) -> tuple:  # noqa: ANN401
            direction, *new = self.moment_update.apply(rule, info, g, *leaves[:n], scalars=scalars)
            return *change(p, direction, *leaves[n:]), *new

        unit_factors = jax.tree.map(lambda _: 1.0, params)
        factors = (unit_factors if tree is None else tree for tree in trees)
        # Leaves per parameter: (p, g, info, *moments, *weights, *trees) -> (change of p, *weights,
        # *moments). Moments with scales are single leaves (`Packed`) in between.
        stored = [join_scales(getattr(state, m), getattr(state, f"{m}_scales")) for m in moments]
        stored += [getattr(state, name) for name in weights]
        infos = param_infos(params, self.moment_update.storage)
        leaves = jax.tree.map(update_leaf, params, grads, infos, *stored, *factors)
        changes, *results = unzip(1 + len(stored), leaves, params)
        fields = dict(zip((*weights, *moments), results, strict=True))
        for name in moments:
            fields[name], fields[f"{name}_scales"] = split_scales(fields[name])
        return changes, state._replace(updates=optax.safe_increment(state.updates), **fields)


def change_of(
    p: Array, step: Array, decay: Array | float, *, is_cautious: bool
) -> Float[Array, "..."]:
    """Return the change of a parameter: p (1 - decay) - step - p, in float32.

    Cautious decay (Chen et al., 2025, arXiv:2510.12402) leaves out the elements that the step moves
    away from zero, where step · p < 0.

    Args:
        p: the parameter.
        step: what is subtracted from it.
        decay: learning rate times weight decay.
        is_cautious: whether the decay is cautious.
    """
    p = p.astype(jnp.float32)
    after_decay = 1 - decay
    if is_cautious:
        after_decay = jnp.where(step * p >= 0, after_decay, 1.0)
    return p * after_decay - step - p


def transform(
    schedule: Schedule,
    state_dtype: MomentStorage,
    init: Callable[[PyTree], State],
    update: Callable[[UpdateStep, PyTree, State, PyTree], tuple[PyTree, State]],
) -> optax.GradientTransformationExtraArgs:
    """Return an update rule as an optax transform.

    The update function of the transform takes `lr_scale`, a scalar factor on the learning rate
    (default 1), and `applied` (`optim.moments.MomentUpdate`).

    Args:
        schedule: learning rate by the number of updates made.
        state_dtype: storage format of moments.
        init: parameters -> initial state.
        update: (step, gradients, state, parameters) -> updates, new state.
    """

    def update_with_extra_args(
        grads: PyTree,
        state: State,
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        applied: Bool[Array, ""] | bool = True,
        **_: object,
    ) -> tuple[PyTree, State]:
        assert params is not None
        moment_update = MomentUpdate(state_dtype, state.updates, applied)
        step = UpdateStep(schedule(state.updates) * lr_scale, lr_scale, moment_update)
        return update(step, grads, state, params)

    return optax.GradientTransformationExtraArgs(init, update_with_extra_args)
