"""Platform-specific execution of a model: choices that affect speed and memory, but no result."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxforge.config.axes import cp_strategy
from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.kernels import gated_delta
from jaxforge.kernels.attention_backends import (
    KernelRequirements,
    choose_backend,
    choose_ring_kernel,
)
from jaxforge.kernels.grouped import ProductRequirements, choose_grouped
from jaxforge.model.linear import FLOAT32

UNROLLED_ON_CPU = 12  # layers
UNROLLED_ON_GPU = 40
_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32
_LARGE_DELTA_CHUNK = 128  # tokens: the side of a TPU's matrix unit
_TILE_ON_CPU = 1 << 22  # logits: 16 MiB of float32, which caches hold


class AttentionKernels(NamedTuple):
    """Attention kernels for heads of a width.

    Attributes:
        whole: name of the kernel in `attention_backends.BACKENDS`.
        why: reasons against the kernels that are preferred to it.
        ring: name of the kernel of a ring's turns in `partial_attention.PARTIAL_KERNELS`.
    """

    whole: str = "reference"
    why: str = ""
    ring: str = "tiles"


class Runtime(NamedTuple):
    """Execution choices of `runtime_for`; the defaults are the simplest.

    Attributes:
        attention: attention kernels.
        wide_attention: those of layers with `model.global_attention`; None: the same.
        save: values saved for the backward pass: `train.activation_checkpointing`, other than
            "auto".
        offload: whether saved values wait in host memory: "activations" in `train.offload`.
        unroll: layers per iteration of the scan over layers. Without a loop, XLA does not copy
            saved values into and out of arrays of all layers: a step takes 15 % less time on CPU
            and 9 % less on GPU (docs/gpu.md). Compile time grows with unrolling, so deep models
            keep the loop, on CPU those with experts at fewer layers. Models that recompute products
            keep it as well; on GPU also those with experts (docs/upstream.md).
        saves_elementwise: whether "none" also saves the results of elementwise operations. XLA:CPU
            schedules unrolled layers for parallelism and not for memory, so that recomputation
            would only take time. fp8 runs save all values, because `jax.checkpoint` turns large
            ones in 8 bits into NaN (docs/upstream.md).
        fuses_elementwise: whether the compiler computes elementwise operations where their results
            are used, so that the backward pass of a layer does not hold them. XLA:CPU does not.
        rope_as_matmul: rotary positions pair channels that are half a head apart. On TPU a product
            with a permutation pairs them: shuffling lanes took 5 % of a step of Llama 2 7B.
        loss_tile: preferred number of logits of the loss at a time; None: any number.
        grouped: name of the kernel of products with experts in `grouped.GROUPED_BACKENDS`.
        reduce_dtype: dtype in which devices sum their gradients of matrices.
        sent_dtype: dtype in which they send them.
        context: how devices share a sequence: `distributed.cp_strategy`.
        splits_sequences: whether the partitioner splits sequences over `tp` between attention and
            feed-forward. Products then keep a dimension of sequences. Otherwise tokens are one
            dimension, so that no compiler copies a transpose. With split sequences, a device's
            tokens of several sequences are not contiguous in that dimension: XLA would compute sums
            over `tp` for all tokens before it splits them, and gradients of all devices' tokens.
        heads_in_products: whether products with queries, keys, values and outputs of attention have
            heads as a dimension. XLA:TPU then writes the tokens of each head contiguously, as the
            kernel reads them, and otherwise transposes results by two copies. XLA:CPU and XLA:GPU
            multiply matrices, and transpose the operands of other products.
        results_by_token: whether results of products without heads are laid out one token after
            another. XLA:TPU may choose the transposed layout, and copy such results for the
            products of gradients (docs/xla_flags.md). Only with full recomputation: the partitioner
            gathers saved results whose layout is prescribed.
        chunk_elements: elements of the matrices inside of chunks that a recurrence has at a time.
            Few stay in the caches of a CPU, and many keep a GPU busy.
        delta_chunk: tokens of a chunk of the gated delta rule. On TPU 128 fill the matrix unit: XLA
            estimates a quarter fewer cycles for the rule than with 64, and less memory. On GPU they
            halve the steps of the scan over chunks.
        maps_states: whether the scan over chunks of the gated delta rule only applies maps to the
            state. A GPU launches half of the kernels, for more multiply-adds; on TPU, XLA estimates
            8 % more cycles for the rule.
        unstacks: whether decoding runs layers one after another on parameters and caches of their
            own. In a scan over stacked layers, XLA:CPU copies both for each token.
        wholly_manual: whether mesh axes of size 1 are manual in the `shard_map` of a step: compile
            time is a quarter less on CPU. XLA:TPU fuses other operations with it, and estimates 1 %
            more time for a step of Llama 2 7B.
    """

    attention: AttentionKernels = AttentionKernels()
    wide_attention: AttentionKernels | None = None
    save: str = "none"
    offload: bool = False
    unroll: int = 1
    saves_elementwise: bool = True
    fuses_elementwise: bool = True
    rope_as_matmul: bool = False
    loss_tile: int | None = None
    grouped: str = "blocks"
    reduce_dtype: jnp.dtype = FLOAT32
    sent_dtype: jnp.dtype = FLOAT32
    context: str = "ulysses"
    splits_sequences: bool = False
    heads_in_products: bool = False
    results_by_token: bool = False
    wholly_manual: bool = True
    unstacks: bool = False
    chunk_elements: int = 1 << 15
    delta_chunk: int = gated_delta.CHUNK
    maps_states: bool = False

    @property
    def attention_kernels(self) -> tuple[str, ...]:
        """Names of the kernels of all layers in `attention_backends.BACKENDS`."""
        wide = self.wide_attention
        return (self.attention.whole, *(() if wide is None else (wide.whole,)))

    def describe_attention(self, devices: int) -> str:
        """Describe the attention kernels for sequences on this many devices, and the reasons."""
        is_ring = devices > 1 and self.context == "ring"

        def describe(kernels: AttentionKernels) -> str:
            if is_ring:
                return kernels.ring
            return kernels.whole + (f" ({kernels.why})" if kernels.why else "")

        text = describe(self.attention)
        if self.wide_attention not in (None, self.attention):
            text += f"; in layers with wide heads {describe(self.wide_attention)}"
        if is_ring:
            return f"{text}, ring of {devices}"
        return text if devices == 1 else f"{text}, ulysses over {devices}"


def gpu_capability(device: jax.Device) -> str | None:
    """Return the compute capability of a GPU, such as "9.0"; None for other devices."""
    return getattr(device, "compute_capability", None) if device.platform == "gpu" else None


def kernel_target(mesh: Mesh) -> tuple[str, str | None]:
    """Return the platform and compute capability of a mesh's devices, which decide on kernels."""
    device = mesh.devices.flat[0]
    return device.platform, gpu_capability(device)


