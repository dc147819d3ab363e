"""Attention kernels of `model.sdpa_backend`, and the choice of a supported one.

    reference   plain products over the full score matrix, anywhere; tests compare others with it
    blockwise   blocks of queries in plain XLA, anywhere (`blockwise.py`); auto's choice on CPU
    cudnn       cuDNN's flash attention on NVIDIA GPUs, bf16 or fp16
    triton      flash attention in Pallas on NVIDIA GPUs, bf16 or fp16 (`flash.py`)
    splash      JAX's flash attention on TPU (`splash.py`)

Every kernel supports causality, packed documents, sliding windows, a scale of scores, and values
of another width than queries and keys (`jax.nn.dot_product_attention`, which calls cuDNN, gets all
padded to one width). All except cuDNN's also support chunks, a soft cap of scores and attention
sinks. Selecting an unsupported kernel by name is an error. `auto` takes the platform's first
supported kernel. The run's banner names it, with the reasons against preferred kernels.

XLA's partitioner splits plain products over any mesh, but not the inside of a kernel. So each
device runs the kernel on its own sequences and heads (`attend_locally`), without communication.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels.blockwise import blockwise_attention
from jaxforge.kernels.dot_product_attention import (
    Keys,
    Output,
    Queries,
    SegmentIds,
    Sinks,
    Values,
    cudnn_attention,
    reference_attention,
)
from jaxforge.kernels.masking import Mask, chunk_ids, select_chunk, select_window
from jaxforge.kernels.on_first_use import on_first_use
from jaxforge.kernels.scoring import PLAIN, Scoring
from jaxforge.parallel.sharding import run_on_shares

Backend = Callable[..., Output]
"""(q, k, v, segment_ids, window=None, chunk=None, scoring=PLAIN, sinks=None)
-> softmax(q kᵀ / √h) v, causal.

`segment_ids` separates packed documents. A query sees the last `window` tokens, including itself;
None: all of them. With chunks of `chunk` tokens, it sees only its own chunk. `sinks` are an extra
logit per head that joins the scores and has no value: a sink takes the fraction
sigmoid(sink - lse) of the weight. cuDNN's kernel supports neither chunks nor sinks. Kernels that
are not opaque also take `reach`, a window that is an array.
"""


def attend_locally(
    kernel: Backend,
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Output:
    """Run a single-device kernel on any mesh.

    All automatic axes become manual, so that the partitioner has nothing to do: cuDNN's attention
    has its own partitioner, which fails where some axes are manual already.
    """
    options = {"window": window, "chunk": chunk, "scoring": scoring if scoring != PLAIN else None}
    kernel = functools.partial(kernel, **{k: x for k, x in options.items() if x is not None})

    def run(q: Queries, k: Keys, v: Values, segment_ids: SegmentIds, sinks: Sinks) -> Output:
        return _with_sinks(kernel, sinks)(q, k, v, segment_ids)

    return run_per_device(run, q, k, v, segment_ids, sinks)


def _with_sinks(kernel: Backend, sinks: Sinks) -> Backend:
    return kernel if sinks is None else functools.partial(kernel, sinks=sinks)


def run_per_device(
    kernel: Callable[..., Output],
    q: Queries,
    k: Keys,
    v: Values,
    of_tokens: PyTree,
    sinks: Sinks,
    *scalars: Array,
) -> Output:
    """Run a function on each device's share of q, k, v, arrays [b, s] of tokens, and sinks."""
    queries, keys = (("batch", "context", heads, None) for heads in ("heads", "kv_heads"))
    axes = queries, keys, keys, queries[:2], ("heads",), *((),) * len(scalars)
    return run_on_shares(kernel, (q, k, v, of_tokens, sinks, *scalars), axes, queries)


