"""The optimizer as one optax chain: clip · AdamW with its decay groups and schedule."""

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, PyTree

from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.model.linear import is_matrix
from jaxforge.optim.adamw import adamw
from jaxforge.optim.schedule import Schedule, build_schedule

_CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_


def build_optimizer(config: JobConfig, axes: PyTree) -> optax.GradientTransformationExtraArgs:
    """The chain that `[optimizer]`, `[scheduler]` and `train.grad_clip_norm` ask for.

    Args:
        config: the whole config.
        axes: logical axes of every parameter (`Model.axes`).
    """
    optimizer = config.optimizer
    if optimizer.name != "adamw":
        raise UserError(f'optimizer.name = "{optimizer.name}" is not built yet; use "adamw"')
    return optax.chain(
        clip_by_global_norm(config.train.grad_clip_norm),
        adamw(
            learning_rate(config),
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=decay_groups(axes, optimizer.weight_decay),
            state_dtype=jnp.dtype(config.train.opt_state_dtype),
        ),
    )


def learning_rate(config: JobConfig) -> Schedule:
    """Updates made so far -> learning rate of the next one."""
    factor = build_schedule(config.scheduler, config.train.max_steps)
    return lambda n: config.optimizer.lr * factor(n)


def decay_groups(axes: PyTree, weight_decay: float) -> PyTree:
    """Matrices decay, vectors (norm weights, biases) do not; layers do not count as a dimension."""
    return jax.tree.map(
        lambda names: weight_decay if is_matrix(names) else 0.0,
        axes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformation:
    """Clips as torch does: g ← g · min(1, max_norm / (‖g‖ + 1e-6)), ‖g‖ over all gradients.

    optax's own has no epsilon.
    """

    def update(grads: PyTree, state: optax.EmptyState, params: PyTree | None = None) -> tuple:
        scale = jnp.minimum(1.0, max_norm / (global_norm(grads) + _CLIP_EPS))
        return jax.tree.map(lambda g: (g * scale).astype(g.dtype), grads), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def global_norm(grads: PyTree) -> Float[Array, ""]:
    """√Σ g² over all leaves, in float32."""
    return optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), grads))


def updates_made(opt_state: PyTree) -> Array:
    """The number of updates in an optimizer state: skipped steps are not among them."""
    return optax.tree.get(opt_state, "updates")
