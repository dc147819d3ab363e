"""Activations of the forward pass of a batch, one sequence at a time."""

import functools
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jaxforge.config.eval import ATTENTION_WEIGHTS, LOGITS, STREAM
from jaxforge.errors import UserError
from jaxforge.kernels.context_parallel import context_size, to_sequence_order
from jaxforge.model.layer import Capture
from jaxforge.model.transformer import Model, Params
from jaxforge.step.context import spread_sequences
from jaxforge.step.update_loss import Batch

TOKENS = "tokens"
"""Name of the input tokens among the values."""

Values = dict[str, Array]
"""Values by the name of the point, and the input tokens as `TOKENS`."""


class Activations:
    """Programs that compute activations, compiled once.

    Args:
        model: the model.
        points: names of the values (`config.points`).
        layers: layer numbers from 0; None: all layers.
        mesh: mesh of the parameters.
    """

    def __init__(
        self, model: Model, points: Sequence[str], layers: Sequence[int] | None, mesh: Mesh
    ) -> None:
        chosen = range(model.config.n_layers) if layers is None else layers
        self._compute = jax.jit(functools.partial(_values, model, points, tuple(chosen)))
        self._select_sequence = jax.jit(
            functools.partial(_select_sequence, model),
            out_shardings=NamedSharding(mesh, PartitionSpec()),
        )

    def __call__(self, params: Params, batch: Batch, rows: Sequence[int]) -> Iterator[Values]:
        """Yield the values of rows of a batch, one sequence at a time to bound memory.

        Collective: all processes must call it, and each gets the values.

        Args:
            params: parameters, as functions of the model take them.
            batch: batch [1, rows, tokens].
            rows: indices of rows of the batch.

        Yields:
            Float32 [layers, tokens, dim] by name; attention weights [layers, heads, queries, keys],
            logits [tokens, vocabulary]; tokens int32 [tokens].

        Raises:
            UserError: the model does not provide the values of a point.
        """
        values = self._compute(params, batch)
        for row in rows:
            yield self._select_sequence(values, np.int32(row))


def _values(
    model: Model, points: Sequence[str], layers: tuple[int, ...], params: Params, batch: Batch
) -> Values:
    """Return values [rows, ...] by name, with tokens in the order of the devices."""
    if ATTENTION_WEIGHTS in points and context_size() > 1:
        raise UserError(
            f"{ATTENTION_WEIGHTS}: with distributed.cp = {context_size()} no device has all keys "
            f"of a query. Set distributed.cp = 1, or remove {ATTENTION_WEIGHTS}"
        )
    microbatch = {name: x[0] for name, x in spread_sequences(model, batch).items()}
    hidden, out = model.forward(params, microbatch, capture=Capture(points))
    values = {TOKENS: microbatch["input_ids"]}
    for name in points:
        if name == LOGITS:
            values[name] = model.logits(params, hidden)
            continue
        if name not in out.activations:
            raise UserError(
                f'model.model_type = "{model.config.model_type}" does not provide {name}'
            )
        by_layer = model.stack.unstack(out.activations[name])
        values[name] = jnp.moveaxis(by_layer[jnp.array(layers)], 0, 1)
    return values


def _select_sequence(model: Model, values: Values, row: Int[Array, ""]) -> Values:
    """Return the values of a row, with tokens in the order of the sequence."""
    return {name: _in_order(model, name, _select_row(x, row)) for name, x in values.items()}


def _select_row(x: Array, row: Int[Array, ""]) -> Array:
    """Select a row of a sharded array by a masked sum, so that devices need not gather all rows."""
    dtype = x.dtype if jnp.issubdtype(x.dtype, jnp.integer) else jnp.float32
    is_selected = (jnp.arange(len(x)) == row).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.sum(jnp.where(is_selected, x.astype(dtype), 0), axis=0, dtype=dtype)


def _in_order(model: Model, name: str, x: Float[Array, "..."]) -> Array:
    axis = 1 if name in STREAM else 0  # axis of tokens
    return to_sequence_order(x, model.runtime.context, context_size(), axis)
