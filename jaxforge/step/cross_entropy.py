"""Token-weighted loss. Sums travel with their weights until the last division.

    loss = Σ_m scale_m · Σ_{valid tokens of microbatch m} -log p(label)
           + z_loss_weight · mean over all positions of logsumexp(logits)²

`loss_norm = "tokens"` gives every valid token of an update the same weight; `"microbatch"` is the
mean over microbatches of each one's token mean, as in PyTorch loops that divide by accumulation.

The gradient is written out (`weighted_loss`). It goes through the logits in one of two ways:

    tiles of tokens       all of the vocabulary at once, for some tokens. The gradient is computed
                          with the loss, so no logit is computed twice: three matrix products.
    chunks of vocabulary  all tokens at once, for a part of the vocabulary, with a running
                          logsumexp. Logits are computed again in the backward pass: four products,
                          and memory that does not grow with the vocabulary.

Inside a pipeline, each stage has its share of the vocabulary: logsumexp, the label's logit and the
gradient of the hidden states are then reduced over the shares here.

Of a mixture, Σ -log p(label) of each dataset comes along; no gradient is taken of it.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxforge.aux_outputs import LossWeights
from jaxforge.config.train import TrainConfig
from jaxforge.data.packing import IGNORE
from jaxforge.kernels.scoring import soft_cap_slope
from jaxforge.model.transformer import Model, project
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    automatic_size,
    constrain,
    size_per_device,
    split_sequences,
)
from jaxforge.step.vocab_chunks import Chunk, chunks_of, entry_ids, joined

_LOGITS = 1 << 25  # of a vocabulary chunk on one device, where ce_vocab_chunk = 0: 128 MiB
_SMALLEST_CHUNK = 1024  # vocabulary entries: below it, products are slow
_HEAD = ("vocab", "embed")  # logical axes of the output head


class LossSum(NamedTuple):
    """A sum and what to divide it by. Sums of two add; means would not.

    Attributes:
        total: Σ -log p(label) over valid tokens, float32.
        weight: number of valid tokens, float32.
        z_loss_sum: Σ logsumexp(logits)² over all positions but padding, valid or not, float32.
        by_dataset: `psum` of each dataset, of a mixture.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    z_loss_sum: Float[Array, ""]
    by_dataset: Float[Array, "n"] | None = None

    def plus(self, other: "LossSum") -> "LossSum":
        """Sum by sum."""
        return jax.tree.map(jnp.add, self, other)


class WeightedLoss(NamedTuple):
    """Weighted loss of a microbatch.

    Attributes:
        cross_entropy: loss_weights.token · Σ -log p(label).
        z_loss: loss_weights.position · Σ logsumexp².
        by_dataset: Σ -log p(label) of each dataset, of a mixture.
    """

    cross_entropy: Float[Array, ""]
    z_loss: Float[Array, ""]
    by_dataset: Float[Array, "n"] | None

    @property
    def value(self) -> Float[Array, ""]:
        """The sum of both."""
        return self.cross_entropy + self.z_loss


def valid_tokens(labels: Int[Array, "... b s"]) -> Int[Array, "..."]:
    """Return the number of labels of each batch that count."""
    return jnp.sum(labels != IGNORE, axis=(-2, -1), dtype=jnp.int32)


def valid_tokens_by_dataset(
    labels: Int[Array, "m b s"], dataset_mask: Bool[Array, "m b n"]
) -> Int[Array, "n"]:
    """Return the number of labels of each dataset that count."""
    of_row = jnp.sum(labels != IGNORE, axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(dataset_mask, of_row[..., None], 0), axis=(0, 1))


def token_weights(counts: Int[Array, "m"], norm: str) -> Float[Array, "m"]:
    """Weight of one token of each microbatch in the loss of the update.

    Args:
        counts: valid tokens of each microbatch, over all devices.
        norm: `train.loss_norm`.
    """
    weights = counts.astype(jnp.float32)
    divisor = weights * weights.shape[0] if norm == "microbatch" else jnp.sum(weights)
    # Nothing to learn from: no division by zero, no gradient.
    return jnp.where(weights > 0, 1.0 / jnp.maximum(divisor, 1.0), 0.0)


class Tiling(NamedTuple):
    """Layout of logits: the number that exists at a time, and the limit on it.

    Attributes:
        tokens: of each sequence.
        vocab: entries of each device's share of the vocabulary.
        softcap: `model.final_logit_softcap`.
    """

    tokens: int
    vocab: int
    softcap: float | None = None


