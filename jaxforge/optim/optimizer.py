"""The optimizer as one optax chain: clip · update rule with its decay groups and schedule."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Float, PyTree

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.optimizer import OPTIMIZERS, OptimizerConfig
from jaxforge.config.train import EIGHT_BIT, TrainConfig
from jaxforge.model import mup
from jaxforge.model.linear import is_matrix
from jaxforge.optim.adamw import adamw
from jaxforge.optim.idle_experts import skip_idle_experts
from jaxforge.optim.lion import lion
from jaxforge.optim.moments import EightBit, MomentStorage, OnHost
from jaxforge.optim.muon import muon, muon_takes
from jaxforge.optim.rounding import compensation
from jaxforge.optim.schedule import Rate, learning_rate
from jaxforge.optim.schedule_free import schedule_free_adamw
from jaxforge.parallel.sharding import Axes

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_

OptimizerBuilder = Callable[[JobConfig, Rate, PyTree], optax.GradientTransformationExtraArgs]
"""(config, learning rate by updates made, logical axes of every parameter) -> update rule."""


def build_optimizer(config: JobConfig, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    """The chain that `[optimizer]`, `[scheduler]` and `train.grad_clip_norm` ask for.

    Args:
        config: the whole config.
        axes: logical axes of every parameter (`Model.axes`).
    """

    def build(schedule: Rate, axes: PyTree) -> optax.GradientTransformationExtraArgs:
        # With those of the decay patterns that are found in the names of some parameters.
        optimizer = config.optimizer.for_names(flatten_dict(axes, sep="."))
        part = config.model_copy(update={"optimizer": optimizer})
        return OPTIMIZERS[config.optimizer.name](part, schedule, axes)

    schedule = learning_rate(config)
    if config.skips_idle_experts:
        config.optimizer.check_patterns(flatten_dict(axes, sep="."))
        rule = skip_idle_experts(build, schedule, axes)
    else:
        rule = OPTIMIZERS[config.optimizer.name](config, schedule, axes)
    last = [compensation()] if config.train.param_rounding == "kahan" else []
    if config.optimizer.name not in OPTIMIZERS.ours and mup.width_ratio(config.model) != 1.0:
        factors = _factors(mup.lr_factor, config, axes)
        scale = functools.partial(jax.tree.map, lambda update, factor: update * factor)
        last.insert(0, optax.stateless(lambda updates, _: scale(updates, factors)))
    return optax.chain(clip_by_global_norm(config.train.grad_clip_norm), rule, *last)


def register_optimizer(name: str) -> Callable[[OptimizerBuilder], OptimizerBuilder]:
    """Decorates what builds the update rule that `optimizer.name` calls `name`.

    A rule gets clipped gradients. It counts in `updates` of its state, a named tuple whose moments
    are dicts shaped like the parameters or a part of them, and it takes `lr_scale`, a factor on the
    learning rate. `from_optax` makes such a rule of an optax optimizer, `decay_groups` says what
    decays. With muP, what it adds to a parameter is multiplied by `model.mup.lr_factor`.
    """
    return OPTIMIZERS.register(name)


@register_optimizer("muon")
def _muon(config: JobConfig, schedule: Rate, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    optimizer = config.optimizer
    return muon(
        schedule,
        schedule.with_peak(optimizer.muon_adam_lr or optimizer.lr),
        axes=axes,
        momentum=optimizer.muon_momentum,
        ns_steps=optimizer.muon_ns_steps,
        muon_factors=_factors(mup.muon_factor, config, axes),
        takes=lambda shape, of: muon_takes(mup.base_shape(config.model, shape, of), of),
        **_common(config, axes),
    )


def _register(name: str, rule: Callable[..., optax.GradientTransformationExtraArgs]) -> None:
    register_optimizer(name)(lambda config, schedule, axes: rule(schedule, **_common(config, axes)))


_register("adamw", adamw)
_register("lion", lambda schedule, eps, **options: lion(schedule, **options))
_register("schedule_free_adamw", schedule_free_adamw)


def _common(config: JobConfig, axes: PyTree) -> dict[str, Any]:
    """Return the arguments that all built-in rules share."""
    return {
        "betas": config.optimizer.betas,
        # Adam's, as much smaller as gradients are (`model.mup`).
        "eps": config.optimizer.eps * mup.output_multiplier(config.model),
        "weight_decay": decay_groups(axes, config.optimizer),
        "state_dtype": _moment_storage(config.train, axes),
        "lr_factors": _factors(mup.lr_factor, config, axes),
    }


def _factors(
    factor: Callable[[ModelConfig, Axes], float], config: JobConfig, axes: PyTree
) -> PyTree:
    """A factor of muP's on the steps of every parameter."""
    named = flatten_dict(axes)
    return unflatten_dict({path: factor(config.model, of) for path, of in named.items()})


def _moment_storage(train: TrainConfig, axes: PyTree) -> MomentStorage:
    """Return the storage format of moments."""
    if train.opt_state_dtype == EIGHT_BIT:
        return EightBit(axes, train.seed)
    dtype = jnp.dtype(train.opt_state_dtype)
    return OnHost(axes, dtype) if "optimizer" in train.offload else dtype


def decay_groups(axes: PyTree, optimizer: OptimizerConfig) -> PyTree:
    """The weight decay of every parameter, 0 where there is none.

    Matrices decay, vectors (norm weights, biases) do not, but for what the patterns name; layers do
    not count as a dimension.

    Args:
        axes: logical axes of every parameter.
        optimizer: the `[optimizer]` section.

    Raises:
        UserError: a pattern is found in no name.
    """
    named = flatten_dict(axes, sep=".")
    optimizer.check_patterns(named)
    decays = {
        name: optimizer.weight_decay * optimizer.decays(name, is_matrix=is_matrix(of))
        for name, of in named.items()
    }
    return unflatten_dict(decays, sep=".")


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clips as torch does: g ← g · min(1, max_norm / (‖g‖ + 1e-6)), ‖g‖ over all gradients.

    optax's own has no epsilon.
    """

    def clip(grads: PyTree, _: PyTree | None) -> PyTree:
        scale = jnp.minimum(1.0, max_norm / (global_norm(grads) + _CLIP_EPS))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)

    return optax.stateless(clip)


def global_norm(grads: PyTree) -> Float[Array, ""]:
    """√Σ g² over all leaves, in float32.

    `optax.tree.norm` also adds the squares of imaginary parts, in five times as many operations.
    """
    squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads))
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def updates_made(opt_state: PyTree) -> Array:
    """The number of updates in an optimizer state: skipped steps are not among them."""
    return optax.tree.get(opt_state, "updates")
