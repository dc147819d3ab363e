"""Optional metrics of a step (`COLLECTED`). All values stay on the device until they are read."""

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
from jaxforge.optim.chain import global_norm
from jaxforge.parallel.stages import Stack

COLLECTED = ("grads", "update_norms_per_layer", "params_norms_per_layer", *EXTRAS)
"""Values of `collect`, which are also the names in the metrics:

    grads                   gradients before clipping, float32; they take as much memory
    grad_norms_per_layer    L2 norm of gradients: "layers" has a norm per layer, [layers];
                            "token_embedding", "norm" and "output_head" have scalars
    update_norms_per_layer  the same norms of the updates that the optimizer computed
    params_norms_per_layer  the same norms of the parameters after the step
    num_zeros_in_grad       number of gradient elements that are exactly 0, over all parameters
    params_norm             L2 norm of all parameters after the step
    update_norm             L2 norm of the applied update; 0 for a skipped step
"""


class StepOutputs(NamedTuple):
    """Results of a step from which metrics are computed.

    Attributes:
        grads: gradients of trained parameters before clipping.
        updates: updates that the optimizer computed for trained parameters.
        applied: whether the updates were added to the parameters.
        params: parameters after the step.
        stack: the layer in each row of stacked parameters.
        stacks: names of the stacked parameters, with the layers in each.
    """

    grads: Params
    updates: Params
    applied: Bool[Array, ""]
    params: Params
    stack: Stack
    stacks: Mapping[str, Sequence[int]]


def check_collect(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names without duplicates, in the order of `COLLECTED`.

    Raises:
        UserError: a name is unknown.
    """
    names = set(names)
    for name in sorted(names - set(COLLECTED)):
        known = ", ".join(COLLECTED)
        raise UserError(f'collect: "{name}": expected one of {known}{hint(name, COLLECTED)}')
    return tuple(name for name in COLLECTED if name in names)


def collect_metrics(names: Iterable[str], step: StepOutputs) -> dict[str, Any]:
    """Return the metrics that `names` request; to be traced in the step."""
    return {name: _COLLECTORS[name](step) for name in names}


def _norms_per_layer(step: StepOutputs, tree: Params) -> dict[str, Float[Array, "..."]]:
    # Gradients and updates lack frozen parameters, whose norms are 0.
    unstacked = {name: tree.get(name, {}) for name in step.params if name not in step.stacks}
    norms = [
        _norms_of_rows(tree[name], step.stack.of(name)) if name in tree else jnp.zeros(len(layers))
        for name, layers in step.stacks.items()
    ]
    order = np.argsort([layer for layers in step.stacks.values() for layer in layers])
    by_layer = norms[0] if len(norms) == 1 else jnp.concatenate(norms)[order]
    return {LAYERS: by_layer, **{name: global_norm(part) for name, part in unstacked.items()}}


def _norms_of_rows(stacked: PyTree, stack: Stack) -> Float[Array, "rows"]:
    squares = [
        jnp.sum(jnp.square(g.astype(jnp.float32)), axis=range(1, g.ndim))
        for g in jax.tree.leaves(stacked)
    ]
    return stack.unstack(jnp.sqrt(sum(squares)))


def _count_zeros(step: StepOutputs) -> Float[Array, ""]:
    """Count zeros in the gradients: rows as integers, their sum in float32, exact up to 2^24."""
    layers = {
        name: jax.tree.map(step.stack.of(name).unstack, step.grads[name])
        for name in step.stacks
        if name in step.grads
    }
    counts = [
        jnp.sum(jnp.sum(g == 0, axis=-1, dtype=jnp.int32).astype(jnp.float32))
        for g in jax.tree.leaves({**step.grads, **layers})
    ]
    return jnp.sum(jnp.stack(counts))


_COLLECTORS = {
    "grads": lambda step: step.grads,
    "grad_norms_per_layer": lambda step: _norms_per_layer(step, step.grads),
    "update_norms_per_layer": lambda step: _norms_per_layer(step, step.updates),
    "params_norms_per_layer": lambda step: _norms_per_layer(step, step.params),
    "num_zeros_in_grad": _count_zeros,
    "params_norm": lambda step: global_norm(step.params),
    "update_norm": lambda step: jnp.where(step.applied, global_norm(step.updates), 0.0),
}
