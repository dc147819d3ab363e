"""Updates that skip experts without tokens, around any update rule (`optimizer.skip_idle_experts`).

PyTorch optimizers skip a parameter without a gradient: its moments, its weight decay and its count
of updates do not change. An expert that is a module of its own has no gradient in an update in
which no token reaches it. Here experts are stacked, and the gradient of such an expert is zero. The
rule therefore runs separately for each stacked expert parameter, with counts of shape
[layers, experts, 1, ...] instead of scalars. Only experts that tokens reached take the results:

    field of the rule's state     other parameters     experts
    mu, nu, ... (trees)           unchanged            selected expert by expert
    updates, ... (scalars)        unchanged            `expert_updates`, ...: [layers, experts] per
                                                       parameter

The learning rate depends on the count of all updates, as in `torch.optim.lr_scheduler`. All other
uses of the count, such as AdamW's bias correction, depend on the expert's own count.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, PyTree

from jaxforge.config.model import EXPERTS, LAYERS
from jaxforge.config.optimizer import EXPERT_FIELD
from jaxforge.optim.chain import Links, merged
from jaxforge.optim.moments import is_updated_in_place
from jaxforge.optim.schedule import Rate
from jaxforge.optim.trees import Path, join, split, state_type

Build = Callable[[Rate, PyTree], Links]
"""(learning rate, logical axes of some parameters) -> links of their update rule."""

State = Any
"""State of an update rule: a named tuple of scalars and of trees like the parameters."""
Arrays = tuple[PyTree, State, PyTree]
"""Gradients, state and parameters."""


def skip_idle_experts(
    build: Build, rate: Rate, axes: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Return an update rule that does not change experts without tokens.

    The update function takes `reached`, by stack bool [layers, experts]: the experts that got
    tokens in the update. By default these are the experts whose gradient is not all zeros.

    Args:
        build: returns the links of the rule for a subset of the parameters.
        rate: learning rate by the number of updates made.
        axes: logical axes of every parameter.
    """
    flat = flatten_dict(axes)
    paths = frozenset(path for path, names in flat.items() if names[:2] == (LAYERS, EXPERTS))
    # `whole` has the state's structure. `dense` updates all but the stacked experts, which one rule
    # each updates with the rate of the whole state and the counts of its experts.
    whole = merged(build(rate, axes))
    dense = merged(build(rate, split(axes, paths)[1]))

    def init(params: PyTree) -> State:
        state, flat = whole.init(params), flatten_dict(params)
        counts = {
            name: {path: jnp.broadcast_to(value, flat[path].shape[:2]) for path in paths}
            for name, value in _scalars(state).items()
        }
        return _with_counts(state, counts)

    def update(
        grads: PyTree,
        state: State,
        params: PyTree | None = None,
        *,
        reached: Mapping[str, Bool[Array, "layers experts"]] | None = None,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, State]:
        # The state has more fields than the rule's: the counts of experts.
        kind = type(jax.eval_shape(whole.init, params))
        rule_state = kind(*(getattr(state, name) for name in kind._fields))
        updates, new = dense.update(
            *_select((grads, rule_state, params), lambda tree: split(tree, paths)[1]), **extra
        )
        counts: dict[str, dict[Path, Array]] = {name: {} for name in _scalars(rule_state)}
        for path in sorted(paths):
            select = functools.partial(_select_path, path)
            # The schedule follows the updates of the run, bias correction those of each expert.
            rule = merged(build(rate.fixed_at(state.updates), select(axes)))
            counts_of_experts = {
                n: flatten_dict(getattr(state, EXPERT_FIELD + n))[path] for n in counts
            }
            arrays = _select((grads, rule_state._replace(**counts_of_experts), params), select)
            is_reached = None if reached is None else reached[path[0]]
            change, after = _update_experts(rule, arrays, is_reached, extra)
            updates, new = join(updates, change), _join_states(new, after)
            for name, counts_by_path in counts.items():
                counts_by_path[path] = getattr(after, name)
        return updates, _with_counts(new, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_experts(
    rule: optax.GradientTransformationExtraArgs,
    arrays: Arrays,
    reached: Bool[Array, "layers experts"] | None,
    extra: Mapping[str, Any],
) -> tuple[PyTree, State]:
    """Update one stacked parameter for the experts that tokens reached.

    Moments that are updated in place keep the old values themselves (`moments.MomentUpdate`).

    Args:
        rule: the update rule, whose learning rate does not depend on its count.
        arrays: gradient, the rule's state with scalars as arrays [layers, experts], parameter.
        reached: experts that got tokens; None derives them from the gradient.
        extra: other arguments of the rule.
    """
    grads, state, params = arrays
    (shape,) = (leaf.shape for leaf in jax.tree.leaves(params))
    broadcast_shape = (*shape[:2], *(1,) * len(shape[2:]))  # [layers, experts, 1, ...]
    if reached is None:
        (grad,) = jax.tree.leaves(grads)
        # The gradient of an expert without tokens is exactly zero.
        reached = jnp.any(grad != 0, axis=range(2, grad.ndim))
    mask = reached.reshape(broadcast_shape)
    counts = _scalars(state)
    old = state._replace(**{name: a.reshape(broadcast_shape) for name, a in counts.items()})
    if "applied" in extra:
        extra = {**extra, "applied": extra["applied"] & mask}
    updates, new = rule.update(grads, old, params, **extra)

    def selected(n: Array, o: Array) -> Array:
        # Old values of these are overwritten already: `applied` has selected them in the rule.
        return n if is_updated_in_place(o) else jnp.where(mask, n, o)

    new = type(new)(*(jax.tree.map(selected, n, o) if n is not None else None
                      for n, o in zip(new, old, strict=True)))  # fmt: skip
    counts = {name: getattr(new, name).reshape(shape[:2]) for name in counts}
    return jax.tree.map(lambda u: jnp.where(mask, u, 0), updates), new._replace(**counts)


def _scalars(state: State) -> dict[str, Array]:
    """Return the fields of a rule's state that are not trees of parameters."""
    fields = state._asdict().items()
    return {name: f for name, f in fields if f is not None and not isinstance(f, dict)}


def _select_path(path: Path, tree: PyTree) -> PyTree:
    return split(tree, {path})[0]


def _select(arrays: Arrays, select: Callable[[PyTree], PyTree]) -> Arrays:
    """Return gradients, a rule's state and parameters for a subset of the parameters."""
    grads, state, params = arrays
    fields = (select(field) if isinstance(field, dict) else field for field in state)
    return select(grads), type(state)(*fields), select(params)


def _join_states(first: State, other: State) -> State:
    """Return a state with the trees of two states and the scalars of the first."""
    return type(first)(
        *(
            join(a or {}, b or {}) if isinstance(a, dict) or isinstance(b, dict) else a
            for a, b in zip(first, other, strict=True)
        )
    )


def _with_counts(state: State, counts: Mapping[str, Mapping[Path, Array]]) -> State:
    """Return a rule's state extended by a tree of the experts' counts for each scalar."""
    kind = state_type("IdleExpertsState", (*state._fields, *(EXPERT_FIELD + n for n in counts)))
    return kind(*state, *(unflatten_dict(by_path) for by_path in counts.values()))
