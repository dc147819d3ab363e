"""Token-weighted cross-entropy with a custom gradient.

    loss = Σ_m scale_m · Σ_{valid tokens of microbatch m} -log p(label)
           + z_loss_weight · mean over all positions of logsumexp(logits)²

`loss_norm = "tokens"` gives every valid token of an update the same weight. `"microbatch"` is the
mean over microbatches of their token means, as in PyTorch loops that divide by the number of
accumulation steps.

`weighted_loss` defines its own gradient. It computes the logits in one of two ways:

    tiles of tokens       the whole vocabulary for some tokens at a time. The gradient is computed
                          with the loss, so that no logit is computed twice: three matrix products.
    chunks of vocabulary  a part of the vocabulary for all tokens at a time, with a running
                          logsumexp. The backward pass recomputes the logits: four products, and
                          memory that does not grow with the vocabulary.

In a pipeline, each stage has a share of the vocabulary. The loss reduces the logsumexp, the label's
logit and the gradient of the hidden states over the shares.

For a mixture, Σ -log p(label) of each dataset is returned as well, without a gradient.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import LossWeights
from jaxforge.kernels.scoring import product, soft_cap_slope
from jaxforge.model.transformer import project
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import (
    automatic_size,
    constrain,
    size_per_device,
    split_sequences,
)
from jaxforge.step.logit_tiles import Tile, Tiling, scan_tiles, single_tile, split_tokens
from jaxforge.step.vocab_chunks import Chunk, entry_ids, float32_zeros, join_vocab, split_vocab

_HEAD = ("vocab", "embed")  # logical axes of the output head


class LossSum(NamedTuple):
    """Sums of a loss, which add up over parts of a batch, unlike means.

    Attributes:
        total: Σ -log p(label) over valid tokens, float32.
        weight: number of valid tokens, float32.
        z_loss_sum: Σ logsumexp(logits)² over all positions except padding, valid or not, float32.
        by_dataset: `total` of each dataset of a mixture.
    """

    total: Float[Array, ""]
    weight: Float[Array, ""]
    z_loss_sum: Float[Array, ""]
    by_dataset: Float[Array, "n"] | None = None

    def plus(self, other: "LossSum") -> "LossSum":
        """Return the sums of both."""
        return jax.tree.map(jnp.add, self, other)


class WeightedLoss(NamedTuple):
    """Weighted loss of a microbatch.

    Attributes:
        cross_entropy: loss_weights.token · Σ -log p(label).
        z_loss: loss_weights.position · Σ logsumexp².
        by_dataset: Σ -log p(label) of each dataset of a mixture.
    """

    cross_entropy: Float[Array, ""]
    z_loss: Float[Array, ""]
    by_dataset: Float[Array, "n"] | None

    @property
    def value(self) -> Float[Array, ""]:
        """The sum of both terms."""
        return self.cross_entropy + self.z_loss


def cross_entropy(
    hidden_BSD: Float[Array, "b s d"],
    head_VD: Float[Array, "v d"],
    labels_BS: Int[Array, "b s"],
    tiling: Tiling,
    dataset_mask_BN: Bool[Array, "b n"] | None = None,
) -> LossSum:
    """Return the loss sums of a batch from its final hidden states.

    Args:
        hidden_BSD: final hidden states.
        head_VD: output head.
        labels_BS: labels; `IGNORE` is not valid.
        tiling: tile size of the logits.
        dataset_mask_BN: the dataset of each sequence; None: no sums by dataset.
    """
    hidden, labels, masks = _split_sequences(hidden_BSD, labels_BS, _Masks(dataset_mask_BN))
    return _sums(hidden, head_VD, labels, tiling, masks)


class _Masks(NamedTuple):
    """Masks of a microbatch.

    Attributes:
        dataset: the dataset of each sequence of a mixture, [b, datasets].
        padding: True for padding tokens, [b, s]; None: no padding.
    """

    dataset: Bool[Array, "b n"] | None = None
    padding: Bool[Array, "b s"] | None = None


def _split_sequences(
    hidden_BSD: Array, labels_BS: Array, masks: _Masks
) -> tuple[Array, Array, _Masks]:
    """Split sequences along `cp` into shorter ones, which no device axis splits."""
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
    weights = _gather_head(head_VD, hidden_BSD.dtype)
    if _has_vocab_chunks(tiling, head_VD):
        return _sums_by_vocab(tiling, hidden_BSD, weights, labels_BS, masks)[0]

    def fold_tile(total: LossSum, tile: Tile) -> tuple[LossSum, None]:
        return total.plus(_tile_sums(tile, weights, masks.dataset, tiling.softcap)[0]), None

    tiles, empty_tile = split_tokens(tiling.tokens, hidden_BSD, labels_BS, masks.padding)
    zeros = _tile_sums(empty_tile, weights, masks.dataset, tiling.softcap)[0]
    return scan_tiles(fold_tile, zeros, tiles)[0]


def _gather_head(head_VD: Array, dtype: jnp.dtype) -> Array:
    return collectives.all_gather_weight(head_VD.astype(dtype), _HEAD)


def _has_vocab_chunks(tiling: Tiling, head_VD: Array) -> bool:
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
    """Return cross-entropy and z-loss. Their sum is differentiable in `hidden` and `head`.

    The gradient is the gradient of the sum, so both terms must enter a loss with equal weight.
    Padding counts in neither term.

    Args:
        tiling: tile size of the logits.
        hidden_BSD: final hidden states.
        head_VD: output head.
        labels_BS: labels; `IGNORE` is not valid.
        loss_weights: weights of tokens and positions.
        dataset_mask_BN: the dataset of each sequence; None: no sums by dataset.
        is_padding_BS: padding tokens; None: no padding.
    """
    masks = _Masks(dataset_mask_BN, is_padding_BS)
    hidden, labels, masks = _split_sequences(hidden_BSD, labels_BS, masks)
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


def _weighted_loss_fwd(
    tiling: Tiling,
    hidden: Array,
    head: Array,
    labels: Array,
    loss_weights: LossWeights,
    masks: _Masks,
) -> tuple[WeightedLoss, tuple[Any, ...]]:
    """Return the loss and the residuals of the backward pass."""
    # Residuals for tiles of tokens: both gradients, already complete. For vocabulary chunks: the
    # inputs and the logsumexp, from which the backward pass recomputes logits. The gathered head
    # is saved as well, because the backward pass follows directly after the forward.
    if _has_vocab_chunks(tiling, head):
        weights, like = _gather_head(head, hidden.dtype), jnp.zeros((), head.dtype)
        sums, lse = _sums_by_vocab(tiling, hidden, weights, labels, masks)
        saved = hidden, weights, like, labels, masks.padding, loss_weights, lse
        return _weigh(sums, loss_weights), saved
    sums, d_hidden, d_head_DV = _gradient_by_tokens(
        tiling, hidden, head, labels, loss_weights, masks
    )
    d_head = constrain(d_head_DV.T, *_HEAD)
    return _weigh(sums, loss_weights), (d_hidden, d_head.astype(head.dtype))


def _weighted_loss_bwd(
    tiling: Tiling, saved: tuple[Any, ...], d: WeightedLoss
) -> tuple[Array, Array, None, None, None]:
    # The gradient of the sum of both terms: the cotangent of the z-loss is the same number.
    d_loss = d.cross_entropy
    if len(saved) == 2:
        d_hidden, d_head = (d_loss.astype(grad.dtype) * grad for grad in saved)
    else:
        hidden, weights, like, labels, padding, loss_weights, lse = saved
        loss_weights = LossWeights(d_loss * loss_weights.token, d_loss * loss_weights.position)
        d_hidden, d_head = _gradient_by_vocab(
            tiling, weights, single_tile(hidden, labels, padding), hidden, loss_weights, lse,
            like.dtype,
        )  # fmt: skip
    return d_hidden, d_head, None, None, None


_weighted_loss.defvjp(_weighted_loss_fwd, _weighted_loss_bwd)


def _tile_sums(
    tile: Tile, weights_VD: Array, dataset_mask_BN: Array | None, softcap: float | None
) -> tuple[LossSum, Array, Array, Array]:
    """Return sums of a tile, logits [t, v], logsumexp [t, 1], and a one-hot label mask [t, v]."""
    logits_TV = project(tile.hidden, weights_VD, softcap)
    lse_T1 = _reduce_logsumexp(jax.nn.logsumexp(logits_TV, axis=-1, keepdims=True))
    # A comparison, not a gather: it stays local when the vocabulary is split over devices.
    is_label_TV = entry_ids(weights_VD.shape[0]) == tile.labels[:, None]
    label_logits_T = jnp.sum(jnp.where(is_label_TV, logits_TV, 0.0), axis=-1)
    sums = _sum_up(tile, lse_T1[:, 0], collectives.psum(label_logits_T, "vocab"), dataset_mask_BN)
    return sums, logits_TV, lse_T1, is_label_TV


def _reduce_logsumexp(lse: Array) -> Array:
    """Reduce the logsumexp over the shares of the vocabulary."""
    if not collectives.split_over("vocab"):
        return lse
    top = collectives.pmax(lse, "vocab")
    return top + jnp.log(collectives.psum(jnp.exp(lse - top), "vocab"))


def _sum_up(
    tile: Tile, lse_T: Array, label_logits_T: Array, dataset_mask_BN: Array | None
) -> LossSum:
    nll_T = jnp.where(tile.valid, lse_T - label_logits_T, 0.0)
    return LossSum(
        total=jnp.sum(nll_T),
        weight=jnp.sum(tile.valid, dtype=jnp.float32),
        z_loss_sum=jnp.sum(jnp.where(tile.real, lse_T * lse_T, 0.0)),
        by_dataset=None if dataset_mask_BN is None else _by_dataset(nll_T, dataset_mask_BN),
    )


def _by_dataset(nll_T: Array, dataset_mask_BN: Array) -> Array:
    """Sum over the tokens of each dataset; a tile has equally many tokens of every sequence."""
    nll_B = jnp.sum(nll_T.reshape(dataset_mask_BN.shape[0], -1), axis=1)
    return jnp.sum(jnp.where(dataset_mask_BN, nll_B[:, None], 0.0), axis=0)


def _d_logits(
    tile: Tile,
    loss_weights: LossWeights,
    logits: Array,
    lse_T1: Array,
    is_label: Array,
    softcap: float | None,
) -> Array:
    """Return the gradient of uncapped logits [t, v], in the dtype of the hidden states."""
    # With p = softmax(logits) and token weight w, position weight z:
    #   d/dlogit of w (lse - label logit) + z lse² = (w + 2 z lse) p - w [is label]
    # Entries that pad a vocabulary chunk have logits of -inf, so p = 0.
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
    """Return sums and gradients of hidden states [b, s, d] and head [d, v]."""
    # The gradient of the head is Σ over tiles of hiddenᵀ · d_logits: the carry of the scan.
    weights = _gather_head(head, hidden.dtype)

    def tile_gradient(tile: Tile) -> tuple[LossSum, Array, Array]:
        sums, logits, lse, is_label = _tile_sums(tile, weights, masks.dataset, tiling.softcap)
        d_logits = _d_logits(tile, loss_weights, logits, lse, is_label, tiling.softcap)
        # Summands over shares of the vocabulary stay float32 until they are added up.
        multiply = product if collectives.split_over("vocab") else jnp.einsum
        d_hidden = multiply("tv,vd->td", d_logits, weights)
        return sums, d_hidden, product("td,tv->dv", tile.hidden, d_logits)

    def fold_tile(carry: tuple[LossSum, Array], tile: Tile) -> tuple[tuple[LossSum, Array], Array]:
        sums, d_hidden, d_head = tile_gradient(tile)
        return (carry[0].plus(sums), constrain(carry[1] + d_head, "embed", "vocab")), d_hidden

    tiles, empty_tile = split_tokens(tiling.tokens, hidden, labels, masks.padding)
    zero_sums, _, zero_gradient = tile_gradient(empty_tile)  # they vary over the same mesh axes
    (sums, d_head), d_tiles = scan_tiles(fold_tile, (zero_sums, zero_gradient), tiles)
    # [n, t, d] -> [b, n, tokens, d] -> [b, s, d], without the padding of the last tile
    batch, length, dim = hidden.shape
    d_hidden = d_tiles.reshape(-1, batch, tiling.tokens, dim).swapaxes(0, 1)
    d_hidden = d_hidden.reshape(batch, -1, dim)[:, :length]
    return sums, collectives.psum(d_hidden, "vocab").astype(hidden.dtype), d_head


def _sums_by_vocab(
    tiling: Tiling, hidden: Array, weights: Array, labels: Array, masks: _Masks
) -> tuple[LossSum, Float[Array, "t"]]:
    """Return sums and the logsumexp of each token, with a running logsumexp over chunks."""
    tile = single_tile(hidden, labels, masks.padding)

    # Invariant of the scan, over the entries of the chunks so far:
    #   maximum = max logit,  total = Σ exp(logit - maximum),  label_logits = the label's logit
    #   if its entry was in a chunk, else 0.
    def fold_chunk(carry: tuple[Array, Array, Array], chunk: Chunk) -> tuple[Any, None]:
        maximum, total, label_logits = carry
        logits = chunk.logits(tile.hidden, tiling.softcap)
        new_maximum = jnp.maximum(maximum, jnp.max(logits, axis=-1))
        total = total * jnp.exp(maximum - new_maximum)
        total += jnp.sum(jnp.exp(logits - new_maximum[:, None]), -1)
        is_label = chunk.ids == tile.labels[:, None]
        label_logits += jnp.sum(jnp.where(is_label, logits, 0.0), -1)
        return (new_maximum, total, label_logits), None

    zeros = jnp.sum(float32_zeros(tile.hidden, weights)[:, :0], axis=-1)
    chunks, initial = split_vocab(weights, tiling.vocab), (zeros - jnp.inf, zeros, zeros)
    (maximum, total, label_logits), _ = jax.lax.scan(fold_chunk, initial, chunks)
    lse = _reduce_logsumexp(maximum + jnp.log(total))
    return _sum_up(tile, lse, collectives.psum(label_logits, "vocab"), masks.dataset), lse


def _gradient_by_vocab(
    tiling: Tiling,
    weights: Array,
    tile: Tile,
    hidden: Array,
    loss_weights: LossWeights,
    lse: Array,
    dtype: jnp.dtype,
) -> tuple[Array, Array]:
    """Return gradients of the hidden states [b, s, d], and of the head [v, d] in `dtype`."""

    def fold_chunk(d_hidden: Array, chunk: Chunk) -> tuple[Array, Array]:
        is_label = chunk.ids == tile.labels[:, None]
        logits = chunk.logits(tile.hidden, tiling.softcap)
        d_logits = _d_logits(tile, loss_weights, logits, lse[:, None], is_label, tiling.softcap)
        d_hidden += product("tv,vd->td", d_logits, chunk.weights)
        return d_hidden, product("tv,td->vd", d_logits, tile.hidden).astype(dtype)

    chunks = split_vocab(weights, tiling.vocab)
    d_hidden, d_chunks = jax.lax.scan(fold_chunk, float32_zeros(tile.hidden, weights), chunks)
    d_head = constrain(join_vocab(d_chunks, len(weights)), *_HEAD)
    return collectives.psum(d_hidden, "vocab").reshape(hidden.shape).astype(hidden.dtype), d_head
