"""Adapter from optax optimizers to update rules, and optax optimizers by name."""

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jaxforge.cli.suggestions import hint
from jaxforge.errors import UserError
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import state_type

_MASKS = ("mask", "weight_decay_mask")
"""Names of optax's argument that selects the parameters that decay."""


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
        return _as_named_tuple(transform.init(params), jnp.zeros((), jnp.int32), params)

    def update(
        grads: PyTree,
        state: Any,  # noqa: ANN401  # the result of `init`
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        **_: object,
    ) -> tuple[PyTree, Any]:
        like = jax.eval_shape(transform.init, params)
        parts, structure = jax.tree.flatten(like, is_leaf=_is_like(params))
        inner = jax.tree.unflatten(structure, map(_with_masked, parts, state[1:]))
        updates, inner = transform.update(grads, inner, params)
        scaled = jax.tree.map(lambda u: u * lr_scale, updates)
        return scaled, _as_named_tuple(inner, optax.safe_increment(state.updates), params)

    return optax.GradientTransformationExtraArgs(init, update)


def _is_dict(node: object) -> bool:
    return isinstance(node, dict)


def _is_like(params: PyTree) -> Callable[[object], bool]:
    """Return a function that tells trees of parameters from other dicts of optax."""
    return lambda node: isinstance(node, dict) and node.keys() <= params.keys()


def _as_named_tuple(state: PyTree, updates: Array, params: PyTree) -> Any:  # noqa: ANN401  # a class of its own
    """Name fields by the last attribute of their path; number repeated names: count, count_2."""
    parts = jax.tree_util.tree_leaves_with_path(state, is_leaf=_is_like(params))
    uses, names = Counter({"updates": 1}), ["updates"]
    for path, _ in parts:
        name = next((k.name for k in reversed(path) if hasattr(k, "name")), "state")
        uses[name] += 1
        names.append(name if uses[name] == 1 else f"{name}_{uses[name]}")
    fields = (_without_masked(part) for _, part in parts)
    return state_type("OptaxState", tuple(names))(updates, *fields)


def _without_masked(part: Any) -> Any:  # noqa: ANN401
    """Return a part of a state without the parameters that optax masks."""
    if not _is_dict(part):
        return part
    unmasked = {name: _without_masked(node) for name, node in part.items() if not _is_masked(node)}
    return {name: node for name, node in unmasked.items() if not _is_dict(node) or node}


def _with_masked(like: Any, part: Any) -> Any:  # noqa: ANN401
    """Return a part with masks at the places where `like` has them."""
    if not _is_dict(like):
        return part
    return {
        name: node if _is_masked(node) else _with_masked(node, part.get(name, {}))
        for name, node in like.items()
    }


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def named_optax(
    name: str,
    schedule: Schedule,
    options: Mapping[str, bool | float | str],
    weight_decay: float,
    decay: PyTree,
    *,
    section: str = "optimizer",
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer of optax by its name.

    Weight decay is that of the optimizer if it has any, else decoupled: p ← p - lr · decay · p.

    Args:
        name: such as "optax.adan" or "optax.contrib.ademamix".
        schedule: learning rate by the number of updates made.
        options: further arguments.
        weight_decay: the weight decay.
        decay: weight decay of every parameter, `weight_decay` or 0.
        section: section of the config that names the optimizer, for messages.

    Raises:
        UserError: optax has no such optimizer, it does not take the options, or it needs more than
            gradients and parameters.
    """
    factory = _factory(name, section)
    takes = inspect.signature(factory).parameters
    reserved = {"learning_rate", "weight_decay", *_MASKS}
    for key in options:
        if key not in takes.keys() - reserved:
            known = sorted(takes.keys() - reserved)
            decay_key = " and optimizer.weight_decay" if section == "optimizer" else ""
            keys = f"; set {section}.lr{decay_key}" if key in reserved else ""
            raise UserError(
                f'{section}.options: {name} takes {", ".join(known)}, not "{key}"'
                f"{hint(key, known)}{keys}"
            )
    arguments: dict[str, Any] = {**options, "learning_rate": schedule}
    is_decayed = jax.tree.map(lambda rate: rate > 0, decay)
    mask = next((mask for mask in _MASKS if mask in takes), "")
    decays_itself = "weight_decay" in takes and mask
    if decays_itself:
        arguments |= {"weight_decay": weight_decay, mask: is_decayed}
    elif "weight_decay" in takes:
        arguments["weight_decay"] = 0.0
    try:
        transform = factory(**arguments)
        _check_update(transform, decay)
    except (TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f'{section}.name = "{name}" with {section}.options = {dict(options)}: '
            f"{str(error).rstrip('.')}. Rules that need more than gradients and a schedule cannot "
            "be used by name: register a builder of your own (docs/library.md)"
        ) from error
    if decays_itself:
        return from_optax(transform)
    decoupled = optax.add_decayed_weights(lambda n: -weight_decay * schedule(n), is_decayed)
    return from_optax(optax.chain(transform, decoupled))


def _factory(name: str, section: str) -> Any:  # noqa: ANN401
    """Return the function of optax that builds an optimizer."""
    modules = {"optax": optax, "optax.contrib": optax.contrib}
    factories = {
        f"{prefix}.{key}": value
        for prefix, module in modules.items()
        for key, value in vars(module).items()
        if inspect.isfunction(value)
        and not key.startswith(("_", "scale_by_"))
        and "learning_rate" in inspect.signature(value).parameters
    }
    if name not in factories:
        raise UserError(
            f'{section}.name = "{name}": optax {optax.__version__} has no such optimizer'
            f"{hint(name, tuple(factories))}"
        )
    return factories[name]


def _check_update(transform: optax.GradientTransformation, like: PyTree) -> None:
    """Trace an update of small parameters, so that missing arguments are noticed at the start."""
    # Shapes, because devices that are only compiled for hold no arrays.
    params = jax.tree.map(lambda _: jax.ShapeDtypeStruct((8, 8), jnp.float32), like)
    jax.eval_shape(lambda p: transform.update(p, transform.init(p), p), params)
