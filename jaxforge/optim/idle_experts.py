"""Updates that skip experts without tokens, around any update rule (`optimizer.skip_idle_experts`).

In PyTorch a parameter without a gradient is skipped by every optimizer: its moments, its weight
decay and its own count of updates stand still. An expert that is a module of its own has no
gradient in an update in which no token reached it. Here experts are stacked, and the gradient of
such an expert is zero. So the rule runs for each stack of experts on its own, with counts of shape
[layers, experts, 1, ...] where it has a scalar otherwise, and results are kept for experts that
tokens reached:

    field of the rule's state     other parameters     experts
    mu, nu, ... (trees)           as the rule has it   selected expert by expert
    updates, ... (scalars)        as the rule has it   `expert_updates`, ...: [layers, experts] per
                                                       parameter

The learning rate follows the count of all updates, as `torch.optim.lr_scheduler` does. Everything
else that a rule makes of its count, such as AdamW's bias correction, follows the expert's own.
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
from jaxforge.optim.moments import advances_in_place
from jaxforge.optim.schedule import Rate
from jaxforge.optim.trees import Path, join, split, state_type

Build = Callable[[Rate, PyTree], optax.GradientTransformationExtraArgs]
"""(learning rate, logical axes of some parameters) -> their update rule."""

State = Any
"""State of an update rule: a named tuple of scalars and of trees like the parameters."""
Arrays = tuple[PyTree, State, PyTree]
"""Gradients, state and parameters."""


def skip_idle_experts(
    build: Build, rate: Rate, axes: PyTree
) -> optax.GradientTransformationExtraArgs:
    """Return an update rule that leaves experts without tokens alone.

    The update function takes `reached`, bool [layers, experts]: which experts got tokens in the
    update. By default those did whose gradient is not all zeros.

    Args:
        build: makes the rule for some of the parameters.
        rate: learning rate by the number of updates made.
        axes: logical axes of every parameter.
    """
    flat = flatten_dict(axes)
    paths = frozenset(path for path, names in flat.items() if names[:2] == (LAYERS, EXPERTS))
    whole, others = build(rate, axes), build(rate, split(axes, paths)[1])

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
        reached: Bool[Array, "layers experts"] | None = None,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, State]:
        kind = type(jax.eval_shape(whole.init, params))
        of_rule = kind(*(getattr(state, name) for name in kind._fields))
        updates, new = others.update(
            *_part((grads, of_rule, params), lambda tree: split(tree, paths)[1]), **extra
        )
        counts: dict[str, dict[Path, Array]] = {name: {} for name in _scalars(of_rule)}
        for path in sorted(paths):
            rule = build(rate.fixed_at(state.updates), _only(path, axes))
            own = {n: flatten_dict(getattr(state, EXPERT_FIELD + n))[path] for n in counts}
            only = functools.partial(_only, path)
            arrays = _part((grads, of_rule._replace(**own), params), only)
            change, after = _update_experts(rule, arrays, reached, extra)
            updates, new = join(updates, change), _joined(new, after)
            for name, of_name in counts.items():
                of_name[path] = getattr(after, name)
        return updates, _with_counts(new, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _update_experts(
    rule: optax.GradientTransformationExtraArgs,
    arrays: Arrays,
    reached: Bool[Array, "layers experts"] | None,
    extra: Mapping[str, Any],
) -> tuple[PyTree, State]:
    """Update one parameter of all experts, where tokens reached them.

    Args:
        rule: the update rule, whose learning rate does not depend on its count.
        arrays: gradient, the rule's state with scalars as arrays [layers, experts], parameter.
        reached: which experts got tokens; None asks the gradient.
        extra: other arguments of the rule.

    Moments that advance in place keep the old values by themselves (`moments.Turn`).
    """
    grads, state, params = arrays
    (shape,) = (leaf.shape for leaf in jax.tree.leaves(params))
    of_expert = (*shape[:2], *(1,) * len(shape[2:]))
    if reached is None:
        (grad,) = jax.tree.leaves(grads)
        reached = jnp.any(grad != 0, axis=range(2, grad.ndim))
    mask = reached.reshape(of_expert)
    counts = _scalars(state)
    old = state._replace(**{name: a.reshape(of_expert) for name, a in counts.items()})
    if "applied" in extra:
        extra = {**extra, "applied": extra["applied"] & mask}
    updates, new = rule.update(grads, old, params, **extra)

    def selected(n: Array, o: Array) -> Array:
        return n if advances_in_place(o) else jnp.where(mask, n, o)

    new = type(new)(*(jax.tree.map(selected, n, o) if n is not None else None
                      for n, o in zip(new, old, strict=True)))  # fmt: skip
    counts = {name: getattr(new, name).reshape(shape[:2]) for name in counts}
    return jax.tree.map(lambda u: jnp.where(mask, u, 0), updates), new._replace(**counts)


def _scalars(state: State) -> dict[str, Array]:
    """Return the fields of a rule's state that are no trees of parameters."""
    fields = state._asdict().items()
    return {name: f for name, f in fields if f is not None and not isinstance(f, dict)}


def _only(path: Path, tree: PyTree) -> PyTree:
    return split(tree, {path})[0]


def _part(arrays: Arrays, part: Callable[[PyTree], PyTree]) -> Arrays:
    """Return gradients, a rule's state and parameters for some of the parameters."""
    grads, state, params = arrays
    fields = (part(field) if isinstance(field, dict) else field for field in state)
    return part(grads), type(state)(*fields), part(params)


def _joined(first: State, other: State) -> State:
    """Return the trees of two states together, with the scalars of the first."""
    return type(first)(
        *(
            join(a or {}, b or {}) if isinstance(a, dict) or isinstance(b, dict) else a
            for a, b in zip(first, other, strict=True)
        )
    )


def _with_counts(state: State, counts: Mapping[str, Mapping[Path, Array]]) -> State:
    """Return a rule's state, and for each scalar a tree of the experts' own."""
    kind = state_type("IdleExpertsState", (*state._fields, *(EXPERT_FIELD + n for n in counts)))
    return kind(*state, *(unflatten_dict(of_name) for of_name in counts.values()))
