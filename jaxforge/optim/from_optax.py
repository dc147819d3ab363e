"""Adapter from optax optimizers to update rules."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jaxforge.optim.trees import state_type


def from_optax(
    transform: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Adapt an optax optimizer that includes its learning rate for `register_optimizer`.

    The state becomes a named tuple of arrays and of trees shaped like the parameters. Fields have
    the names that optax gives them (`mu`, `nu`, `trace`, `count`, ...), so that the state is
    sharded and saved like that of built-in rules. `lr_scale` multiplies the updates.

    Args:
        transform: an optax optimizer, such as `optax.sgd(schedule, momentum=0.9)`.
    """

    def init(params: PyTree) -> Any:  # noqa: ANN401  # a named tuple
        return _as_named_tuple(transform.init(params), jnp.zeros((), jnp.int32))

    def update(
        grads: PyTree,
        state: Any,  # noqa: ANN401  # the result of `init`
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        **_: object,
    ) -> tuple[PyTree, Any]:
        like = jax.eval_shape(transform.init, params)
        inner = jax.tree.unflatten(jax.tree.structure(like, is_leaf=_is_dict), state[1:])
        updates, inner = transform.update(grads, inner, params)
        scaled = jax.tree.map(lambda u: u * lr_scale, updates)
        return scaled, _as_named_tuple(inner, optax.safe_increment(state.updates))

    return optax.GradientTransformationExtraArgs(init, update)


def _is_dict(node: object) -> bool:
    return isinstance(node, dict)


def _as_named_tuple(state: PyTree, updates: Array) -> Any:  # noqa: ANN401  # a class of its own
    """Name fields by the last attribute of their path; number repeated names: count, count_2."""
    parts = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_dict)
    uses, names = Counter({"updates": 1}), ["updates"]
    for path, _ in parts:
        name = next((k.name for k in reversed(path) if hasattr(k, "name")), "state")
        uses[name] += 1
        names.append(name if uses[name] == 1 else f"{name}_{uses[name]}")
    return state_type("OptaxState", tuple(names))(updates, *(part for _, part in parts))
