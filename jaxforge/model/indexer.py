"""Indexer of sparse attention: the selection of keys, its loss and its metrics.

    q_j = q_proj c                 c: latent of the queries
    k   = LayerNorm(k_proj x)      one key for all heads
    w   = weights_proj x / √(heads · width)

The first `rope_head_dim` channels of q and k have rotary positions. x and c have no gradient in the
indexer: the rest of the model learns from the loss of the language model alone.
`kernels/sparse_attention.py` describes scores and loss.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import AuxOutputs, Mean
from jaxforge.config.eval import ATTENTION_WEIGHTS
from jaxforge.config.mixers import LATENT_ATTENTION
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.context_parallel import context_size
from jaxforge.kernels.dot_product_attention import SegmentIds
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.masking import visible
from jaxforge.kernels.scoring import Scoring
from jaxforge.kernels.sparse_attention import (
    Index,
    Selection,
    SparseOut,
    choose_cached,
    sparse_attention,
)
from jaxforge.model.attention_weights import capture_scores
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Declare, Float32Linear, Linear
from jaxforge.model.norm import LayerNorm
from jaxforge.parallel.sharding import constrain

LOSS, COVERAGE = "indexer_loss", "indexer_coverage"
"""Names of the loss term and of the metrics of each layer: the mean divergence, and the share of
the weight of attention that the selected keys have."""

_NORM_EPS = 1e-6


class Indexer(nnx.Module):
    """Indexer of a layer with latent attention; `tp` splits its heads."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        sizes = self.sizes = config.latent_attention
        assert sizes.q_rank is not None  # `LatentAttentionConfig` has checked it
        heads, head, embed = sizes.index_heads, sizes.index_head_dim, (config.dim, "embed")
        latent, std = (sizes.q_rank, "latent_embed"), config.init_std
        self.q_proj = Linear(
            (heads * head, "heads"), latent, std=std, declare=declare, out_head=head
        )
        self.k_proj = Linear((head, "latent"), embed, std=std, declare=declare)
        self.k_norm = LayerNorm(head, _NORM_EPS, declare)
        self.weights_proj = Float32Linear((heads, "heads"), embed, std, declare)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        latents_BSr: Float[Array, "b s r"],
        context: Context,
        settings: LayerSettings,
        precision: LayerPrecision | None,
    ) -> Index:
        """Return queries, weights and keys.

        Args:
            x_BSD: input of the mixer.
            latents_BSr: latents of the queries.
            context: rotary angles.
            settings: settings of the layer.
            precision: precision of linear layers in 8 bits.
        """
        x_BSD, latents_BSr = jax.lax.stop_gradient((x_BSD, latents_BSr))
        q_BSHh = constrain(self.q_proj(latents_BSr, precision), "batch", "context", "heads", None)
        k_BSh = self.k_norm(self.k_proj(x_BSD, precision))
        q_BSHh, k_BSh = (self._rotated(x, context, settings) for x in (q_BSHh, k_BSh[:, :, None]))
        factor = (self.sizes.index_heads * self.sizes.index_head_dim) ** -0.5
        return Index(q_BSHh, self.weights_proj(x_BSD) * factor, k_BSh[:, :, 0])

    def _rotated(
        self, x_BSHh: Float[Array, "b s heads h"], context: Context, settings: LayerSettings
    ) -> Float[Array, "b s heads h"]:
        rope, nope = jnp.split(x_BSHh, [self.sizes.rope_head_dim], axis=-1)
        return jnp.concatenate([settings.rotated(rope, context), nope], axis=-1)


def attend_to_selected(
    index: Index,
    q_BSHh: Float[Array, "b s heads h"],
    k_BSHh: Float[Array, "b s heads h"],
    v_BSHv: Float[Array, "b s heads hv"],
    context: Context,
    settings: LayerSettings,
    config: ModelConfig,
    scoring: Scoring,
) -> tuple[Float[Array, "b s heads hv"], dict[str, Array], AuxOutputs]:
    """Attend within sequences to the keys that the indexer selects.

    Returns:
        The result, the captured weights and logits by name, and auxiliary outputs in training.
    """
    sizes, weights = config.latent_attention, context.loss_weights
    at_BS = jnp.broadcast_to(jnp.arange(q_BSHh.shape[1]), q_BSHh.shape[:2])
    if context_size() > 1:  # otherwise tokens are in the order of the sequence
        assert context.positions is not None
        at_BS = context.positions
    selection = Selection(sizes.index_top_k, sizes.index_warm_up, weights is not None)
    at = at_BS, context.segment_ids
    out = sparse_attention(q_BSHh, k_BSHh, v_BSHv, index, at, selection, scoring)
    selected_BSS = None
    if ATTENTION_WEIGHTS in settings.capture.points and not sizes.index_warm_up:
        selected_BSS = choose_cached(index, _visible(*at), sizes.index_top_k)
    captured = capture_scores(q_BSHh, k_BSHh, context, settings, scoring, selected_BSS=selected_BSS)
    aux = AuxOutputs() if weights is None else _aux_outputs(out, context, config)
    return out.y, captured, aux


def _visible(at_BS: Int[Array, "b s"], ids_BS: SegmentIds) -> Bool[Array, "b s s"]:
    seen_BSS = visible(at_BS[:, :, None], at_BS[:, None])
    return seen_BSS if ids_BS is None else seen_BSS & (ids_BS[:, :, None] == ids_BS[:, None])


def _aux_outputs(out: SparseOut, context: Context, config: ModelConfig) -> AuxOutputs:
    """Return the loss of the indexer, and the means of divergence and coverage."""
    assert out.divergence is not None
    assert out.coverage is not None
    assert context.loss_weights is not None
    is_padding = False if context.is_padding is None else context.is_padding
    divergence, coverage, tokens = (
        jnp.sum(jnp.where(is_padding, 0, x))
        for x in (out.divergence, out.coverage, jnp.ones_like(out.coverage))
    )
    factor = context.loss_weights.position * _weight(config)
    means = {
        LOSS: Mean(jax.lax.stop_gradient(divergence), tokens),
        COVERAGE: Mean(coverage, tokens),
    }
    return AuxOutputs({LOSS: factor * divergence} if _weight(config) else {}, means)


def empty_aux(config: ModelConfig) -> AuxOutputs:
    """Return the auxiliary outputs of a layer without an indexer in a model that has some."""
    zero = jnp.zeros(())
    empty = Mean(zero, zero)
    return AuxOutputs({LOSS: zero} if _weight(config) else {}, {LOSS: empty, COVERAGE: empty})


def _weight(config: ModelConfig) -> float:
    """Return the weight of a layer's divergence in the loss: the mean over layers is weighted."""
    layers = sum(LATENT_ATTENTION in parts.mixers for parts in config.layer_parts)
    return config.latent_attention.index_loss_weight / layers
