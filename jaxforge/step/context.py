"""Batches whose sequences devices share, laid out as attention takes them."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxforge.kernels.context_parallel import context_size, to_device_order
from jaxforge.kernels.masking import positions_in_documents
from jaxforge.model.transformer import Model
from jaxforge.parallel.sharding import TOKENS, batch_axes, constrain
from jaxforge.step.gradients import Batch


def spread_sequences(model: Model, batch: Batch) -> Batch:
    """A batch with "positions", and its tokens in the order in which devices hold them.

    As it is, where each device has whole sequences. Sums over tokens are those of before.
    """
    devices = context_size()
    if devices == 1:
        return batch
    batch = {**batch, "positions": _positions(model, batch)}

    def lay_out(x: Shaped[Array, "m b s *rest"]) -> Array:
        x = jnp.moveaxis(
            to_device_order(jnp.moveaxis(x, 2, -1), model.runtime.context, devices), -1, 2
        )
        return constrain(x, *TOKENS, *(None,) * (x.ndim - len(TOKENS)))

    is_of_tokens = {name: batch_axes(batch, name) == TOKENS for name in batch}
    return {name: lay_out(x) if is_of_tokens[name] else x for name, x in batch.items()}


def _positions(model: Model, batch: Batch) -> Int[Array, "m b s"]:
    """In their row, or, where they are learned, in their documents."""
    microbatches, rows, length = shape = batch["labels"].shape
    segment_ids = batch.get("segment_ids")
    if model.config.position_embedding != "learned" or segment_ids is None:
        return jnp.broadcast_to(jnp.arange(length), shape)
    flat = segment_ids.reshape(-1, length)
    return positions_in_documents(microbatches * rows, length, flat).reshape(shape)