def runtime_for(
    config: JobConfig, dtype: jnp.dtype, platform: str, capability: str | None = None
) -> Runtime:
    """Return the runtime for a platform.

    Args:
        config: a validated config.
        dtype: dtype of activations.
        platform: "cpu", "gpu" or "tpu".
        capability: compute capability of GPUs.

    Raises:
        UserError: a configured kernel is not supported.
    """
    m = config.model
    length = config.train.seq_len
    chunk = next((c for c in m.chunks if c is not None and c < length), None)
    at = KernelRequirements(
        platform, dtype, m.head_size, length, m.attn_logit_softcap, chunk, m.attention_sinks,
        config.data.pack_sequences, capability, is_present=jax.default_backend() == platform,
        value_size=m.value_head_size,
    )  # fmt: skip
    widths = (m.expert_embed_dim, m.expert_dim // config.distributed.tp)
    products = ProductRequirements(platform, dtype, widths, capability)
    grouped = choose_grouped(m.moe_backend, products) if m.is_moe else "blocks"
    save = config.train.activation_checkpointing
    save = "none" if save == "auto" else save  # `step.execution` chooses for training
    reduction = config.train.reduce_dtype
    wide = None
    if m.widest_head > m.head_size:
        wide = _attention_kernels(m, at._replace(head_size=m.widest_head))
    runtime = Runtime(
        _attention_kernels(m, at), wide, save, "activations" in config.train.offload,
        grouped=grouped,
        reduce_dtype=jnp.dtype(dtype) if reduction == "compute" else FLOAT32,
        sent_dtype=FLOAT32 if reduction == "float32" else jnp.dtype(dtype),
        context=cp_strategy(config),
        splits_sequences=config.distributed.tp > 1,
        saves_elementwise=config.train.mixed_precision == "fp8",
    )  # fmt: skip
    if platform == "tpu":
        return runtime._replace(
            rope_as_matmul=True, wholly_manual=False, chunk_elements=_CHUNK_ELEMENTS,
            delta_chunk=_LARGE_DELTA_CHUNK, heads_in_products=True,
            results_by_token=save == "full",
        )  # fmt: skip
    is_unrolled = save == "none" and m.n_layers <= _most_unrolled_layers(platform, is_moe=m.is_moe)
    if is_unrolled:
        runtime = runtime._replace(unroll=m.n_layers)
    if platform == "cpu":
        return runtime._replace(
            loss_tile=_TILE_ON_CPU,
            unstacks=m.n_layers <= UNROLLED_ON_CPU and config.distributed.pp == 1,
            saves_elementwise=is_unrolled or runtime.saves_elementwise,
            fuses_elementwise=False,
        )
    return runtime._replace(
        chunk_elements=_CHUNK_ELEMENTS, delta_chunk=_LARGE_DELTA_CHUNK, maps_states=True
    )


def _attention_kernels(model: ModelConfig, at: KernelRequirements) -> AttentionKernels:
    return AttentionKernels(*choose_backend(model, at), choose_ring_kernel(at))


def _most_unrolled_layers(platform: str, *, is_moe: bool) -> int:
    """Return the number of layers up to which a model is unrolled."""
    if platform == "cpu":
        return UNROLLED_ON_CPU // 3 if is_moe else UNROLLED_ON_CPU
    return 0 if is_moe else UNROLLED_ON_GPU
