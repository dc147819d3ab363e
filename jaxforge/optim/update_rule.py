"""Plumbing shared by the update rules: an optax transform made of arithmetic per parameter."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxforge.optim.moments import Kept, Rule, Turn, joined, parted, places
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import unzip

Moments = tuple[PyTree, PyTree | None]
"""Moments as a state holds them: values, and the scales of values in eight bits."""


class Step(NamedTuple):
    """One update: its learning rate, `lr_scale` included, that factor, and how moments advance."""

    lr: Float[Array, "..."]
    lr_scale: Float[Array, ""] | float
    turn: Turn

    def advance(
        self,
        rule: Rule,
        change: Callable[..., tuple[Array, ...]],
        params: PyTree,
        grads: PyTree,
        moments: tuple[Moments, ...],
        *trees: PyTree,
        scalars: tuple[Array, ...] = (),
        n_results: int = 1,
    ) -> tuple[Any, ...]:
        """Return the trees of the `n_results` arrays of `change`, then the new moments.

        Args:
            rule: how moments advance and which direction results.
            change: (parameter, direction, *leaves of `trees`) -> the change of the parameter, and
                what else the optimizer keeps per parameter.
            params: the parameters; gradients and `trees` have their structure.
            grads: gradients.
            moments: the stored moments, in the order of `rule`.
            *trees: further values per parameter; None stands for 1.0 each.
            scalars: what else `rule` is given.
            n_results: how many arrays `change` returns.
        """
        n = len(moments)

        def update_leaf(p: Array, g: Array, at: Any, *leaves: Any) -> tuple:  # noqa: ANN401
            direction, *new = self.turn.advance(rule, at, g, *leaves[:n], scalars=scalars)
            return *change(p, direction, *leaves[n:]), *new

        ones = jax.tree.map(lambda _: 1.0, params)
        given = (ones if tree is None else tree for tree in trees)
        stored, at = (joined(*pair) for pair in moments), places(params, self.turn.kept)
        leaves = jax.tree.map(update_leaf, params, grads, at, *stored, *given)
        results = unzip(n_results + n, leaves, params)
        return *results[:n_results], *map(parted, results[n_results:])


def transform(
    schedule: Schedule,
    state_dtype: Kept,
    init: Callable[[PyTree], Any],
    update: Callable[[Step, PyTree, Any, PyTree], tuple[PyTree, Any]],
) -> optax.GradientTransformationExtraArgs:
    """Return (`init`, `update`: step, gradients, state, parameters) as an optax transform.

    Its update function takes `lr_scale`, a scalar factor on the learning rate (default 1), and
    `applied` (`optim.moments.Turn`).
    """

    def update_with_extra_args(
        grads: PyTree,
        state: Any,  # noqa: ANN401  # as of `init`
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        applied: Bool[Array, ""] | bool = True,
        **_: object,
    ) -> tuple[PyTree, Any]:
        assert params is not None
        turn = Turn(state_dtype, state.updates, applied)
        return update(
            Step(schedule(state.updates) * lr_scale, lr_scale, turn), grads, state, params
        )

    return optax.GradientTransformationExtraArgs(init, update_with_extra_args)
