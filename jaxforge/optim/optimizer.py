"""The optimizer as one optax chain, from the config."""

import functools
import importlib
from collections.abc import Callable

import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import PyTree

from jaxforge.config.job import JobConfig
from jaxforge.config.optimizer import OPTIMIZERS, OptimizerConfig
from jaxforge.config.train import EIGHT_BIT, TrainConfig
from jaxforge.errors import UserError
from jaxforge.model.linear import is_matrix
from jaxforge.optim.chain import Links, clip_by_global_norm, with_rate
from jaxforge.optim.freezing import frozen_paths, trained_only
from jaxforge.optim.from_optax import named_optax
from jaxforge.optim.idle_experts import skip_idle_experts
from jaxforge.optim.moments import EightBit, MomentStorage, OnHost
from jaxforge.optim.parts import Parts
from jaxforge.optim.rounding import compensation
from jaxforge.optim.schedule import Rate, learning_rate
from jaxforge.optim.trees import split

OptimizerBuilder = Callable[[JobConfig, Rate, PyTree], optax.GradientTransformationExtraArgs]
"""(config, learning rate by updates made, logical axes of every parameter) -> update rule."""

for _name in OPTIMIZERS.built_in:  # each has a file of its name, which registers its builder
    importlib.import_module(f"jaxforge.optim.{_name}")


def build_optimizer(config: JobConfig, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    """Return the optimizer of `[optimizer]`, `[scheduler]` and `train.grad_clip_norm`.

    Args:
        config: the whole config.
        axes: logical axes of every parameter (`Model.axes`).
    """
    rate, optimizer = learning_rate(config), config.optimizer
    optimizer.check_patterns(flatten_dict(axes, sep="."))
    frozen = frozen_paths(axes, config)
    axes = split(axes, frozen)[1]
    if not axes:
        raise UserError(
            f"optimizer.freeze_patterns = {list(optimizer.freeze_patterns)} freezes all adapters: "
            "there is nothing to train. Remove the patterns that match lora_a and lora_b"
        )
    build = functools.partial(_links, config)
    links = build(rate, axes)
    if config.skips_idle_experts:
        links = [skip_idle_experts(build, rate, axes)]
    if config.train.param_rounding == "kahan":
        links.append(compensation())
    if frozen:
        links = [trained_only(link, frozen) for link in links]
    clip = clip_by_global_norm(config.train.grad_clip_norm)
    return with_rate(rate, optax.chain(clip, *links))


def _links(config: JobConfig, rate: Rate, axes: PyTree) -> Links:
    """Return the links of the update rule for some or all parameters."""
    optimizer = config.optimizer
    parts = Parts(optimizer, config.model, axes, _moment_storage(config.train, axes))
    build = OPTIMIZERS[optimizer.name]
    if optimizer.name in OPTIMIZERS.built_in:
        links: Links = build(parts)
        return links
    # Rules of users and optax contain their rate. Factors multiply their changes.
    return [build(config, rate, axes), parts.change_factors()]


def register_optimizer(name: str) -> Callable[[OptimizerBuilder], OptimizerBuilder]:
    """Return a decorator that registers the builder of an update rule for `optimizer.name`.

    A rule receives clipped gradients and takes `lr_scale`, a factor on the learning rate. Its state
    is a named tuple that counts updates in `updates`; moments are dicts shaped like the parameters
    or a subset of them. `from_optax` makes such a rule from an optax optimizer. `decay_groups`
    returns the weight decay of each parameter. With muP, the changes of a parameter are multiplied
    by `model.mup.lr_factor`.
    """
    return OPTIMIZERS.register(name)


@register_optimizer(OPTIMIZERS.family)
def _of_optax(config: JobConfig, rate: Rate, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    optimizer = config.optimizer
    decay = decay_groups(axes, optimizer)
    return named_optax(optimizer.name, rate, optimizer.options, optimizer.weight_decay, decay)


def _moment_storage(train: TrainConfig, axes: PyTree) -> MomentStorage:
    if train.opt_state_dtype == EIGHT_BIT:
        return EightBit(axes, train.seed)
    dtype = jnp.dtype(train.opt_state_dtype)
    return OnHost(axes, dtype) if "optimizer" in train.offload else dtype


def decay_groups(axes: PyTree, optimizer: OptimizerConfig) -> PyTree:
    """Return the weight decay of every parameter; 0 for none.

    Matrices decay and vectors (norm weights, biases) do not, except for parameters that the
    patterns name. The dimension of layers does not count.

    Args:
        axes: logical axes of every parameter.
        optimizer: the `[optimizer]` section.
    """
    decays = {
        name: optimizer.weight_decay * optimizer.decays(name, is_matrix=is_matrix(param_axes))
        for name, param_axes in flatten_dict(axes, sep=".").items()
    }
    return unflatten_dict(decays, sep=".")
