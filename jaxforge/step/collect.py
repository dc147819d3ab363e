"""Optional outputs of a step next to its loss: `COLLECTED`.

Everything here stays on the device until it is read.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree

from jaxforge.cli.suggestions import hint
from jaxforge.config.metrics import EXTRAS
from jaxforge.config.model import LAYERS
from jaxforge.errors import UserError
from jaxforge.model.transformer import Params
from jaxforge.optim.optimizer import global_norm
from jaxforge.parallel.stages import Stack

COLLECTED = ("grads", "update_norms_per_layer", "params_norms_per_layer", *EXTRAS)
"""What `collect` may ask for; by the same names it is found in the metrics:

    grads                 the gradients before clipping, float32; they cost their memory
    grad_norms_per_layer  L2 norm of each part's gradient: "layers" has one of each layer, [layers],
                          "token_embedding", "norm" and "output_head" have scalars
    update_norms_per_layer, params_norms_per_layer
                          the same of what the optimizer would add, and of the parameters after the
                          step
    num_zeros_in_grad     elements of the gradients that are exactly 0, over all parameters
    params_norm           L2 norm of all parameters after the step
    update_norm           L2 norm of what the step added to the parameters; 0 if it was skipped
"""


class StepOutputs(NamedTuple):
    """A step, as far as it is collected from.

    Attributes:
        grads: gradients before clipping.
        updates: what the optimizer would add to the parameters.
        applied: whether it was added.
        params: parameters after the step.
        stack: which layer each row of stacked parameters holds.
        stacks: the parts of parameters that are stacked, with the layers in each.
    """

    grads: Params
    updates: Params
    applied: Bool[Array, ""]
    params: Params
    stack: Stack
    stacks: Mapping[str, Sequence[int]]


def check_collect(names: Iterable[str]) -> tuple[str, ...]:
    """The names, each once, in the order of `COLLECTED`.

    Raises:
        UserError: there is no such thing to collect.
    """
    names = set(names)
    for name in sorted(names - set(COLLECTED)):
        known = ", ".join(COLLECTED)
        raise UserError(f'collect: "{name}": expected one of {known}{hint(name, COLLECTED)}')
    return tuple(name for name in COLLECTED if name in names)


def collect_metrics(names: Iterable[str], step: StepOutputs) -> dict[str, Any]:
    """Return the values that `names` request, traced as a part of the step."""
    return {name: _COLLECTORS[name](step) for name in names}


def _norms_per_layer(step: StepOutputs, tree: Params) -> dict[str, Float[Array, "..."]]:
    others = {name: part for name, part in tree.items() if name not in step.stacks}
    of_stacks = [_norms_of_rows(tree[name], step.stack) for name in step.stacks]
    order = np.argsort([layer for layers in step.stacks.values() for layer in layers])
    in_order = of_stacks[0] if len(of_stacks) == 1 else jnp.concatenate(of_stacks)[order]
    return {LAYERS: in_order, **{name: global_norm(part) for name, part in others.items()}}


def _norms_of_rows(stacked: PyTree, stack: Stack) -> Float[Array, "rows"]:
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32)), axis=range(1, g.ndim))
        for g in jax.tree.leaves(stacked)
    ]
    return stack.unstack(jnp.sqrt(sum(squares)))


def _zeros(step: StepOutputs) -> Float[Array, ""]:
    """Rows are counted as integers and added up in float32, exact up to 2^24 zeros."""
    layers = jax.tree.map(step.stack.unstack, {name: step.grads[name] for name in step.stacks})
    counts = [
        jnp.sum(jnp.sum(g == 0, axis=-1, dtype=jnp.int32).astype(jnp.float32))
        for g in jax.tree.leaves({**step.grads, **layers})
    ]
    return jnp.sum(jnp.stack(counts))


def _update_norm(step: StepOutputs) -> Float[Array, ""]:
    return jnp.where(step.applied, global_norm(step.updates), 0.0)


_COLLECTORS = {
    "grads": lambda step: step.grads,
    "grad_norms_per_layer": lambda step: _norms_per_layer(step, step.grads),
    "update_norms_per_layer": lambda step: _norms_per_layer(step, step.updates),
    "params_norms_per_layer": lambda step: _norms_per_layer(step, step.params),
    "num_zeros_in_grad": _zeros,
    "params_norm": lambda step: global_norm(step.params),
    "update_norm": _update_norm,
}
