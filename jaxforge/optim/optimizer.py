"""The optimizer as one optax chain: clipping, update rule with decay groups, schedule."""

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
from jaxforge.errors import UserError
from jaxforge.model import mup
from jaxforge.model.linear import is_matrix
from jaxforge.optim.adamw import adamw
from jaxforge.optim.freezing import frozen_paths, trained_only
from jaxforge.optim.from_optax import named_optax
from jaxforge.optim.idle_experts import skip_idle_experts
from jaxforge.optim.lion import lion
from jaxforge.optim.moments import EightBit, MomentStorage, OnHost
from jaxforge.optim.muon import Variant, muon, muon_takes, rms_scale, spectral_scale
from jaxforge.optim.rounding import compensation
from jaxforge.optim.schedule import Rate, learning_rate
from jaxforge.optim.schedule_free import schedule_free_adamw
from jaxforge.optim.soap import Preconditioning, soap
from jaxforge.optim.trees import split
from jaxforge.parallel.sharding import Axes

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_

OptimizerBuilder = Callable[[JobConfig, Rate, PyTree], optax.GradientTransformationExtraArgs]
"""(config, learning rate by updates made, logical axes of every parameter) -> update rule."""


def build_optimizer(config: JobConfig, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of `[optimizer]`, `[scheduler]` and `train.grad_clip_norm`.

    Args:
        config: the whole config.
        axes: logical axes of every parameter (`Model.axes`).
    """

    def build(schedule: Rate, axes: PyTree) -> optax.GradientTransformationExtraArgs:
        # `axes` may be a subset of the parameters: drop decay patterns that match none of them.
        optimizer = config.optimizer.for_names(flatten_dict(axes, sep="."))
        subset_config = config.with_values({"optimizer": optimizer})
        return OPTIMIZERS[config.optimizer.name](subset_config, schedule, axes)

    schedule, optimizer = learning_rate(config), config.optimizer
    optimizer.check_patterns(flatten_dict(axes, sep="."))
    frozen = frozen_paths(axes, config)
    axes = split(axes, frozen)[1]
    if not axes:
        raise UserError(
            f"optimizer.freeze_patterns = {list(optimizer.freeze_patterns)} freezes all adapters: "
            "there is nothing to train. Remove the patterns that match lora_a and lora_b"
        )
    make = functools.partial(skip_idle_experts, build) if config.skips_idle_experts else build
    rules = [make(schedule, axes)]
    has_factors = mup.width_ratio(config.model) != 1.0 or optimizer.lr_patterns
    if optimizer.name not in OPTIMIZERS.ours and has_factors:
        factors = _factors(mup.lr_factor, config, axes)
        scale = functools.partial(jax.tree.map, lambda update, factor: update * factor)
        rules.append(optax.stateless(lambda updates, _: scale(updates, factors)))
    if config.train.param_rounding == "kahan":
        rules.append(compensation())
    if frozen:
        rules = [trained_only(rule, frozen) for rule in rules]
    return optax.chain(clip_by_global_norm(config.train.grad_clip_norm), *rules)


def register_optimizer(name: str) -> Callable[[OptimizerBuilder], OptimizerBuilder]:
    """Return a decorator that registers the builder of an update rule for `optimizer.name`.

    A rule receives clipped gradients and takes `lr_scale`, a factor on the learning rate. Its state
    is a named tuple that counts updates in `updates`; moments are dicts shaped like the parameters
    or a subset of them. `from_optax` makes such a rule from an optax optimizer. `decay_groups`
    returns the weight decay of each parameter. With muP, the changes of a parameter are multiplied
    by `model.mup.lr_factor`.
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
        takes=lambda shape, names: muon_takes(mup.base_shape(config.model, shape, names), names),
        variant=Variant(
            nesterov=optimizer.muon_nesterov,
            beta2=optimizer.muon_beta2 if optimizer.muon_variant == "normuon" else None,
            scale=rms_scale if optimizer.muon_scale == "rms" else spectral_scale,
        ),
        **_common(config, axes),
    )


