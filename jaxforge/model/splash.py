"""Splash attention: the flash attention kernel for TPU that comes with JAX.

The kernel knows one sequence on one device. Here it is mapped over the batch;
`attention_backends.attend_locally` brings it to a mesh.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    LocalMask,
    Mask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha,
)
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import (
    ChunkedCausalMask,
)
from jaxtyping import Array, Float, Int

from jaxforge.model.scoring import PLAIN, Scoring

SEQUENCE_MULTIPLE = 128
"""The kernel reads tiles of so many tokens."""

_BLOCK = 512  # tokens of a tile: what MaxText runs with on every generation
_INTERPRET = False  # tests set it, to run the kernel without a TPU

DocumentIds = Int[Array, "b s"] | None


def splash_attention(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv h"],
    segment_ids: DocumentIds,
    window: int | None = None,
    chunk: int | None = None,
    scoring: Scoring = PLAIN,
    sinks: Float[Array, "heads"] | None = None,
) -> Float[Array, "b s heads h"]:
    """softmax(q kᵀ / √h) v over the keys at or before each query, of its own document.

    Of a window of tokens, its own included, it sees those, and of a row in chunks its own chunk;
    tiles outside of it are not computed. `sinks` are a logit of each head that joins its scores.
    """
    length, heads, h = q_BSHh.shape[1:]
    kernel = _kernel(length, heads, _mask(length, window, chunk), scoring.softcap)
    scaled = q_BSHh * jnp.asarray(scoring.scale_of(h), q_BSHh.dtype)
    segments = None if segment_ids is None else SegmentIds(q=segment_ids, kv=segment_ids)
    heads_first = (x.swapaxes(1, 2) for x in (scaled, k_BSKh, v_BSKh))
    of_rows = jax.vmap(kernel, in_axes=(0, 0, 0, 0, None))
    return of_rows(*heads_first, segments, sinks).swapaxes(1, 2)


def _mask(length: int, window: int | None, chunk: int | None) -> Mask:
    shape = length, length
    made: _ByTile
    if chunk is not None:
        made, reach = _Chunked(shape, chunk), chunk - 1
    elif window is not None:
        made, reach = _Local(shape, (window - 1, 0), 0), window - 1
    else:
        made, reach = _Causal(shape), length
    made.reach = reach
    return made


class _ByTile(Mask):
    """A mask of which tiles that see all or nothing are not computed.

    The kernel asks for every tile while the step is traced: of 131,072 tokens, that took a minute.
    """

    reach: int
    """How many tokens back a query sees at most."""

    def __getitem__(self, tile: tuple[slice, slice]) -> np.ndarray:
        rows, columns = tile
        nearest, farthest = rows.start - columns.stop + 1, rows.stop - 1 - columns.start
        shape = rows.stop - rows.start, columns.stop - columns.start
        if farthest < 0 or nearest > self.reach:
            return _filled(shape, False)
        if nearest >= 0 and farthest <= self.reach and not isinstance(self, _Chunked):
            return _filled(shape, True)
        return super().__getitem__(tile)


class _Causal(_ByTile, CausalMask):
    pass


class _Local(_ByTile, LocalMask):
    pass


class _Chunked(_ByTile, ChunkedCausalMask):
    pass


@functools.lru_cache(4)
def _filled(shape: tuple[int, int], value: bool) -> np.ndarray:
    tile = np.full(shape, value)
    tile.flags.writeable = False
    return tile


def _kernel(length: int, heads: int, of_head: Mask, softcap: float | None) -> Callable[..., Array]:
    block = min(_BLOCK, length & -length)  # a power of two that divides the length
    sizes = BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = MultiHeadMask([of_head] * heads)
    return make_splash_mha(
        mask, block_sizes=sizes, head_shards=1, q_seq_shards=1, interpret=_INTERPRET,
        attn_logits_soft_cap=softcap,
    )  # fmt: skip
