"""Plumbing shared by the update rules: an optax transform made of arithmetic per parameter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxforge.optim.moments import MomentStorage, Rule, Turn, joined, locations, split_scales
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import unzip

State = Any
"""State of an update rule: a named tuple."""


class Step(NamedTuple):
    """One update: its learning rate, `lr_scale` included, that factor, and how moments advance."""

    lr: Float[Array, "..."]
    lr_scale: Float[Array, ""] | float
    turn: Turn

    def advance(
        self,
        state: State,
        moments: tuple[str, ...],
        rule: Rule,
        change: Callable[..., tuple[Array, ...]],
        params: PyTree,
        grads: PyTree,
        *trees: PyTree,
        weights: tuple[str, ...] = (),
        scalars: tuple[Array, ...] = (),
    ) -> tuple[PyTree, State]:
        """Return the change of every parameter, and the state after one more update.

        Args:
            state: its fields are the count `updates`, moments, their scales as `<moment>_scales`,
                and `weights`.
            moments: names of the moments, in the order of `rule`.
            rule: how moments advance and which direction results, given `scalars`.
            change: (parameter, direction, *leaves of `weights` and `trees`) -> the change of the
                parameter, *leaves of `weights`.
            params: the parameters; gradients and `trees` have their structure.
            grads: gradients.
            *trees: further values per parameter; None stands for 1.0 each.
            weights: names of trees that the optimizer stores next to moments.
            scalars: what else `rule` is given.
        """
        n = len(moments)

        def update_leaf(p: Array, g: Array, at: Any, *leaves: Any) -> tuple:  # noqa: ANN401
            direction, *new = self.turn.advance(rule, at, g, *leaves[:n], scalars=scalars)
            return *change(p, direction, *leaves[n:]), *new

        unit_factors = jax.tree.map(lambda _: 1.0, params)
        given = (unit_factors if tree is None else tree for tree in trees)
        stored = [joined(getattr(state, m), getattr(state, f"{m}_scales")) for m in moments]
        stored += [getattr(state, name) for name in weights]
        at = locations(params, self.turn.storage)
        leaves = jax.tree.map(update_leaf, params, grads, at, *stored, *given)
        changes, *results = unzip(1 + len(stored), leaves, params)
        fields = dict(zip((*weights, *moments), results, strict=True))
        for name in moments:
            fields[name], fields[f"{name}_scales"] = split_scales(fields[name])
        return changes, state._replace(updates=optax.safe_increment(state.updates), **fields)


def transform(
    schedule: Schedule,
    state_dtype: MomentStorage,
    init: Callable[[PyTree], State],
    update: Callable[[Step, PyTree, State, PyTree], tuple[PyTree, State]],
) -> optax.GradientTransformationExtraArgs:
    """Return (`init`, `update`: step, gradients, state, parameters) as an optax transform.

    Its update function takes `lr_scale`, a scalar factor on the learning rate (default 1), and
    `applied` (`optim.moments.Turn`).
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
        turn = Turn(state_dtype, state.updates, applied)
        return update(
            Step(schedule(state.updates) * lr_scale, lr_scale, turn), grads, state, params
        )

    return optax.GradientTransformationExtraArgs(init, update_with_extra_args)