@register_optimizer("soap")
def _soap(config: JobConfig, schedule: Rate, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    optimizer = config.optimizer
    beta = (
        optimizer.betas[1] if optimizer.soap_shampoo_beta is None else optimizer.soap_shampoo_beta
    )
    preconditioning = Preconditioning(
        beta, optimizer.soap_precondition_frequency, optimizer.soap_max_precond_dim
    )
    common = _common(config, axes)
    return soap(schedule, axes=axes, preconditioning=preconditioning, **common)


def _register(name: str, rule: Callable[..., optax.GradientTransformationExtraArgs]) -> None:
    register_optimizer(name)(lambda config, schedule, axes: rule(schedule, **_common(config, axes)))


_register("adamw", adamw)
_register("lion", lambda schedule, eps, **options: lion(schedule, **options))
_register(
    "schedule_free_adamw",
    lambda schedule, is_cautious, **options: schedule_free_adamw(schedule, **options),
)


@register_optimizer(OPTIMIZERS.family)
def _of_optax(
    config: JobConfig, schedule: Rate, axes: PyTree
) -> optax.GradientTransformationExtraArgs:
    optimizer = config.optimizer
    decay = decay_groups(axes, optimizer)
    return named_optax(optimizer.name, schedule, optimizer.options, optimizer.weight_decay, decay)


def _common(config: JobConfig, axes: PyTree) -> dict[str, Any]:
    """Return the arguments that all built-in rules share."""
    return {
        "betas": config.optimizer.betas,
        # Adam's epsilon shrinks with the gradients (`model.mup`).
        "eps": config.optimizer.eps * mup.output_multiplier(config.model),
        "weight_decay": _decay_at_own_rate(axes, config.optimizer),
        "state_dtype": _moment_storage(config.train, axes),
        "lr_factors": _factors(mup.lr_factor, config, axes),
        "is_cautious": config.optimizer.cautious_weight_decay,
    }


def _factors(
    factor: Callable[[ModelConfig, Axes], float], config: JobConfig, axes: PyTree
) -> PyTree:
    """Return the factor on the steps of every parameter: muP's times that of `lr_patterns`."""
    factors = {
        path: factor(config.model, names) * config.optimizer.lr_factor(".".join(path))
        for path, names in flatten_dict(axes).items()
    }
    return unflatten_dict(factors)


def _moment_storage(train: TrainConfig, axes: PyTree) -> MomentStorage:
    if train.opt_state_dtype == EIGHT_BIT:
        return EightBit(axes, train.seed)
    dtype = jnp.dtype(train.opt_state_dtype)
    return OnHost(axes, dtype) if "optimizer" in train.offload else dtype


def _decay_at_own_rate(axes: PyTree, optimizer: OptimizerConfig) -> PyTree:
    """Return weight decay times the factor on the learning rate.

    PyTorch multiplies the decay of a parameter group by the learning rate of the group, and rules
    here multiply it by the learning rate of all.
    """
    flat = flatten_dict(decay_groups(axes, optimizer), sep=".")
    return unflatten_dict({n: d * optimizer.lr_factor(n) for n, d in flat.items()}, sep=".")


def decay_groups(axes: PyTree, optimizer: OptimizerConfig) -> PyTree:
    """Return the weight decay of every parameter; 0 for none.

    Matrices decay and vectors (norm weights, biases) do not, except for parameters that the
    patterns name. The dimension of layers does not count.

    Args:
        axes: logical axes of every parameter.
        optimizer: the `[optimizer]` section.

    Raises:
        UserError: a pattern matches no parameter name.
    """
    flat = flatten_dict(axes, sep=".")
    optimizer.check_patterns(flat)
    decays = {
        name: optimizer.weight_decay * optimizer.decays(name, is_matrix=is_matrix(param_axes))
        for name, param_axes in flat.items()
    }
    return unflatten_dict(decays, sep=".")


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clip gradients as PyTorch does: g ← g · min(1, max_norm / (‖g‖ + 1e-6)).

    ‖g‖ is the norm over all gradients. `optax.clip_by_global_norm` has no epsilon.
    """

    def clip(grads: PyTree, _: PyTree | None) -> PyTree:
        scale = jnp.minimum(1.0, max_norm / (global_norm(grads) + _CLIP_EPS))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads)

    return optax.stateless(clip)


def global_norm(grads: PyTree) -> Float[Array, ""]:
    """Return √Σ g² over all leaves, in float32.

    `optax.tree.norm` also adds squares of imaginary parts, which takes five times as many
    operations.
    """
    squares = (jnp.sum(jnp.square(g.astype(jnp.float32))) for g in jax.tree.leaves(grads))
    return jnp.sqrt(sum(squares, start=jnp.zeros(())))


def updates_made(opt_state: PyTree) -> Array:
    """Return the number of updates that an optimizer state counts, without skipped steps."""
    return optax.tree.get(opt_state, "updates")
