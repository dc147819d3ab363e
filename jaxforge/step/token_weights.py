"""Numbers of valid tokens, and the weights of tokens in the loss of an update."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.data.packing import IGNORE


def valid_tokens(labels: Int[Array, "... b s"]) -> Int[Array, "..."]:
    """Return the number of valid labels of each batch."""
    return jnp.sum(labels != IGNORE, axis=(-2, -1), dtype=jnp.int32)


def valid_tokens_by_dataset(
    labels: Int[Array, "m b s"], dataset_mask: Bool[Array, "m b n"]
) -> Int[Array, "n"]:
    """Return the number of valid labels of each dataset."""
    by_row = jnp.sum(labels != IGNORE, axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(dataset_mask, by_row[..., None], 0), axis=(0, 1))


def token_weights(
    counts: Int[Array, "m"], norm: str, microbatches: Int[Array, ""] | int | None = None
) -> Float[Array, "m"]:
    """Return the weight of a token of each microbatch in the loss of the update.

    Args:
        counts: valid tokens of each microbatch, over all devices.
        norm: `train.loss_norm`.
        microbatches: number of microbatches without padding; None: all.
    """
    microbatches = len(counts) if microbatches is None else microbatches
    weights = counts.astype(jnp.float32)
    divisor = weights * microbatches if norm == "microbatch" else jnp.sum(weights)
    # A microbatch without valid tokens has weight 0: no division by zero, no gradient.
    return jnp.where(weights > 0, 1.0 / jnp.maximum(divisor, 1.0), 0.0)
