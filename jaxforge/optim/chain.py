"""Links of the optimizer chain, as optax transforms.

    clip_by_global_norm -> scale_by_<direction> -> scale_by_factors -> scale_by_rate
                                                                    -> decay_weights

The direction of a parameter is computed from its gradient and its moments, which a storage format
holds (`optim.moments`). A direction knows neither rate nor decay. Links after it receive
the learning rate of the update from `with_rate`, as the argument `lr`.

`optax.add_decayed_weights` precedes the rate: p - lr (d + decay · p). Here the decay follows it, in
the order of operations of PyTorch: p (1 - lr · decay) - lr · d. The results differ only by
rounding, and a run that continues from a PyTorch checkpoint stays much closer to the original.

The number of updates is in the state of the direction alone, because a checkpoint holds it once.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.model.linear import times
from jaxforge.optim.moments import (
    MomentRule,
    MomentStorage,
    MomentUpdate,
    init_moments,
    join_scales,
    param_infos,
    split_scales,
)
from jaxforge.optim.schedule import Schedule
from jaxforge.optim.trees import state_type, unzip

Links = list[optax.GradientTransformation]
"""Consecutive transforms of a chain."""

Factors = Callable[[PyTree], PyTree]
"""Tree of arrays, of all parameters or some -> tree of floats with its structure."""

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_


def global_norm(grads: PyTree) -> Float[Array, ""]:
    """Return √Σ g² over all leaves, in float32.

    `optax.tree.norm` also adds squares of imaginary parts, which takes five times as many
    operations.
    """
    # One sum per leaf: the partitioner then reduces scalars over devices, not gradients.
    squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads))
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip gradients as PyTorch does: g ← g · min(1, max_norm / (‖g‖ + 1e-6)).

    ‖g‖ is the norm over all gradients. `optax.clip_by_global_norm` has no epsilon.
    """

    def clip(grads: PyTree, _: PyTree | None) -> PyTree:
        scale = jnp.minimum(1.0, max_norm / (global_norm(grads) + _CLIP_EPS))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)

    return optax.stateless(clip)


def scale_by_rule(
    rule: MomentRule,
    moments: Mapping[str, jnp.dtype],
    storage: MomentStorage,
    scalars: Callable[[Int[Array, "..."]], tuple[Array, ...]] = lambda t: (),
) -> optax.GradientTransformationExtraArgs:
    """Return an elementwise direction whose moments are kept in a storage format.

    The state is a named tuple: `updates`, the moments, and their scales as `<moment>_scales`, which
    are None unless the format has scales. With a format that is updated in place, the argument
    `applied` of an update keeps the old moments after a bad step (`moments.MomentUpdate`).

    Args:
        rule: computes the direction and the new moments, in float32.
        moments: names of the moments in the order of the rule, and their 8-bit formats.
        storage: storage format of the moments.
        scalars: number of updates, this one included -> further arguments of the rule.
    """
    scales = {name: f"{name}_scales" for name in moments}
    kind = state_type("MomentsState", ("updates", *moments, *scales.values()))

    def init(params: PyTree) -> Any:  # noqa: ANN401  # a named tuple
        fields: dict[str, Any] = {"updates": jnp.zeros((), jnp.int32)}
        for name, dtype in moments.items():
            fields[name], fields[scales[name]] = init_moments(params, storage, dtype)
        return kind(**fields)

    def update(
        grads: PyTree,
        state: Any,  # noqa: ANN401
        params: PyTree | None = None,
        *,
        applied: Bool[Array, "..."] | bool = True,
        **_: object,
    ) -> tuple[PyTree, Any]:
        step = MomentUpdate(storage, state.updates, applied)
        arguments = scalars(state.updates + 1)

        def update_leaf(info: Any, g: Array, *stored: Any) -> tuple[Any, ...]:  # noqa: ANN401
            return step.apply(rule, info, g, *stored, scalars=arguments)

        # Moments with scales are single leaves (`Packed`) in between.
        stored = [join_scales(getattr(state, n), getattr(state, scales[n])) for n in moments]
        leaves = jax.tree.map(update_leaf, param_infos(grads, storage), grads, *stored)
        directions, *new = unzip(1 + len(stored), leaves, grads)
        # The caller discards the count of a bad step, but not moments that are updated in place.
        fields: dict[str, Any] = {"updates": optax.safe_increment(state.updates)}
        for name, trees in zip(moments, new, strict=True):
            fields[name], fields[scales[name]] = split_scales(trees)
        return directions, kind(**fields)

    return optax.GradientTransformationExtraArgs(init, update)


