"""Attention backends of `model.sdpa_backend`, and the choice between them.

    reference   plain products over the full score matrix, on any platform; the tests' reference
    blockwise   blocks of queries in plain XLA, on any platform (`blockwise.py`); "auto" on CPU
    cudnn       cuDNN's flash attention on NVIDIA GPUs, bf16 or fp16
    triton      flash attention in Pallas on NVIDIA GPUs, bf16 or fp16 (`flash.py`)
    splash      JAX's flash attention on TPU (`splash.py`)

All backends support causality, packed documents, sliding windows and a scale of scores. All but
cuDNN support chunks, a soft cap of scores and attention sinks. A backend that is named in the
config and cannot be used is an error. `auto` takes the first suitable backend of the platform. The
run's banner names it, with the reason if it is not the preferred backend.

XLA partitions plain products over any mesh. It cannot partition a kernel, so that each device runs
the kernel on its own sequences and heads (`attend_locally`). Attention needs no communication.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.kernels.blockwise import blockwise_attention
from jaxforge.kernels.masking import Mask, chunk_ids, select_chunk, select_window, visible
from jaxforge.kernels.on_first_use import on_first_use
from jaxforge.kernels.scoring import PLAIN, Scoring
from jaxforge.parallel.sharding import automatic_axes, automatic_spec

Queries = Float[Array, "b s heads h"]
Keys = Float[Array, "b t kv h"]
SegmentIds = Int[Array, "b s"] | None
Sinks = Float[Array, "heads"] | None
AttentionFunction = Callable[..., Queries]
"""(q, k, v, segment_ids, window=None, chunk=None, scoring=PLAIN, sinks=None)
-> softmax(q kᵀ / √h) v, causal.

A query sees only tokens with its own id in `segment_ids`, the last `window` of them including
itself (None: all), and only those of its own chunk of `chunk` tokens. `sinks` holds a logit of each
head, which joins the scores without a value: it takes the part sigmoid(sink - lse) of the weight.
cuDNN takes neither chunks nor sinks. Functions that are not opaque also take `reach`, a window as
an array.
"""


def reference_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    reach: Int[Array, ""] | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """Compute attention from all S x S scores, with scores and softmax in float32."""
    if reach is None and chunk is None and scoring.softcap is None and sinks is None:
        return _dot_product(q, k, v, segment_ids, window, "xla", scoring)
    tokens = jnp.arange(q.shape[1])
    limit = window if reach is None else reach
    mask = visible(tokens[:, None], tokens, limit, chunk)[None, None]
    if segment_ids is not None:
        mask = mask & _same_document(segment_ids)
    return masked_attention(q, k, v, mask, scoring, sinks)


def cudnn_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None = None,
    scoring: Scoring = PLAIN,
) -> Queries:
    """Compute attention with cuDNN; packed documents need an S x S mask per sequence."""
    return _dot_product(q, k, v, segment_ids, window, "cudnn", scoring)


def masked_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Bool[Array, "b 1 s t"],
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """Compute attention with an explicit mask, as decoding with a cache does."""
    if scoring.softcap is not None or sinks is not None:
        weights = softmax_weights(q, k, mask, scoring, sinks)
        output = jnp.einsum("bkgst,btkh->bskgh", weights.astype(v.dtype), v)
        return output.reshape(q.shape)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, scale=scoring.scale, implementation="xla"
    )


def softmax_weights(
    q: Queries, k: Keys, mask: Bool[Array, "b 1 s t"], scoring: Scoring, sinks: Sinks
) -> Float[Array, "b kv group s t"]:
    """Return the float32 weights of keys for each query; with sinks they sum to less than 1."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    scores = jnp.einsum("bskgh,btkh->bkgst", grouped, k, preferred_element_type=jnp.float32)
    capped = scoring.capped(scores * scoring.scale_of(q.shape[3]))
    masked = jnp.where(mask[:, :, None], capped, -jnp.inf)
    if sinks is not None:  # the score of an extra key, whose weight is dropped below
        column = sinks.reshape(k.shape[2], -1, 1, 1).astype(masked.dtype)
        column = jnp.broadcast_to(column, (*masked.shape[:-1], 1))
        masked = jnp.concatenate([masked, column], axis=-1)
    return jax.nn.softmax(masked, axis=-1)[..., : k.shape[1]]