def tiling(config: TrainConfig, batch: int, length: int, vocab: int, tile: int | None) -> Tiling:
    """Resolve `train.loss_fn` for a microbatch [batch, length].

    Args:
        config: the `[train]` section.
        batch: sequences, over all devices, or parts of them (`split_sequences`).
        length: tokens of each.
        vocab: size of the vocabulary.
        tile: logits that the platform likes to see at a time, on a device; None: any number.
    """
    rows, entries = size_per_device(batch, "tokens"), size_per_device(vocab, "vocab")
    return tiling_on_device(config, rows, length, entries, tile)


def tiling_on_device(
    config: TrainConfig, rows: int, length: int, entries: int, tile: int | None
) -> Tiling:
    """`tiling`, from what one device has: sequences, and entries of the vocabulary."""
    chunked = config.loss_fn == "chunked_cross_entropy"
    if config.ce_chunk_size or not chunked:
        likes = length if tile is None else tile // entries // rows
        tokens = config.ce_chunk_size // rows if chunked else likes
        return Tiling(max(1, min(tokens, length)), entries)
    chunk = config.ce_vocab_chunk or max(_SMALLEST_CHUNK, _LOGITS // (rows * length))
    return Tiling(length, min(chunk, entries))


def tiles_of(config: TrainConfig, labels: Array, head: Array, model: Model) -> Tiling:
    """`tiling` of labels [b, s] and a head [v, d], for a model's logits."""
    batch, length = split_sequences(labels).shape
    tiles = tiling(config, batch, length, head.shape[0], model.runtime.loss_tile)
    return tiles._replace(softcap=model.config.final_logit_softcap)


def cross_entropy(
    hidden_BSD: Float[Array, "b s d"],
    head_VD: Float[Array, "v d"],
    labels_BS: Int[Array, "b s"],
    tiling: Tiling,
    dataset_mask_BN: Bool[Array, "b n"] | None = None,
) -> LossSum:
    """Sums of the loss of a batch from its final hidden states; of datasets too, by their mask."""
    hidden, labels, masks = _by_part(hidden_BSD, labels_BS, _Masks(dataset_mask_BN))
    return _sums(hidden, head_VD, labels, tiling, masks)


class _Masks(NamedTuple):
    """Masks of a microbatch.

    Attributes:
        dataset: the dataset of each sequence [b, datasets], of a mixture.
        padding: which tokens are padding [b, s]; None: none is.
    """

    dataset: Bool[Array, "b n"] | None = None
    padding: Bool[Array, "b s"] | None = None


def _by_part(hidden_BSD: Array, labels_BS: Array, masks: _Masks) -> tuple[Array, Array, _Masks]:
    """Compute the loss of parts of sequences that no device axis splits, as sequences."""
    parts, (dataset, padding) = automatic_size("context"), masks
    if dataset is not None and parts > 1:
        dataset = jnp.tile(dataset, (parts, 1))
    if padding is not None:
        padding = split_sequences(padding)
    masks = _Masks(dataset, padding)
    return split_sequences(hidden_BSD), split_sequences(labels_BS), masks


def _sums(
    hidden_BSD: Array, head_VD: Array, labels_BS: Array, tiling: Tiling, masks: _Masks
) -> LossSum:
    """`cross_entropy` of sequences that no device axis splits."""
    weights = _gathered(head_VD, hidden_BSD.dtype)
    if _by_chunks(tiling, head_VD):
        return _by_vocab(tiling, hidden_BSD, weights, labels_BS, masks)[0]

    def fold_tile(total: LossSum, tile: _Tile) -> tuple[LossSum, None]:
        return total.plus(_tile_sums(tile, weights, masks.dataset, tiling.softcap)[0]), None

    tiles, none = _tiles(tiling.tokens, hidden_BSD, labels_BS, masks.padding)
    return _fold(fold_tile, _tile_sums(none, weights, masks.dataset, tiling.softcap)[0], tiles)[0]


def _gathered(head_VD: Array, dtype: jnp.dtype) -> Array:
    return collectives.all_gather_weight(head_VD.astype(dtype), _HEAD)


def _by_chunks(tiling: Tiling, head_VD: Array) -> bool:
    return tiling.vocab < size_per_device(head_VD.shape[0], "vocab")


def weighted_loss(
    tiling: Tiling,
    hidden_BSD: Float[Array, "b s d"],
    head_VD: Float[Array, "v d"],
    labels_BS: Int[Array, "b s"],
    loss_weights: LossWeights,
    dataset_mask_BN: Bool[Array, "b n"] | None = None,
    is_padding_BS: Bool[Array, "b s"] | None = None,
) -> WeightedLoss:
    """Both parts of the loss. Their sum is differentiable in `hidden` and `head`.

    The gradient is that of the sum: each part counts for as much as the other. Padding has no label
    and counts in neither.
    """
    masks = _Masks(dataset_mask_BN, is_padding_BS)
    hidden, labels, masks = _by_part(hidden_BSD, labels_BS, masks)
    return _weighted_loss(tiling, hidden, head_VD, labels, loss_weights, masks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weighted_loss(
    tiling: Tiling,
    hidden: Array,
    head: Array,
    labels: Array,
    loss_weights: LossWeights,
    masks: _Masks,
) -> WeightedLoss:
    return _weigh(_sums(hidden, head, labels, tiling, masks), loss_weights)


def _weigh(sums: LossSum, loss_weights: LossWeights) -> WeightedLoss:
    return WeightedLoss(
        loss_weights.token * sums.total, loss_weights.position * sums.z_loss_sum, sums.by_dataset
    )


def _differentiable(
    tiling: Tiling,
    hidden: Array,
    head: Array,
    labels: Array,
    loss_weights: LossWeights,
    masks: _Masks,
) -> tuple[WeightedLoss, tuple[Any, ...]]:
    """The loss, and what the backward pass needs: here, by tiles of tokens, the gradient itself.

    By chunks of the vocabulary it is the head as it was gathered: that pass comes next.
    """
    if _by_chunks(tiling, head):
        weights, like = _gathered(head, hidden.dtype), jnp.zeros((), head.dtype)
        sums, lse = _by_vocab(tiling, hidden, weights, labels, masks)
        saved = hidden, weights, like, labels, masks.padding, loss_weights, lse
        return _weigh(sums, loss_weights), saved
    sums, d_hidden, d_head_DV = _gradient_by_tokens(
        tiling, hidden, head, labels, loss_weights, masks
    )
    d_head = constrain(d_head_DV.T, *_HEAD)
    return _weigh(sums, loss_weights), (d_hidden, d_head.astype(head.dtype))


def _differentiate(
    tiling: Tiling, saved: tuple[Any, ...], d: WeightedLoss
) -> tuple[Array, Array, None, None, None]:
    d_loss = d.cross_entropy
    if len(saved) == 2:
        d_hidden, d_head = (d_loss.astype(grad.dtype) * grad for grad in saved)
    else:
        hidden, weights, like, labels, padding, loss_weights, lse = saved
        loss_weights = LossWeights(d_loss * loss_weights.token, d_loss * loss_weights.position)
        d_hidden, d_head = _gradient_by_vocab(
            tiling, weights, _whole(hidden, labels, padding), hidden, loss_weights, lse, like.dtype
        )
    return d_hidden, d_head, None, None, None


_weighted_loss.defvjp(_differentiable, _differentiate)


class _Tile(NamedTuple):
    """Some tokens: hidden states [t, d], labels [t], and which are no padding [t]."""

    hidden: Array
    labels: Array
    real: Array

    @property
    def valid(self) -> Array:
        return self.labels != IGNORE


def _tiles(tokens: int, hidden: Array, labels: Array, padding: Array | None) -> tuple[_Tile, _Tile]:
    """Slices [n, t, ...] along the sequence, which no device axis splits here; and an empty one.

    The last slice is padded.
    """
    batch, length = labels.shape
    n = -(-length // tokens)
    pad = (0, n * tokens - length)

    def cut(x: Array, fill: int) -> Array:
        x = jnp.pad(x, ((0, 0), pad, *((0, 0),) * (x.ndim - 2)), constant_values=fill)
        x = x.reshape(batch, n, tokens, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(n, batch * tokens, *x.shape[3:])

    is_real = jnp.ones_like(labels) if padding is None else (~padding).astype(labels.dtype)
    real = cut(is_real, 0) == 1
    tiles = _Tile(cut(hidden, 0), cut(labels, IGNORE), real)
    return tiles, jax.tree.map(lambda x: x[0, :0], tiles)


def _whole(hidden: Array, labels: Array, padding: Array | None) -> _Tile:
    """All tokens as one tile."""
    return jax.tree.map(lambda x: x[0], _tiles(labels.shape[1], hidden, labels, padding)[0])


def _fold(body: Callable[..., Any], start: PyTree, tiles: _Tile) -> tuple[Any, Any]:
    """`lax.scan`, without the loop where there is a single tile."""
    if tiles.labels.shape[0] > 1:
        return jax.lax.scan(body, start, tiles)
    carry, y = body(start, jax.tree.map(lambda x: x[0], tiles))
    return carry, jax.tree.map(lambda x: x[None], y)


def _tile_sums(
    tile: _Tile, weights_VD: Array, dataset_mask_BN: Array | None, softcap: float | None
) -> tuple[LossSum, Array, Array, Array]:
    """Sums of a tile; its logits [t, v], logsumexp [t, 1], and where its labels are [t, v]."""
    logits_TV = project(tile.hidden, weights_VD, softcap)
    lse_T1 = _over_shares(jax.nn.logsumexp(logits_TV, axis=-1, keepdims=True))
    # A comparison, not a gather: it stays local when the vocabulary is split over devices.
    is_label_TV = entry_ids(weights_VD.shape[0]) == tile.labels[:, None]
    label_logits_T = jnp.sum(jnp.where(is_label_TV, logits_TV, 0.0), axis=-1)
    sums = _sum_up(tile, lse_T1[:, 0], collectives.psum(label_logits_T, "vocab"), dataset_mask_BN)
    return sums, logits_TV, lse_T1, is_label_TV


def _over_shares(lse: Array) -> Array:
    """The logsumexp over the whole vocabulary, from that over each device's share."""
    if not collectives.split_over("vocab"):
        return lse
    top = collectives.pmax(lse, "vocab")
    return top + jnp.log(collectives.psum(jnp.exp(lse - top), "vocab"))


def _sum_up(
    tile: _Tile, lse_T: Array, label_logits_T: Array, dataset_mask_BN: Array | None
) -> LossSum:
    nll_T = jnp.where(tile.valid, lse_T - label_logits_T, 0.0)
    return LossSum(
        total=jnp.sum(nll_T),
        weight=jnp.sum(tile.valid, dtype=jnp.float32),
        z_loss_sum=jnp.sum(jnp.where(tile.real, lse_T * lse_T, 0.0)),
        by_dataset=None if dataset_mask_BN is None else _by_dataset(nll_T, dataset_mask_BN),
    )


def _by_dataset(nll_T: Array, dataset_mask_BN: Array) -> Array:
    """Sums over each dataset's tokens; a tile has as many of every sequence."""
    nll_B = jnp.sum(nll_T.reshape(dataset_mask_BN.shape[0], -1), axis=1)
    return jnp.sum(jnp.where(dataset_mask_BN, nll_B[:, None], 0.0), axis=0)


def _d_logits(
    tile: _Tile,
    loss_weights: LossWeights,
    logits: Array,
    lse_T1: Array,
    is_label: Array,
    softcap: float | None,
) -> Array:
    """The gradient of some logits [t, v] of a tile, in the dtype of its hidden states.

    Where they are capped, it is that of what was capped; the logits of padding are -inf.
    """
    label_scale = jnp.where(tile.valid, loss_weights.token, 0.0)[:, None]
    all_scale = label_scale + jnp.where(tile.real, loss_weights.position, 0.0)[:, None] * 2 * lse_T1
    gradient = all_scale * jnp.exp(logits - lse_T1) - jnp.where(is_label, label_scale, 0.0)
    if softcap is not None:
        gradient *= soft_cap_slope(logits, softcap)
    return gradient.astype(tile.hidden.dtype)


def _gradient_by_tokens(
    tiling: Tiling,
    hidden: Array,
    head: Array,
    labels: Array,
    loss_weights: LossWeights,
    masks: _Masks,
) -> tuple[LossSum, Array, Array]:
    """Sums, and the gradients [b, s, d] and [d, v]: of the head it is Σ hiddenᵀ · d_logits."""
    weights = _gathered(head, hidden.dtype)

    def of_tile(tile: _Tile) -> tuple[LossSum, Array, Array]:
        sums, logits, lse, is_label = _tile_sums(tile, weights, masks.dataset, tiling.softcap)
        d_logits = _d_logits(tile, loss_weights, logits, lse, is_label, tiling.softcap)
        # a summand, or the whole
        product = _product if collectives.split_over("vocab") else jnp.einsum
        d_hidden = product("tv,vd->td", d_logits, weights)
        return sums, d_hidden, _product("td,tv->dv", tile.hidden, d_logits)

    def fold_tile(carry: tuple[LossSum, Array], tile: _Tile) -> tuple[tuple[LossSum, Array], Array]:
        sums, d_hidden, d_head = of_tile(tile)
        return (carry[0].plus(sums), constrain(carry[1] + d_head, "embed", "vocab")), d_hidden

    tiles, none = _tiles(tiling.tokens, hidden, labels, masks.padding)
    no_sums, _, no_gradient = of_tile(none)  # zeros that vary over the same mesh axes
    (sums, d_head), d_tiles = _fold(fold_tile, (no_sums, no_gradient), tiles)
    batch, length, dim = hidden.shape
    d_hidden = d_tiles.reshape(-1, batch, tiling.tokens, dim).swapaxes(0, 1)
    d_hidden = d_hidden.reshape(batch, -1, dim)[:, :length]
    return sums, collectives.psum(d_hidden, "vocab").astype(hidden.dtype), d_head


def _by_vocab(
    tiling: Tiling, hidden: Array, weights: Array, labels: Array, masks: _Masks
) -> tuple[LossSum, Float[Array, "t"]]:
    """Sums, and the logsumexp of each token, by a running one over chunks of the vocabulary."""
    tile = _whole(hidden, labels, masks.padding)

    def fold_tile(carry: tuple[Array, Array, Array], chunk: Chunk) -> tuple[Any, None]:
        top, total, label_logits = carry
        logits = chunk.logits(tile.hidden, tiling.softcap)
        new_top = jnp.maximum(top, jnp.max(logits, axis=-1))
        total = total * jnp.exp(top - new_top) + jnp.sum(jnp.exp(logits - new_top[:, None]), -1)
        is_label = chunk.ids == tile.labels[:, None]
        return (new_top, total, label_logits + jnp.sum(jnp.where(is_label, logits, 0.0), -1)), None

    zeros = jnp.sum(_zeros(tile.hidden, weights)[:, :0], axis=-1)
    chunks = chunks_of(weights, tiling.vocab)
    (top, total, label_logits), _ = jax.lax.scan(fold_tile, (zeros - jnp.inf, zeros, zeros), chunks)
    lse = _over_shares(top + jnp.log(total))
    return _sum_up(tile, lse, collectives.psum(label_logits, "vocab"), masks.dataset), lse


def _gradient_by_vocab(
    tiling: Tiling,
    weights: Array,
    tile: _Tile,
    hidden: Array,
    loss_weights: LossWeights,
    lse: Array,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """Gradients of the hidden states [b, s, d], and of the head [v, d] in `dtype`."""

    def fold_tile(d_hidden: Array, chunk: Chunk) -> tuple[Array, Array]:
        is_label = chunk.ids == tile.labels[:, None]
        logits = chunk.logits(tile.hidden, tiling.softcap)
        d_logits = _d_logits(tile, loss_weights, logits, lse[:, None], is_label, tiling.softcap)
        d_hidden += _product("tv,vd->td", d_logits, chunk.weights)
        return d_hidden, _product("tv,td->vd", d_logits, tile.hidden).astype(dtype)

    chunks = chunks_of(weights, tiling.vocab)
    d_hidden, d_chunks = jax.lax.scan(fold_tile, _zeros(tile.hidden, weights), chunks)
    d_head = constrain(joined(d_chunks, len(weights)), *_HEAD)
    return collectives.psum(d_hidden, "vocab").reshape(hidden.shape).astype(hidden.dtype), d_head


def _zeros(like: Array, head: Array) -> Array:
    """float32, varying over the mesh axes that products of the two vary over."""
    return jnp.zeros_like(like, jnp.float32) + jnp.sum(head[:0], dtype=jnp.float32)


def _product(dimensions: str, left: Array, right: Array) -> Float[Array, "_ _"]:
    """A product, accumulated in float32."""
    return jnp.einsum(dimensions, left, right, preferred_element_type=jnp.float32)
