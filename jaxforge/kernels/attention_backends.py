"""The kernels behind `model.sdpa_backend`, and which of them can serve whom.

    reference   plain products over the full score matrix, anywhere; judges the others
    blockwise   blocks of queries in plain XLA, anywhere (`blockwise.py`); auto's choice on CPU
    cudnn       cuDNN's flash attention on NVIDIA GPUs, bf16 or fp16
    triton      flash attention in Pallas on NVIDIA GPUs, bf16 or fp16 (`flash.py`)
    splash      JAX's flash attention on TPU (`splash.py`)

Each honours causality, packed documents, sliding windows and a scale of scores; chunks, a soft cap
of scores and attention sinks, all but cuDNN's. One that is asked for by name and cannot serve is an
error; `auto` takes the first of its platform's that serves well, and the run's banner names it, and
says why where that is not the first of all.

XLA splits plain products over any mesh. The inside of a kernel it does not know, so that every
device runs one on its own sequences and heads (`attend_locally`): attention needs no communication.
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
Backend = Callable[..., Queries]
"""(q, k, v, segment_ids, window=None, chunk=None, scoring=PLAIN, sinks=None)
-> softmax(q kᵀ / √h) v, causal.

`segment_ids` keeps packed documents apart. A query sees the last `window` tokens, itself included;
with None, all of them. Of a row cut into chunks of `chunk` tokens, it sees its own. `sinks` are a
logit of each head that joins its scores, and has no value: they take sigmoid(sink - lse) of all
weight. cuDNN's takes neither chunks nor sinks. One that is not opaque takes `reach` as well, a
window that is an array.
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
    """Scores and softmax in float32, all S x S of them."""
    if reach is None and chunk is None and scoring.softcap is None and sinks is None:
        return _dot_product(q, k, v, segment_ids, window, "xla", scoring)
    tokens = jnp.arange(q.shape[1])
    seen = visible(tokens[:, None], tokens, window if reach is None else reach, chunk)[None, None]
    if segment_ids is not None:
        seen = seen & _same_document(segment_ids)
    return masked_attention(q, k, v, seen, scoring, sinks)


def cudnn_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None = None,
    scoring: Scoring = PLAIN,
) -> Queries:
    """CuDNN's kernel; packed documents cost it a mask of S x S per sequence."""
    return _dot_product(q, k, v, segment_ids, window, "cudnn", scoring)


def masked_attention(
    q: Queries,
    k: Keys,
    v: Keys,
    mask: Bool[Array, "b 1 s t"],
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """The reference for any mask: what decoding with a cache uses."""
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
    seen = jnp.where(mask[:, :, None], capped, -jnp.inf)
    if sinks is not None:  # as one more key
        column = sinks.reshape(k.shape[2], -1, 1, 1).astype(seen.dtype)
        column = jnp.broadcast_to(column, (*seen.shape[:-1], 1))
        seen = jnp.concatenate([seen, column], axis=-1)
    return jax.nn.softmax(seen, axis=-1)[..., : k.shape[1]]


def _dot_product(
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None,
    implementation: Literal["xla", "cudnn"],
    scoring: Scoring,
) -> Queries:
    same = None if segment_ids is None else _same_document(segment_ids)
    back = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q, k, v, mask=same, is_causal=True, local_window_size=back, scale=scoring.scale,
        implementation=implementation,
    )  # fmt: skip


def _same_document(segment_ids: Int[Array, "b s"]) -> Bool[Array, "b 1 s s"]:
    return (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]


def attend_locally(
    kernel: Backend,
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Sinks = None,
) -> Queries:
    """Runs a kernel that knows one device, on any mesh.

    Manual over every axis that is still automatic, so that nothing is left to the partitioner:
    cuDNN's attention brings one of its own, which fails where some axes are manual already.
    """
    options = {"window": window, "chunk": chunk, "scoring": scoring if scoring != PLAIN else None}
    kernel = functools.partial(kernel, **{k: x for k, x in options.items() if x is not None})

    def run(q: Queries, k: Keys, v: Keys, segment_ids: SegmentIds, sinks: Sinks) -> Queries:
        return _with_sinks(kernel, sinks)(q, k, v, segment_ids)

    return run_per_device(run, q, k, v, segment_ids, sinks)


