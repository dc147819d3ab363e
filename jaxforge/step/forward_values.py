"""Values of the forward pass of a batch, sequence by sequence: on the devices, then here."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxforge.config.points import ATTENTION_WEIGHTS, LOGITS, STREAM
from jaxforge.errors import UserError
from jaxforge.kernels.context_parallel import context_size, to_sequence_order
from jaxforge.model.attention import Capture
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.gradients import Batch

TOKENS = "tokens"
"""The name of what was read, beside that of each point."""

Values = dict[str, Array]
"""By point; and `TOKENS`."""


class Activations:
    """Computes them, with programs that are compiled once.

    Args:
        model: the model.
        points: names (`config.points`).
        layers: numbers from 0; None: all.
        mesh: where parameters lie.
    """

    def __init__(
        self, model: Model, points: Sequence[str], layers: Sequence[int] | None, mesh: Mesh
    ) -> None:
        chosen = range(model.config.n_layers) if layers is None else layers
        self._compute = jax.jit(functools.partial(_values, model, points, tuple(chosen)))
        everywhere = NamedSharding(mesh, PartitionSpec())
        of_sequence = functools.partial(_of_sequence, model)
        self._of_sequence = jax.jit(of_sequence, out_shardings=everywhere)

    def __call__(self, params: Params, batch: Batch, rows: Sequence[int]) -> Iterator[Values]:
        """Yield the values of some rows of a batch, one sequence at a time to bound memory.

        All processes take part, and each gets them.

        Args:
            params: as functions of the model take them.
            batch: [1, rows, tokens].
            rows: of the batch.

        Yields:
            Float32 [layers, tokens, dim] by name; attention weights [layers, heads, queries, keys],
            logits [tokens, vocabulary]; tokens int32 [tokens].

        Raises:
            UserError: the model has no such values.
        """
        values = self._compute(params, batch)
        for row in rows:
            yield self._of_sequence(values, np.int32(row))


def _values(
    model: Model, points: Sequence[str], layers: tuple[int, ...], params: Params, batch: Batch
) -> Values:
    """Values [rows, ...] by name, tokens in the order in which devices hold them."""
    if ATTENTION_WEIGHTS in points and context_size() > 1:
        raise UserError(
            f"{ATTENTION_WEIGHTS}: with distributed.cp = {context_size()} no device has all keys "
            "of a query: set distributed.cp = 1, or leave them out"
        )
    microbatch = {name: x[0] for name, x in spread_sequences(model, batch).items()}
    hidden, out = model.forward(params, microbatch, capture=Capture(points))
    values = {TOKENS: microbatch["input_ids"]}
    for name in points:
        if name == LOGITS:
            values[name] = model.logits(params, hidden)
            continue
        if name not in (out.activations):
            raise UserError(f'model.model_type = "{model.config.model_type}" tells no {name}')
        by_layer = model.stack.unstack(out.activations[name])
        values[name] = jnp.moveaxis(by_layer[jnp.array(layers)], 0, 1)
    return values


def _of_sequence(model: Model, values: Values, row: Int[Array, ""]) -> Values:
    """The values of one row, tokens in their own order."""
    return {name: _in_order(model, name, _row(x, row)) for name, x in values.items()}


def _row(x: Array, row: Int[Array, ""]) -> Array:
    """One row of an array that devices share: as a sum, so that they need not gather all rows."""
    kind = x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    is_it = (jnp.arange(len(x)) == row).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.sum(jnp.where(is_it, x.astype(kind), 0), axis=0, dtype=kind)


def _in_order(model: Model, name: str, x: Float[Array, "..."]) -> Array:
    if context_size() == 1:
        return x
    axis = 1 if name in STREAM else 0  # that of tokens
    ordered = to_sequence_order(jnp.moveaxis(x, axis, -1), model.runtime.context, context_size())
    return jnp.moveaxis(ordered, -1, axis)