def _dot_product(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None,
    implementation: Literal["xla", "cudnn"],
    scoring: Scoring,
) -> Queries:
    mask = None if segment_ids is None else _same_document(segment_ids)
    window_size = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=mask, is_causal=True, local_window_size=window_size, scale=scoring.scale,
        implementation=implementation,
    )  # fmt: skip


def _same_document(segment_ids: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def attend_locally(
    kernel: AttentionFunction,
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """Run a single-device kernel on each device of any mesh.

    All automatic axes become manual, so that the partitioner has nothing to do. cuDNN's attention
    brings its own partitioning rule, which fails if some axes are manual and others automatic.
    """
    options = {"window": window, "chunk": chunk, "scoring": scoring if scoring != PLAIN else None}
    kernel = functools.partial(kernel, **{k: x for k, x in options.items() if x is not None})

    def attend(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, sinks: Sinks) -> Queries:
        return _with_sinks(kernel, sinks)(q, k, v, segment_ids)

    return run_per_device(attend, q, k, v, segment_ids, sinks)


def _with_sinks(kernel: AttentionFunction, sinks: Sinks) -> AttentionFunction:
    # cuDNN's function has no argument `sinks`.
    return kernel if sinks is None else functools.partial(kernel, sinks=sinks)


def run_per_device(
    kernel: Callable[..., Queries],
    q: Queries,
    k: Keys,
    v: Keys,
    token_arrays: PyTree,
    sinks: Sinks,
    *scalars: Array,
) -> Queries:
    """Run a single-device attention function on each device of the current mesh.

    Args:
        kernel: (q, k, v, token_arrays, sinks, *scalars) -> outputs, all of one device.
        q: queries, split over sequences, tokens and heads.
        k: keys, split likewise.
        v: values, split likewise.
        token_arrays: tree of arrays [b, s], such as document ids, split over sequences and tokens.
        sinks: sink logit of each head, split over heads.
        *scalars: arrays that all devices receive whole.
    """
    axes = automatic_axes()
    if not axes:
        return kernel(q, k, v, token_arrays, sinks, *scalars)
    query_spec = automatic_spec("batch", "context", "heads", None)
    key_spec = automatic_spec("batch", "context", "kv_heads", None)
    token_specs = jax.tree.map(lambda _: automatic_spec("batch", "context"), token_arrays)
    sink_spec = None if sinks is None else automatic_spec("heads")
    return jax.shard_map(
        kernel,
        in_specs=(query_spec, key_spec, key_spec, token_specs, sink_spec, *(P() for _ in scalars)),
        out_specs=query_spec,
        axis_names=axes,
        check_vma=False,  # kernels do not declare the mesh axes that their results vary over
    )(q, k, v, token_arrays, sinks, *scalars)


def attend_with_masks(
    name: str,
    masks: Sequence[Mask],
    mask_index: int | Int[Array, ""],
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    positions: Int[Array, "b s"] | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """Compute attention with a backend, under a mask that may be selected on the device.

    With a traced index, backends in plain XLA apply the mask as data. Opaque kernels need their
    mask at compile time, so that one is compiled for each mask and a switch selects it. A kernel
    must not communicate, because devices may take different branches.

    Args:
        name: a key of `BACKENDS`.
        masks: distinct masks of the model's layers (`LayerPlan.masks`).
        mask_index: index of the mask to apply; a traced array in pipelines.
        q: queries.
        k: keys.
        v: values.
        segment_ids: document id of each token; None: one document per row.
        positions: position of each token in its document, for chunked masks; None: computed from
            `segment_ids`.
        scoring: transformation of the products of queries and keys.
        sinks: logit of each head that joins its scores; None: no sinks.
    """
    attend = functools.partial(BACKENDS[name].attend, scoring=scoring)
    if positions is None:  # kernels are faster without a mask
        masks = [mask.within(q.shape[1]) for mask in masks]
    if isinstance(mask_index, int) or len(set(masks)) == 1:
        mask = masks[mask_index if isinstance(mask_index, int) else 0]
        return _attend_with_mask(mask, _with_sinks(attend, sinks), q, k, v, segment_ids, positions)

    if not BACKENDS[name].is_opaque:
        if (chunk := select_chunk(masks, mask_index)) is not None:
            segment_ids = chunk_ids(q.shape[0], q.shape[1], chunk, segment_ids, positions)
        reach = select_window(masks, mask_index)
        return _with_sinks(attend, sinks)(q, k, v, segment_ids, reach=reach)

    def attend_by_index(
        q: Queries, k: Keys, v: Keys, token_arrays: PyTree, sinks: Sinks, mask_index: Array
    ) -> Queries:
        kernel = _with_sinks(attend, sinks)
        branches = [functools.partial(_attend_with_mask, mask, kernel) for mask in masks]
        return jax.lax.switch(mask_index, branches, q, k, v, *token_arrays)

    return run_per_device(attend_by_index, q, k, v, (segment_ids, positions), sinks, mask_index)


def _attend_with_mask(
    mask: Mask,
    attend: AttentionFunction,
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    positions: Int[Array, "b s"] | None,
) -> Queries:
    """Compute attention under a mask that is known at compile time."""
    if mask.chunk is None:
        return attend(q, k, v, segment_ids, mask.window)
    if segment_ids is None and positions is None:
        return attend(q, k, v, None, chunk=mask.chunk)
    ids = chunk_ids(q.shape[0], q.shape[1], mask.chunk, segment_ids, positions)
    # If positions are consecutive, a query is at most `chunk - 1` tokens from the start of its
    # chunk. The window tells kernels which blocks they can skip.
    return attend(q, k, v, ids, mask.chunk if positions is None else None)


class KernelRequirements(NamedTuple):
    """Hardware and model properties that an attention kernel must support.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: dtype of queries, keys and values.
        head_size: width of a head.
        seq_len: number of tokens of a sequence.
        softcap: cap of the scores; None: no cap.
        chunk: number of tokens of a chunk, less than `seq_len`; None: no layer needs chunks.
        sinks: whether heads have attention sinks.
        packed: whether rows hold several documents.
        capability: compute capability of a GPU, such as "9.0"; None: unknown.
        is_present: whether this machine has such a device; False when compiling ahead of time.
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


_LARGE_SHARED_MEMORY = ("8.0", "9.0", "10.0", "10.3")
"""Compute capabilities of GPUs with at least 160 KiB of shared memory for a block."""


def _gpu_unsupported(needs: KernelRequirements) -> str | None:
    if needs.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this run is on {needs.platform}"
    if needs.dtype not in (jnp.bfloat16, jnp.float16):
        return 'it computes in bf16 or fp16: set train.mixed_precision = "bf16"'
    return None


def _cudnn_unsupported(needs: KernelRequirements) -> str | None:
    if reason := _gpu_unsupported(needs):
        return reason
    # Gradients of heads wider than 128 exist on Hopper only, and JAX looks for that GPU in this
    # machine, even if it compiles for another.
    widest = 256 if needs.capability == "9.0" and needs.is_present else 128
    if needs.head_size % 8 or needs.head_size > widest:
        on_hopper = "" if widest == 256 else ", on Hopper, and run there, up to 256"
        size = needs.head_size
        return f"its heads are multiples of 8 up to {widest} wide{on_hopper}; these are {size}"
    if needs.softcap is not None:
        return f"it does not cap scores, and model.attn_logit_softcap = {needs.softcap}"
    if needs.chunk is not None:
        return (
            f"it has no mask of chunks, and model.attention_chunk_size = {needs.chunk} cuts "
            f"sequences of train.seq_len = {needs.seq_len}"
        )
    if needs.sinks:
        return "it has no attention sinks, and model.attention_sinks = true"
    return None


def _triton_unsupported(needs: KernelRequirements) -> str | None:
    if reason := _gpu_unsupported(needs):
        return reason
    from jaxforge.kernels.flash import MAX_HEAD  # imported lazily: see on_first_use

    if needs.head_size > MAX_HEAD:
        return f"its heads are up to {MAX_HEAD} wide, and these are {needs.head_size}"
    if needs.capability not in (None, *_LARGE_SHARED_MEMORY):
        return (
            "its tiles need the shared memory of compute capability "
            f"{', '.join(_LARGE_SHARED_MEMORY)}, and these GPUs have {needs.capability}"
        )
    return None


def _splash_unsupported(needs: KernelRequirements) -> str | None:
    if needs.platform != "tpu":
        return f"it needs a TPU, and this run is on {needs.platform}"
    from jaxforge.kernels.splash import SEQUENCE_MULTIPLE  # imported lazily: see on_first_use

    if needs.seq_len % SEQUENCE_MULTIPLE:
        return f"train.seq_len = {needs.seq_len} is not a multiple of {SEQUENCE_MULTIPLE}"
    return None


class AttentionBackend(NamedTuple):
    """An attention backend.

    Attributes:
        attend: the function that computes attention.
        unsupported_reason: returns why the backend cannot be used, or None if it can.
        is_opaque: whether `attend` is a kernel that XLA cannot partition. It runs by
            `attend_locally`, and `shard_map` cannot check the mesh axes that its results vary over.
    """

    attend: AttentionFunction
    unsupported_reason: Callable[[KernelRequirements], str | None]
    is_opaque: bool = False


def opaque_kernel(
    kernel: AttentionFunction, unsupported_reason: Callable[[KernelRequirements], str | None]
) -> AttentionBackend:
    """Return the backend of a kernel that runs on one device."""
    return AttentionBackend(
        functools.partial(attend_locally, kernel), unsupported_reason, is_opaque=True
    )


BACKENDS = {
    "reference": AttentionBackend(reference_attention, lambda needs: None),
    "blockwise": AttentionBackend(blockwise_attention, lambda needs: None),
    "cudnn": opaque_kernel(cudnn_attention, _cudnn_unsupported),
    "triton": opaque_kernel(on_first_use("flash", "flash_attention"), _triton_unsupported),
    "splash": opaque_kernel(on_first_use("splash", "splash_attention"), _splash_unsupported),
}

_FLASH = {"cpu": ("blockwise",), "gpu": ("cudnn", "triton"), "tpu": ("splash",)}
"""Backends of each platform, the fastest first."""

_NEEDS_FULL_MASK = "packed documents would need an S x S mask"
_SYNONYMS = {"math": "reference", "efficient": "blockwise"}  # PyTorch's names


class KernelChoice(NamedTuple):
    """A chosen backend.

    Attributes:
        name: key of `BACKENDS`.
        why: reasons against the preferred backends, for messages; "": it is the preferred one.
    """

    name: str
    why: str = ""


def choose_backend(config: ModelConfig, needs: KernelRequirements) -> KernelChoice:
    """Resolve `model.sdpa_backend` for this platform and model.

    Raises:
        UserError: the backend that the config names cannot be used.
    """
    asked = config.sdpa_backend
    flash = _FLASH.get(needs.platform, ("blockwise",))
    if asked == "auto":
        return _first((*flash, "blockwise"), needs)
    if asked == "flash":
        supported = [name for name in flash if BACKENDS[name].unsupported_reason(needs) is None]
        if supported:
            return _first(supported, needs)
    name = flash[-1] if asked == "flash" else _SYNONYMS.get(asked, asked)
    if problem := BACKENDS[name].unsupported_reason(needs):
        raise UserError(
            f'model.sdpa_backend = "{asked}" cannot be used here: {problem}. Change that, or set '
            'model.sdpa_backend = "auto"'
        )
    return KernelChoice(name)


def choose_ring_kernel(needs: KernelRequirements) -> str:
    """Return the key of `partial_attention.PARTIAL_KERNELS` for the steps of ring attention."""
    return "tiles" if _triton_unsupported(needs) else "triton"


def _first(names: Sequence[str], needs: KernelRequirements) -> KernelChoice:
    """Choose the first supported backend; with packed documents, triton before cuDNN."""
    reasons = {name: BACKENDS[name].unsupported_reason(needs) for name in names}
    supported = [name for name in names if reasons[name] is None]
    if needs.packed and supported[:2] == ["cudnn", "triton"]:
        reasons["cudnn"], supported = _NEEDS_FULL_MASK, supported[1:]
    preferred = names[: names.index(supported[0])]
    why = "; ".join(f"not {name}: {reasons[name]}" for name in preferred)
    return KernelChoice(supported[0], why)