def scale_by_factors(factors: Factors) -> optax.GradientTransformation:
    """Return a transform that multiplies the update of each parameter by a factor."""
    return optax.stateless(lambda updates, _: jax.tree.map(times, updates, factors(updates)))


def scale_by_rate(factors: Factors) -> optax.GradientTransformationExtraArgs:
    """Return a transform that multiplies updates by -lr · factor.

    Args:
        factors: factors on the learning rate of each parameter, as of groups of PyTorch.
    """

    return stateless(
        lambda updates, params, lr: jax.tree.map(
            lambda u, factor: times(-lr, factor) * u, updates, factors(updates)
        )
    )


def decay_weights(decays: Factors, *, is_cautious: bool) -> optax.GradientTransformationExtraArgs:
    """Return a transform that adds decoupled weight decay: u ← p (1 - lr · decay) + u - p.

    The arithmetic is float32, and the change is rounded once when it is added to p.

    Cautious decay (Chen et al., 2025, arXiv:2510.12402) leaves out the elements that the step moves
    away from zero, where u · p > 0.

    Args:
        decays: weight decay of each parameter times its factor on the learning rate; 0 for none.
        is_cautious: whether the decay is cautious.
    """

    def decay_leaf(u: Array, p: Array, decay: float, lr: Float[Array, ""]) -> Array:
        if decay == 0.0:
            return u
        # In bfloat16, a small decay of p would be rounded away.
        p = p.astype(jnp.float32)
        after_decay = 1 - times(lr, decay)
        if is_cautious:
            after_decay = jnp.where(u * p <= 0, after_decay, 1.0)
        return p * after_decay + u - p

    return stateless(
        lambda updates, params, lr: jax.tree.map(
            lambda u, p, decay: decay_leaf(u, p, decay, lr), updates, params, decays(updates)
        )
    )


def stateless(
    function: Callable[[PyTree, PyTree, Float[Array, ""]], PyTree],
) -> optax.GradientTransformationExtraArgs:
    """Return a transform (updates, parameters, lr) -> updates without a state."""

    def update(
        updates: PyTree,
        state: optax.EmptyState,
        params: PyTree | None = None,
        *,
        lr: Float[Array, ""],
        **_: object,
    ) -> tuple[PyTree, optax.EmptyState]:
        return function(updates, params, lr), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def updates_made(opt_state: PyTree) -> Array:
    """Return the number of updates that an optimizer state counts, without skipped steps."""
    return optax.tree.get(opt_state, "updates")


def with_rate(
    schedule: Schedule, chain: optax.GradientTransformationExtraArgs
) -> optax.GradientTransformationExtraArgs:
    """Return a chain whose links receive the learning rate.

    The update function takes `lr_scale`, the factor of a phase (default 1). It passes on
    `lr` = schedule(updates made) · lr_scale, `updates_made` before this update, `lr_scale` and all
    other arguments.

    Args:
        schedule: learning rate by the number of updates made.
        chain: the chain.
    """

    def update(
        grads: PyTree,
        state: PyTree,
        params: PyTree | None = None,
        *,
        lr_scale: Float[Array, ""] | float = 1.0,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, PyTree]:
        # The rate of update n is that of step n - 1 of the schedule, as in PyTorch.
        n = updates_made(state)
        extra |= {"lr": schedule(n) * lr_scale, "lr_scale": lr_scale, "updates_made": n}
        return chain.update(grads, state, params, **extra)

    return optax.GradientTransformationExtraArgs(chain.init, update)


def merged(links: Links) -> optax.GradientTransformationExtraArgs:
    """Return the chain of the links, whose state is one named tuple of all their fields."""
    chain = optax.chain(*links)

    def init(params: PyTree) -> Any:  # noqa: ANN401  # a named tuple
        return _merge_states(chain.init(params))

    def update(
        grads: PyTree,
        state: Any,  # noqa: ANN401
        params: PyTree | None = None,
        **extra: Any,  # noqa: ANN401
    ) -> tuple[PyTree, Any]:
        # Fields are taken by name, so that a state does not depend on the order of the links.
        like = jax.eval_shape(chain.init, params)
        states = tuple(type(s)(*(getattr(state, name) for name in s._fields)) for s in like)
        updates, states = chain.update(grads, states, params, **extra)
        return updates, _merge_states(states)

    return optax.GradientTransformationExtraArgs(init, update)


def _merge_states(states: tuple[Any, ...]) -> Any:  # noqa: ANN401
    fields = {name: field for state in states for name, field in state._asdict().items()}
    return state_type("ChainState", tuple(fields))(**fields)
