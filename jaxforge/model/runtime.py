"""Execution of a model on each platform: choices that change speed and memory, but no result."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxforge.config.axes import cp_strategy
from jaxforge.config.job import JobConfig
from jaxforge.kernels.attention_backends import KernelRequirements, choose, choose_parts
from jaxforge.kernels.grouped import ProductRequirements, choose_grouped
from jaxforge.model.linear import FLOAT32

_UNROLLED_ON_CPU = 12  # layers
_TILE_ON_CPU = 1 << 22  # logits: 16 MiB of float32, which caches hold


class Runtime(NamedTuple):
    """Choices that `runtime_for` makes; the defaults are the plainest.

    Attributes:
        attention: name of the kernel in `attention_backends.BACKENDS`.
        save: what the backward pass finds saved: `train.activation_checkpointing`.
        offload: whether that waits in the memory of the host: "activations" in `train.offload`.
        unroll: layers per iteration of the scan over layers. XLA:CPU copies what a loop carries
            and saves, so that a step without it takes 15 % less time; compile time grows with what
            is unrolled, so deep models keep the loop, sooner where they have experts, and so do
            those that recompute: only a loop keeps the compiler from saving all the same.
        rope_as_matmul: rotary positions pair channels that are half a head apart. On TPU they meet
            through a product with a permutation: shuffling lanes took 5 % of a step of Llama 2 7B.
        loss_tile: logits of the loss that a device likes to see at a time; None: any number.
        grouped: name of the kernel of products with experts in `grouped.GROUPED`.
        reduce_dtype: dtype in which devices add up their gradients of matrices.
        context: how devices share a sequence, where they do: `distributed.cp_strategy`.
        why_attention: what speaks against the kernels that come before `attention` here.
        ring: name of the kernel of a ring's turns in `partial_attention.PARTS`.
        splits_sequences: whether the partitioner splits sequences over `tp`, between attention and
            feed-forward. Products then keep sequences apart. Otherwise tokens are one dimension, so
            that no compiler copies a transpose. With split sequences, a device's part of several is
            no contiguous piece of that dimension: XLA would make sums over `tp` whole before it
            splits them, and gradients of all devices' tokens.
        wholly_manual: whether no axis of one device is left to the partitioner of a step in
            `shard_map`: that takes a quarter less time to compile on CPU. XLA:TPU then fuses other
            operations, for a step of Llama 2 7B that it estimates 1 % longer.
    """

    attention: str = "reference"
    save: str = "none"
    offload: bool = False
    unroll: int = 1
    rope_as_matmul: bool = False
    loss_tile: int | None = None
    grouped: str = "blocks"
    reduce_dtype: jnp.dtype = FLOAT32
    context: str = "ulysses"
    why_attention: str = ""
    ring: str = "tiles"
    splits_sequences: bool = False
    wholly_manual: bool = True

    def attention_of(self, devices: int) -> str:
        """Describe the attention kernel for sequences on this many devices, and the reason."""
        if devices > 1 and self.context == "ring":
            return f"{self.ring}, ring of {devices}"
        name = self.attention + (f" ({self.why_attention})" if self.why_attention else "")
        return name if devices == 1 else f"{name}, ulysses over {devices}"


def gpu_capability(device: jax.Device) -> str | None:
    """Compute capability of a GPU, such as "9.0"; None for other devices."""
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


def runtime_for(
    config: JobConfig, dtype: jnp.dtype, platform: str, capability: str | None = None
) -> Runtime:
    """Return the runtime for a platform.

    Args:
        config: a validated config.
        dtype: dtype of activations.
        platform: "cpu", "gpu" or "tpu".
        capability: of GPUs.

    Raises:
        UserError: a kernel asked for cannot serve.
    """
    m = config.model
    length = config.train.seq_len
    chunk = next((c for c in m.chunks if c is not None and c < length), None)
    at = KernelRequirements(
        platform, dtype, m.head_size, length, m.attn_logit_softcap, chunk, m.attention_sinks,
        config.data.pack_sequences, capability, here=jax.default_backend() == platform,
    )  # fmt: skip
    widths = (m.dim, m.expert_dim // config.distributed.tp)
    products = ProductRequirements(platform, dtype, widths, capability)
    grouped = choose_grouped(m.moe_backend, products) if m.is_moe else "blocks"
    save = config.train.activation_checkpointing
    sums = FLOAT32 if config.train.reduce_dtype == "float32" else jnp.dtype(dtype)
    attention, why = choose(m, at)
    runtime = Runtime(
        attention, save, "activations" in config.train.offload, grouped=grouped,
        reduce_dtype=sums, context=cp_strategy(config), why_attention=why, ring=choose_parts(at),
        splits_sequences=config.distributed.tp > 1,
    )  # fmt: skip
    if platform == "tpu":
        return runtime._replace(rope_as_matmul=True, wholly_manual=False)
    if platform == "cpu":
        n_layers = m.n_layers
        most = _UNROLLED_ON_CPU // 3 if m.is_moe else _UNROLLED_ON_CPU
        loop = n_layers > most or runtime.save != "none"
        return runtime._replace(unroll=1 if loop else n_layers, loss_tile=_TILE_ON_CPU)
    return runtime
