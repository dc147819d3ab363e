"""Layout of batches for context parallelism."""

import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxforge.kernels.context_parallel import context_size, to_device_order
from jaxforge.kernels.masking import positions_in_documents
from jaxforge.model.transformer import Model
from jaxforge.parallel.sharding import TOKENS, batch_axes, constrain
from jaxforge.step.update_loss import Batch


def spread_sequences(model: Model, batch: Batch) -> Batch:
    """Return a batch with "positions", and with its tokens in the order of the devices.

    A batch is unchanged if each device has whole sequences. The reordering does not change sums
    over tokens.
    """
    devices = context_size()
    if devices == 1:
        return batch
    batch = {**batch, "positions": _positions(model, batch)}

    def reorder(x: Shaped[Array, "m b s *rest"]) -> Array:
        x = to_device_order(x, model.runtime.context, devices, axis=2)
        return constrain(x, *TOKENS, *(None,) * (x.ndim - len(TOKENS)))

    has_tokens = {name: batch_axes(batch, name) == TOKENS for name in batch}
    return {name: reorder(x) if has_tokens[name] else x for name, x in batch.items()}


def _positions(model: Model, batch: Batch) -> Int[Array, "m b s"]:
    """Return positions in rows, or in documents where the model depends on them."""
    microbatches, rows, length = shape = batch["labels"].shape
    segment_ids = batch.get("segment_ids")
    config = model.config
    absolute = config.position_embedding == "learned" or config.attn_temperature_scale is not None
    if not absolute or segment_ids is None:
        return jnp.broadcast_to(jnp.arange(length), shape)
    flat = segment_ids.reshape(-1, length)
    return positions_in_documents(microbatches * rows, length, flat).reshape(shape)
