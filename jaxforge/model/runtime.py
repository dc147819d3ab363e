"""How a model is run on each platform: what changes speed and memory, and no result."""

from typing import NamedTuple

import jax.numpy as jnp

from jaxforge.config.job import JobConfig
from jaxforge.model.attention_backends import Situation, choose

_UNROLLED_ON_CPU = 12  # layers
_TILE_ON_CPU = 1 << 22  # logits: 16 MiB of float32, which caches hold


class Execution(NamedTuple):
    """Choices that `execution` makes; the defaults are the plainest.

    Attributes:
        attention: name of the kernel in `attention_backends.BACKENDS`.
        save: what the backward pass finds saved: `train.activation_checkpointing`.
        unroll: layers per iteration of the scan over layers. XLA:CPU copies what a loop carries
            and saves, so that a step without it takes 15 % less time; compile time grows with what
            is unrolled, so deep models keep the loop, and so do those that recompute: only a loop
            keeps the compiler from saving all the same.
        swap_by_product: rotary positions pair channels that are half a head apart. On TPU they meet
            through a product with a permutation: shuffling lanes took 5 % of a step of Llama 2 7B.
        tile: logits of the loss that a device likes to see at a time; None: any number.
    """

    attention: str = "reference"
    save: str = "none"
    unroll: int = 1
    swap_by_product: bool = False
    tile: int | None = None


def execution(config: JobConfig, dtype: jnp.dtype, platform: str) -> Execution:
    """What suits a platform.

    Args:
        config: a validated config.
        dtype: dtype of activations.
        platform: "cpu", "gpu" or "tpu".

    Raises:
        UserError: the attention kernel asked for cannot serve.
    """
    m = config.model
    at = Situation(platform, dtype, m.head_size, config.train.seq_len, m.attn_logit_softcap)
    how = Execution(choose(m, at), config.train.activation_checkpointing)
    if platform == "tpu":
        return how._replace(swap_by_product=True)
    if platform == "cpu":
        n_layers = config.model.n_layers
        loop = n_layers > _UNROLLED_ON_CPU or how.save != "none"
        return how._replace(unroll=1 if loop else n_layers, tile=_TILE_ON_CPU)
    return how