def _with_sinks(kernel: Backend, sinks: Sinks) -> Backend:
    return kernel if sinks is None else functools.partial(kernel, sinks=sinks)


def run_per_device(
    kernel: Callable[..., Queries],
    q: Queries,
    k: Keys,
    v: Keys,
    of_tokens: PyTree,
    sinks: Sinks,
    *scalars: Array,
) -> Queries:
    """Runs a function of one device on each: of q, k, v, what tokens [b, s] have, and the rest."""
    axes = automatic_axes()
    if not axes:
        return kernel(q, k, v, of_tokens, sinks, *scalars)
    queries = automatic_spec("batch", "context", "heads", None)
    keys = automatic_spec("batch", "context", "kv_heads", None)
    rows = jax.tree.map(lambda _: automatic_spec("batch", "context"), of_tokens)
    of_heads = None if sinks is None else automatic_spec("heads")
    return jax.shard_map(
        kernel,
        in_specs=(queries, keys, keys, rows, of_heads, *(P() for _ in scalars)),
        out_specs=queries,
        axis_names=axes,
        check_vma=False,  # the kernels' types do not tell over which axes results vary
    )(q, k, v, of_tokens, sinks, *scalars)


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
    """Attention by a backend, as far as one of some masks says.

    Where only the device knows which, XLA's own kernels mask what lies outside. Of the others,
    which must be told when they are compiled, each device runs one of several; nothing in them
    communicates, as other devices may run another.

    Args:
        name: a key of `BACKENDS`.
        masks: the masks of a `LayerPlan`.
        mask_index: index of the mask to apply.
        q: queries.
        k: keys.
        v: values.
        segment_ids: identifiers of packed documents.
        positions: positions of tokens in their documents, for chunked masks; counted if None.
        scoring: transformation of the products of queries and keys.
        sinks: logit of each head that joins its scores; None: no sinks.
    """
    attend = functools.partial(BACKENDS[name].attend, scoring=scoring)
    if positions is None:  # kernels are faster without a mask
        masks = [mask.within(q.shape[1]) for mask in masks]
    if isinstance(mask_index, int) or len(set(masks)) == 1:
        mask = masks[mask_index if isinstance(mask_index, int) else 0]
        return _attend_by(mask, _with_sinks(attend, sinks), q, k, v, segment_ids, positions)

    if not BACKENDS[name].is_opaque:
        if (chunk := select_chunk(masks, mask_index)) is not None:
            segment_ids = chunk_ids(q.shape[0], q.shape[1], chunk, segment_ids, positions)
        reach = select_window(masks, mask_index)
        return _with_sinks(attend, sinks)(q, k, v, segment_ids, reach=reach)

    of_tokens = (segment_ids, positions)

    def chosen(
        q: Queries, k: Keys, v: Keys, of_tokens: PyTree, sinks: Sinks, mask_index: Array
    ) -> Queries:
        run = _with_sinks(attend, sinks)
        kernels = [functools.partial(_attend_by, mask, run) for mask in masks]
        return jax.lax.switch(mask_index, kernels, q, k, v, *of_tokens)

    return run_per_device(chosen, q, k, v, of_tokens, sinks, mask_index)


def _attend_by(
    mask: Mask,
    attend: Backend,
    q: Queries,
    k: Keys,
    v: Keys,
    segment_ids: SegmentIds,
    positions: Int[Array, "b s"] | None,
) -> Queries:
    """Over a mask that is known when this is compiled."""
    if mask.chunk is None:
        return attend(q, k, v, segment_ids, mask.window)
    if segment_ids is None and positions is None:
        return attend(q, k, v, None, chunk=mask.chunk)
    ids = chunk_ids(q.shape[0], q.shape[1], mask.chunk, segment_ids, positions)
    # No token of a chunk that was counted is further back: kernels leave out what is.
    return attend(q, k, v, ids, mask.chunk if positions is None else None)