def attend_with_masks(
    name: str,
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds,
    positions: Int[Array, "b s"] | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Output:
    """Attend with the mask `masks[mask_index]`.

    If `mask_index` is an array, plain XLA kernels apply the mask at run time. Opaque kernels are
    compiled once per mask, and each device switches to its own. Devices may take different
    branches, so kernels must not communicate.

    Args:
        name: a key of `BACKENDS`.
        masks: masks of the layers (`LayerPlan.masks`).
        mask_index: index of the layer's mask in `masks`.
        q: queries.
        k: keys.
        v: values.
        segment_ids: documents of packed rows.
        positions: positions of tokens in their documents, for chunks; None: they are counted.
        scoring: scale and soft cap of the scores.
        sinks: an extra logit per head that joins the scores; None: there are none.
    """
    attend = functools.partial(BACKENDS[name].attend, scoring=scoring)
    if positions is None:  # kernels are faster without a mask
        masks = [mask.within(q.shape[1]) for mask in masks]
    if isinstance(mask_index, int) or len(set(masks)) == 1:
        mask = masks[mask_index if isinstance(mask_index, int) else 0]
        return _attend_masked(mask, _with_sinks(attend, sinks), q, k, v, segment_ids, positions)

    if not BACKENDS[name].is_opaque:
        if (chunk := select_chunk(masks, mask_index)) is not None:
            segment_ids = chunk_ids(q.shape[0], q.shape[1], chunk, segment_ids, positions)
        reach = select_window(masks, mask_index)
        return _with_sinks(attend, sinks)(q, k, v, segment_ids, reach=reach)

    of_tokens = (segment_ids, positions)

    def switch(
        q: Queries, k: Keys, v: Values, of_tokens: PyTree, sinks: Sinks, mask_index: Array
    ) -> Output:
        run = _with_sinks(attend, sinks)
        kernels = [functools.partial(_attend_masked, mask, run) for mask in masks]
        return jax.lax.switch(mask_index, kernels, q, k, v, *of_tokens)

    return run_per_device(switch, q, k, v, of_tokens, sinks, mask_index)


def _attend_masked(
    mask: Mask,
    attend: Backend,
    q: Queries,
    k: Keys,
    v: Values,
    segment_ids: SegmentIds,
    positions: Int[Array, "b s"] | None,
) -> Output:
    """Attend with a mask that is known at compile time."""
    if mask.chunk is None:
        return attend(q, k, v, segment_ids, mask.window)
    if segment_ids is None and positions is None:
        return attend(q, k, v, None, chunk=mask.chunk)
    ids = chunk_ids(q.shape[0], q.shape[1], mask.chunk, segment_ids, positions)
    # Chunks that are counted in a row are contiguous, so the chunk size is also a window: kernels
    # skip blocks outside of it. Given positions may place tokens of a chunk further apart.
    return attend(q, k, v, ids, mask.chunk if positions is None else None)


class KernelRequirements(NamedTuple):
    """Requirements for an attention kernel.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: dtype of queries, keys and values.
        head_size: width of the queries and keys of a head.
        seq_len: number of tokens of a sequence.
        softcap: soft cap of scores; None: none.
        chunk: number of tokens of a chunk, less than `seq_len`; None: no layer has chunks.
        sinks: whether heads have attention sinks.
        packed: whether rows contain several documents.
        capability: compute capability of a GPU, such as "9.0"; None: unknown.
        is_present: whether such a device is present; False: programs are only compiled for it.
        value_size: width of the values of a head; None: `head_size`.
    """

    platform: str
    dtype: jnp.dtype
    head_size: int
    seq_len: int
    softcap: float | None = None
    chunk: int | None = None
    sinks: bool = False
    packed: bool = False
    capability: str | None = None
    is_present: bool = True
    value_size: int | None = None

    @property
    def widest(self) -> int:
        """The larger width of queries and values."""
        return max(self.head_size, self.value_size or 0)


_ROOMY = ("8.0", "9.0", "10.0", "10.3")
"""Compute capabilities with at least 160 KiB of shared memory per block."""


def _no_gpu_kernel(at: KernelRequirements) -> str | None:
    """Return the reason why no GPU kernel can be used, or None."""
    if at.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this run is on {at.platform}"
    if at.dtype not in (jnp.bfloat16, jnp.float16):
        return 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
    return None


def _cudnn_unsupported(at: KernelRequirements) -> str | None:
    if reason := _no_gpu_kernel(at):
        return reason
    # Gradients of wider heads need Hopper, and JAX checks for such a GPU on this machine.
    widest = 256 if at.capability == "9.0" and at.is_present else 128
    if at.widest % 8 or at.widest > widest:
        on_hopper = "" if widest == 256 else " (256 on a Hopper GPU of this machine)"
        return (
            f"head widths must be multiples of 8 up to {widest}{on_hopper}, and this model has "
            f"{at.widest}"
        )
    if at.softcap is not None:
        return f"it does not cap scores, and model.attn_logit_softcap = {at.softcap}"
    if at.chunk is not None:
        return (
            f"it has no mask of chunks, and model.attention_chunk_size = {at.chunk} cuts sequences "
            f"of train.seq_len = {at.seq_len}"
        )
    if at.sinks:
        return "it has no attention sinks, and model.attention_sinks = true"
    return None


def _triton_unsupported(at: KernelRequirements) -> str | None:
    if reason := _no_gpu_kernel(at):
        return reason
    from jaxforge.kernels.flash import MAX_HEAD  # here: see on_first_use

    if at.widest > MAX_HEAD:
        return f"head widths must be at most {MAX_HEAD}, and this model has {at.widest}"
    if at.capability not in (None, *_ROOMY):
        return (
            f"its tiles need the shared memory of compute capability {', '.join(_ROOMY)}, and "
            f"these GPUs have {at.capability}"
        )
    return None


def _splash_unsupported(at: KernelRequirements) -> str | None:
    if at.platform != "tpu":
        return f"it needs a TPU, and this run is on {at.platform}"
    from jaxforge.kernels.splash import SEQUENCE_MULTIPLE  # here: see on_first_use

    if at.seq_len % SEQUENCE_MULTIPLE:
        return f"train.seq_len = {at.seq_len} is not a multiple of {SEQUENCE_MULTIPLE}"
    return None


class Kernel(NamedTuple):
    """An attention backend.

    Attributes:
        attend: the attention function.
        unsupported_reason: requirements -> reason why the kernel does not support them, or None.
        is_opaque: whether XLA cannot partition the kernel. `attend_locally` runs it, and
            `shard_map` cannot check over which mesh axes its results vary.
    """

    attend: Backend
    unsupported_reason: Callable[[KernelRequirements], str | None]
    is_opaque: bool = False


def opaque_kernel(
    kernel: Backend, unsupported_reason: Callable[[KernelRequirements], str | None]
) -> Kernel:
    """Return the backend of a single-device kernel."""
    return Kernel(functools.partial(attend_locally, kernel), unsupported_reason, is_opaque=True)


BACKENDS = {
    "reference": Kernel(reference_attention, lambda at: None),
    "blockwise": Kernel(blockwise_attention, lambda at: None),
    "cudnn": opaque_kernel(cudnn_attention, _cudnn_unsupported),
    "triton": opaque_kernel(on_first_use("flash", "flash_attention"), _triton_unsupported),
    "splash": opaque_kernel(on_first_use("splash", "splash_attention"), _splash_unsupported),
}

_FLASH = {"cpu": ("blockwise",), "gpu": ("cudnn", "triton"), "tpu": ("splash",)}
"""Kernels of each platform, fastest first."""

_MASKS_DOCUMENTS = "it needs an S x S mask for packed documents"
_SYNONYMS = {"math": "reference", "efficient": "blockwise"}  # PyTorch's names


class KernelChoice(NamedTuple):
    """Choice of a kernel.

    Attributes:
        name: key in `BACKENDS`.
        why: reasons against preferred kernels, for the log; "": none.
    """

    name: str
    why: str = ""


def choose_backend(config: ModelConfig, at: KernelRequirements) -> KernelChoice:
    """Resolve `model.sdpa_backend` for this platform and model.

    Raises:
        UserError: the configured backend is not supported.
    """
    requested = config.sdpa_backend
    if config.latent_attention.has_indexer:  # `sparse_attention.py`
        if requested not in ("auto", "blockwise"):
            raise UserError(
                f'model.sdpa_backend = "{requested}" cannot attend to the keys that an indexer '
                'selects (model.latent_attention.index_heads). Set it to "auto"'
            )
        return KernelChoice("blockwise", "to the keys that an indexer selects")
    flash = _FLASH.get(at.platform, ("blockwise",))
    if requested == "auto":
        return _first_supported((*flash, "blockwise"), at)
    if requested == "flash":
        supported = [name for name in flash if BACKENDS[name].unsupported_reason(at) is None]
        if supported:
            return _first_supported(supported, at)
    name = flash[-1] if requested == "flash" else _SYNONYMS.get(requested, requested)
    if problem := BACKENDS[name].unsupported_reason(at):
        raise UserError(
            f'model.sdpa_backend = "{requested}" is not supported: {problem}. To use a supported '
            'kernel, set model.sdpa_backend = "auto"'
        )
    return KernelChoice(name)


def choose_ring_kernel(at: KernelRequirements) -> str:
    """Return the kernel of a ring's turns, a key of `partial_attention.PARTIAL_KERNELS`."""
    return "tiles" if _triton_unsupported(at) else "triton"


def _first_supported(names: Sequence[str], at: KernelRequirements) -> KernelChoice:
    """Return the first supported kernel, with Triton's before cuDNN's for packed documents."""
    reasons = {name: BACKENDS[name].unsupported_reason(at) for name in names}
    supported = [name for name in names if reasons[name] is None]
    if at.packed and supported[:2] == ["cudnn", "triton"]:
        reasons["cudnn"], supported = _MASKS_DOCUMENTS, supported[1:]
    skipped = names[: names.index(supported[0])]
    why = "; ".join(f"not {name}: {reasons[name]}" for name in skipped)
    return KernelChoice(supported[0], why)