class KernelRequirements(NamedTuple):
    """Requirements for an attention kernel.

    Attributes:
        platform: "cpu", "gpu" or "tpu".
        dtype: of queries, keys and values.
        head_size: width of a head.
        seq_len: tokens of a sequence.
        softcap: of scores; None: none.
        chunk: tokens of a chunk; a sequence has several chunks; None: no layer has any.
        sinks: whether heads have attention sinks.
        packed: whether rows hold several documents.
        capability: compute capability of a GPU, such as "9.0"; None: not known.
        here: whether such a device is present, and not only compiled for.
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
    here: bool = True


_ROOMY = ("8.0", "9.0", "10.0", "10.3")
"""GPUs with 160 KiB of shared memory for a block, or more."""


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
    # Wider heads have gradients on Hopper alone, and JAX looks for such a GPU in this machine.
    widest = 256 if at.capability == "9.0" and at.here else 128
    if at.head_size % 8 or at.head_size > widest:
        on_hopper = "" if widest == 256 else ", on Hopper, and run there, up to 256"
        return (
            f"its heads are multiples of 8 up to {widest} wide{on_hopper}; these are {at.head_size}"
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

    if at.head_size > MAX_HEAD:
        return f"its heads are up to {MAX_HEAD} wide, and these are {at.head_size}"
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
        return f"train.seq_len = {at.seq_len} is no multiple of {SEQUENCE_MULTIPLE}"
    return None


class Kernel(NamedTuple):
    """A backend.

    Attributes:
        attend: the function.
        unsupported_reason: what speaks against it in a situation; None: nothing.
        is_opaque: whether XLA does not see inside: such a kernel is run by `attend_locally`, and
            `shard_map` cannot check over which mesh axes its results vary.
    """

    attend: Backend
    unsupported_reason: Callable[[KernelRequirements], str | None]
    is_opaque: bool = False


def opaque_kernel(
    kernel: Backend, unsupported_reason: Callable[[KernelRequirements], str | None]
) -> Kernel:
    """A kernel that knows one device only."""
    return Kernel(functools.partial(attend_locally, kernel), unsupported_reason, is_opaque=True)


BACKENDS = {
    "reference": Kernel(reference_attention, lambda at: None),
    "blockwise": Kernel(blockwise_attention, lambda at: None),
    "cudnn": opaque_kernel(cudnn_attention, _cudnn_unsupported),
    "triton": opaque_kernel(on_first_use("flash", "flash_attention"), _triton_unsupported),
    "splash": opaque_kernel(on_first_use("splash", "splash_attention"), _splash_unsupported),
}

_FLASH = {"cpu": ("blockwise",), "gpu": ("cudnn", "triton"), "tpu": ("splash",)}
"""Kernels of each platform, the fastest first."""

_MASKS_DOCUMENTS = "documents are packed, of which it has an S x S mask"
_SYNONYMS = {"math": "reference", "efficient": "blockwise"}  # PyTorch's names


class KernelChoice(NamedTuple):
    """A kernel.

    Attributes:
        name: in `BACKENDS`.
        why: what spoke against those that would have come first, for people; "": nothing.
    """

    name: str
    why: str = ""


def choose_backend(config: ModelConfig, at: KernelRequirements) -> KernelChoice:
    """Resolve `model.sdpa_backend` for this platform and model.

    Raises:
        UserError: the backend asked for cannot serve.
    """
    asked = config.sdpa_backend
    flash = _FLASH.get(at.platform, ("blockwise",))
    if asked == "auto":
        return _first((*flash, "blockwise"), at)
    if asked == "flash":
        able = [name for name in flash if BACKENDS[name].unsupported_reason(at) is None]
        if able:
            return _first(able, at)
    name = flash[-1] if asked == "flash" else _SYNONYMS.get(asked, asked)
    if problem := BACKENDS[name].unsupported_reason(at):
        raise UserError(
            f'model.sdpa_backend = "{asked}" cannot serve here: {problem}; '
            'or set model.sdpa_backend = "auto"'
        )
    return KernelChoice(name)


def choose_ring_kernel(at: KernelRequirements) -> str:
    """The kernel of a ring's turns, a key of `partial_attention.PARTIAL_KERNELS`."""
    return "tiles" if _triton_unsupported(at) else "triton"


def _first(names: Sequence[str], at: KernelRequirements) -> KernelChoice:
    """The first that serves, cuDNN's last of a GPU's own where documents are packed."""
    against = {name: BACKENDS[name].unsupported_reason(at) for name in names}
    able = [name for name in names if against[name] is None]
    if at.packed and able[:2] == ["cudnn", "triton"]:
        against["cudnn"], able = _MASKS_DOCUMENTS, able[1:]
    before = names[: names.index(able[0])]
    return KernelChoice(able[0], "; ".join(f"not {name}: {against[name]}" for name in before))
