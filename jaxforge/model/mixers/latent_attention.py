"""Multi-head latent attention of DeepSeek-V2 (arXiv:2405.04434, section 2.1).

Keys and values of all heads are computed from one latent c of `kv_rank` channels per token. A key
has `nope_head_dim` channels of its own, without rotary positions, and `rope_head_dim` rotary
channels that all heads share. For head h and tokens s, t:

    c_t = RMSNorm(W_c x_t)             r_t = rotated(W_r x_t)               one per token
    k_t = (U_h c_t, r_t)               v_t = V_h c_t                        U_h, V_h: rows of kv_b
    q_s = (n_s, p_s)                   p rotated; from x, or from a latent of `q_rank` channels
    o_s = Σ_t softmax_t(n_s · U_h c_t + p_s · r_t) V_h c_t

There are two forms of the same sums:

    decompressed    k and v of every head are computed, and the platform's kernel attends. Training
                    and evaluation use it: a pair of tokens costs least.
    absorbed        n · U c = (Uᵀ n) · c and Σ w V c = V Σ w c: each query is moved into the space
                    of the latents, and heads attend to the latents themselves, which are keys and
                    values of one shared head. Nothing is computed per cached token.

The decoding state has c and r only, `kv_rank + rope_head_dim` values per token. A step of decoding
takes the form with fewer multiply-adds for its numbers of queries and keys: absorbed for single
tokens, decompressed for prompts (`absorbs`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import AuxOutputs
from jaxforge.config.mixers import LATENT_ATTENTION, LatentAttentionConfig
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.dot_product_attention import cached_attention
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.masking import select_chunk, select_window, visible
from jaxforge.kernels.scoring import Scoring
from jaxforge.kernels.sparse_attention import Index, choose_cached, pick_cached
from jaxforge.model import mup
from jaxforge.model.cost import MixerCost
from jaxforge.model.indexer import Indexer, attend_to_selected, empty_aux
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Declare, Linear, is_decoding_step, residual_std
from jaxforge.model.mixer import Mixer, MixerOut, SavedValues, register_mixer
from jaxforge.model.mixers.attention import attend_to_sequence, constrain_heads, scale_outputs
from jaxforge.model.norm import RMSNorm
from jaxforge.parallel import collectives
from jaxforge.parallel.sharding import constrain


class LatentCache(NamedTuple):
    """Values of the tokens so far.

    Attributes:
        tokens: latents and rotated keys, in one array for both products of a query.
        index_keys: keys of the indexer; None: the model has none.
    """

    tokens: Float[Array, "b t r"]
    index_keys: Float[Array, "b t i"] | None

    def write(self, tokens: "LatentCache", positions: Int[Array, "b s"]) -> "LatentCache":
        """Return the cache with tokens [b, s, ...] at `positions`, which may differ by row."""
        # Mapped over rows: a scatter over the batch dimension would communicate between devices.
        write_rows = jax.vmap(lambda old, new, at: old.at[at].set(new))
        cache: LatentCache = jax.tree.map(
            lambda old, new: write_rows(old, new, positions), self, tokens
        )
        return cache


@register_mixer(LATENT_ATTENTION)
class LatentAttention(Mixer):
    """Attention of `n_heads` heads to keys and values that are computed from a latent per token.

    `tp` splits heads. Latents and the decoding state are the same on all devices of a `tp` group.
    """

    scores_pairs = True

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c, sizes = config, config.latent_attention
        embed, std, head = (c.dim, "embed"), c.init_std, sizes.query_head_dim
        queries = (c.n_heads * sizes.query_head_dim, "heads")
        if sizes.q_rank is None:
            self.q_proj = Linear(queries, embed, std=std, declare=declare, out_head=head)
        else:
            latent = sizes.q_rank
            self.q_a_proj = Linear(
                (latent, "latent"), embed, std=std, declare=declare, bias=c.qkv_bias
            )
            self.q_a_norm = RMSNorm(latent, sizes.norm_eps, declare)
            self.q_b_proj = Linear(
                queries, (latent, "latent_embed"), std=std, declare=declare, out_head=head
            )
        self.kv_a_proj = Linear(
            (sizes.cached_values, "latent"), embed, std=std, declare=declare, bias=c.qkv_bias
        )
        self.kv_a_norm = RMSNorm(sizes.kv_rank, sizes.norm_eps, declare)
        both = sizes.nope_head_dim + sizes.value_head_dim
        self.kv_b_proj = Linear(
            (c.n_heads * both, "heads"), (sizes.kv_rank, "latent_embed"), std=std, declare=declare,
            out_head=both,
        )  # fmt: skip
        self.o_proj = Linear(
            embed, (c.n_heads * sizes.value_head_dim, "heads"), std=residual_std(c),
            declare=declare, bias=c.o_bias, inp_head=sizes.value_head_dim,
        )  # fmt: skip
        if sizes.has_indexer:  # last, so that the other initial values do not depend on it
            self.indexer = Indexer(c, declare)
        self.config, self.sizes = c, sizes
        scale = mup.attention_scale(c, c.head_size)
        # The absorbed form has wider queries, so that the factor does not follow from their width.
        self.scoring = Scoring(
            sizes.query_head_dim**-0.5 if scale is None else scale, c.attn_logit_softcap
        )

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: LatentCache | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> MixerOut:
        """Attend to the tokens of `x` and, with a cache, to all earlier tokens."""
        inputs_BSr = x_BSD
        if self.sizes.q_rank is not None:
            inputs_BSr = self.q_a_norm(self.q_a_proj(x_BSD, precision))
        q_BSHh = self._queries(inputs_BSr, context, settings, precision)
        tokens_BSr, index = self._tokens(x_BSD, context, settings, precision), None
        if self.sizes.has_indexer:
            index = self.indexer(x_BSD, inputs_BSr, context, settings, precision)
        captured, aux = dict[str, Array](), AuxOutputs()
        if cache is not None:
            assert context.positions is not None
            new = LatentCache(tokens_BSr, None if index is None else index.k)
            cache = cache.write(new, context.positions)
            y_BSHv = self._attend_to_cache(q_BSHh, index, cache, context, settings, precision)
        else:
            heads = q_BSHh, *self._decompressed(tokens_BSr, precision)
            if index is None:
                y_BSHv, captured = attend_to_sequence(*heads, context, settings, self.scoring)
            else:
                y_BSHv, captured, aux = attend_to_selected(
                    index, *heads, context, settings, self.config, self.scoring
                )
        y_BSHv = constrain_heads(y_BSHv, "heads")
        y_BSD = self.o_proj(y_BSHv, precision)
        return MixerOut(y_BSD, cache, captured, aux)

    def _attend_to_cache(
        self,
        q_BSHh: Float[Array, "b s heads h"],
        index: Index | None,
        cache: LatentCache,
        context: Context,
        settings: LayerSettings,
        precision: LayerPrecision | None,
    ) -> Float[Array, "b s heads v"]:
        """Attend to the tokens of a cache that the queries see, or to those of them selected."""
        assert context.positions is not None
        assert context.segment_ids is None  # a cache holds one document per row
        tokens_BTr, sizes = cache.tokens, self.sizes
        at = context.positions[..., None], jnp.arange(tokens_BTr.shape[1])
        masks, kind = settings.plan.masks, settings.kind.mask
        seen_BST = visible(*at, select_window(masks, kind), select_chunk(masks, kind))
        selects = not sizes.index_warm_up and sizes.index_top_k < tokens_BTr.shape[1]
        if index is not None and selects:
            assert cache.index_keys is not None
            index = index._replace(k=cache.index_keys)
            if q_BSHh.shape[1] == 1:  # reads the selected tokens only
                picked_Bk = pick_cached(index, seen_BST, sizes.index_top_k)
                tokens_BTr = jnp.take_along_axis(tokens_BTr, picked_Bk[..., None], axis=1)
                seen_BST = jnp.take_along_axis(seen_BST, picked_Bk[:, None], axis=2)
            else:
                seen_BST = choose_cached(index, seen_BST, sizes.index_top_k)
        mask = seen_BST[:, None]
        if absorbs(sizes, q_BSHh.shape[1], tokens_BTr.shape[1]):
            return self._attend_to_latents(q_BSHh, tokens_BTr, mask)
        k_BTHh, v_BTHv = self._decompressed(tokens_BTr, precision)
        kv = k_BTHh.swapaxes(1, 2), v_BTHv.swapaxes(1, 2)
        return cached_attention(q_BSHh, *kv, mask, self.scoring)

    def _queries(
        self,
        inputs_BSr: Float[Array, "b s r"],
        context: Context,
        settings: LayerSettings,
        precision: LayerPrecision | None,
    ) -> Float[Array, "b s heads h"]:
        """Return the queries: channels without positions, then rotated channels.

        They are computed from their latents, or from the residual stream without `q_rank`.
        """
        project = self.q_proj if self.sizes.q_rank is None else self.q_b_proj
        q_BSHh = constrain_heads(project(inputs_BSr, precision), "heads")
        nope, rope = jnp.split(q_BSHh, [self.sizes.nope_head_dim], axis=-1)
        rope = settings.rotated(rope, context)
        return constrain_heads(jnp.concatenate([nope, rope], axis=-1), "heads")

    def _tokens(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        settings: LayerSettings,
        precision: LayerPrecision | None,
    ) -> Float[Array, "b s r"]:
        """Return what all heads share of each token: its latent, then its rotated key."""
        both_BSr = self.kv_a_proj(x_BSD, precision)
        latents, rope = jnp.split(both_BSr, [self.sizes.kv_rank], axis=-1)
        rope = settings.rotated(rope[:, :, None], context)[:, :, 0]
        return jnp.concatenate([self.kv_a_norm(latents), rope], axis=-1)

    def _decompressed(
        self, tokens_BTr: Float[Array, "b t r"], precision: LayerPrecision | None
    ) -> tuple[Float[Array, "b t heads h"], Float[Array, "b t heads v"]]:
        """Return the keys and values of all heads."""
        latents, rope = jnp.split(tokens_BTr, [self.sizes.kv_rank], axis=-1)
        both_BTHh = constrain_heads(self.kv_b_proj(latents, precision), "heads")
        nope, v_BTHv = jnp.split(both_BTHh, [self.sizes.nope_head_dim], axis=-1)
        rope = jnp.broadcast_to(rope[:, :, None], (*nope.shape[:3], rope.shape[-1]))
        k_BTHh = jnp.concatenate([nope, rope], axis=-1)
        return constrain_heads(k_BTHh, "heads"), constrain_heads(v_BTHv, "heads")

    def _attend_to_latents(
        self,
        q_BSHh: Float[Array, "b s heads h"],
        tokens_BTr: Float[Array, "b t r"],
        mask: Bool[Array, "b 1 s t"],
    ) -> Float[Array, "b s heads v"]:
        """Attend in the absorbed form: to one key head, the tokens of the cache themselves."""
        nope, rope = jnp.split(q_BSHh, [self.sizes.nope_head_dim], axis=-1)
        is_step = is_decoding_step(q_BSHh)
        up_HhR, up_HvR = self._up_projections(q_BSHh.dtype, gathers=not is_step)
        q_BSHr = _product("bshn,hnr->bshr", nope, up_HhR, is_step, inp=None, out="latent_embed")
        shared_BKTr = tokens_BTr[:, None]
        # The rotary channels of the values are cut off: slicing the cache would copy it.
        y_BSHr = cached_attention(
            jnp.concatenate([q_BSHr, rope], axis=-1), shared_BKTr, shared_BKTr, mask, self.scoring
        )[..., : self.sizes.kv_rank]
        return _product("bshr,hvr->bshv", y_BSHr, up_HvR, is_step, inp="latent_embed", out=None)

    def _up_projections(
        self, dtype: jnp.dtype, *, gathers: bool
    ) -> tuple[Float[Array, "heads h r"], Float[Array, "heads v r"]]:
        """Return the matrices of each head from a latent to its key and to its value.

        Args:
            dtype: dtype of the matrices.
            gathers: whether matrices are gathered over the data axes.
        """
        weight = self.kv_b_proj.whole_weight().astype(dtype)
        if gathers:
            weight = collectives.all_gather_weight(weight, self.kv_b_proj.axes)
        by_head = weight.reshape(self.config.n_heads, -1, self.sizes.kv_rank)
        keys, values = jnp.split(by_head, [self.sizes.nope_head_dim], axis=1)
        return keys, values

    @classmethod
    def empty_cache(
        cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype
    ) -> LatentCache:
        """Return a cache without tokens."""
        sizes = config.latent_attention
        tokens, index = (
            jnp.zeros((batch, length, width), dtype)
            for width in (sizes.cached_values, sizes.index_head_dim)
        )
        return LatentCache(tokens, index if sizes.has_indexer else None)

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> LatentCache:
        """Return the logical axes of a cache: rows are split, and `tp` has copies."""
        axes: Any = ("batch", None, None)
        return LatentCache(axes, axes if config.latent_attention.has_indexer else None)

    @classmethod
    def extend_cache(cls, cache: LatentCache, tokens: int) -> LatentCache:
        """Return a cache with room for more tokens."""
        before = ((0, 0),) * (cache.tokens.ndim - 2)
        longer: LatentCache = jax.tree.map(
            lambda x: jnp.pad(x, (*before, (0, tokens), (0, 0))), cache
        )
        return longer

    @classmethod
    def empty_aux(cls, config: ModelConfig) -> AuxOutputs:
        """Return the auxiliary outputs of a layer with another mixer."""
        return empty_aux(config) if config.latent_attention.has_indexer else AuxOutputs()

    @classmethod
    def scale_logits(
        cls, config: ModelConfig, params: dict[str, Any], factors: Float[Array, "l heads"]
    ) -> dict[str, Any]:
        """Return parameters with scaled queries and keys (`Mixer.scale_logits`).

        Channels without positions are multiplied by the root of the factor in queries and keys. The
        rotary key is shared by all heads and stays the same, so that the rotary channels of queries
        have the whole factor (arXiv:2507.20534, section 2.2).
        """
        s, each = config.latent_attention, factors[..., None]
        shape = factors.shape
        rope, values = (
            jnp.broadcast_to(factor, (*shape, size))
            for factor, size in ((each, s.rope_head_dim), (1.0, s.value_head_dim))
        )
        nope = jnp.broadcast_to(jnp.sqrt(each), (*shape, s.nope_head_dim))
        queries = "q_proj" if s.q_rank is None else "q_b_proj"
        of_queries, of_keys = (
            jnp.concatenate([nope, channels], axis=-1) for channels in (rope, values)
        )
        return {
            **params,
            queries: scale_outputs(params[queries], of_queries),
            "kv_b_proj": scale_outputs(params["kv_b_proj"], of_keys),
        }

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer in the decompressed form."""
        s, heads = config.latent_attention, config.n_heads
        queries = heads * s.query_head_dim
        matrices = (
            config.dim * (s.cached_values + heads * s.value_head_dim)
            + s.kv_rank * heads * (s.nope_head_dim + s.value_head_dim)
            + (config.dim * queries if s.q_rank is None else s.q_rank * (config.dim + queries))
        )
        per_pair = heads * (s.query_head_dim + s.value_head_dim)
        if not s.has_indexer:
            return MixerCost(matrices, per_pair)
        of_index = s.index_heads * s.index_head_dim
        matrices += (s.q_rank or 0) * of_index + config.dim * (s.index_head_dim + s.index_heads)
        if s.index_warm_up:
            return MixerCost(matrices, of_index + per_pair)
        return MixerCost(matrices, of_index, per_selected=per_pair)

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of latents, of queries, keys and values, and of the heads' outputs."""
        s, heads = config.latent_attention, config.n_heads
        queries, values = share(heads * s.query_head_dim), share(heads * s.value_head_dim)
        decompressed = share(heads * (s.nope_head_dim + s.value_head_dim))
        latents = s.cached_values + (s.q_rank or 0)
        if s.has_indexer:
            latents += share(s.index_heads * (s.index_head_dim + 1)) + s.index_head_dim
        return SavedValues(
            latents + queries + decompressed,
            mixed=values,
            inside=2 * latents + 2 * queries + 2 * values,
        )

    @classmethod
    def working_values(cls, config: ModelConfig, share: Callable[[int], int]) -> int:
        """Return the size of keys and values with an indexer, and of their gradients."""
        s = config.latent_attention
        heads = share(config.n_heads * (s.query_head_dim + s.value_head_dim))
        return 2 * (heads + s.index_head_dim) if s.has_indexer else 0


def absorbs(sizes: LatentAttentionConfig, queries: int, keys: int) -> bool:
    """Return whether the absorbed form has fewer multiply-adds, per head and sequence.

    Decompressing costs `kv_rank` multiply-adds for every channel of each key, absorbing for every
    channel of each query; a pair of tokens costs the widths of its two products.
    """
    s = sizes
    channels = s.kv_rank * (s.nope_head_dim + s.value_head_dim)
    absorbed = queries * channels + queries * keys * (s.cached_values + s.kv_rank)
    per_pair = s.query_head_dim + s.value_head_dim
    return absorbed <= keys * channels + queries * keys * per_pair


def _product(
    dimensions: str,
    x: Float[Array, "b s heads i"],
    matrices: Float[Array, "heads m n"],
    is_step: bool,
    *,
    inp: str | None,
    out: str | None,
) -> Float[Array, "b s heads o"]:
    """Multiply each head by its matrix.

    In a step of decoding, matrices stay where they are and the smaller tokens are exchanged, as in
    `Linear`: `inp` and `out` are then the logical axes of x and of the product.
    """
    if is_step:
        x = constrain(x, None, None, "heads", inp)
    y = jnp.einsum(dimensions, x, matrices, preferred_element_type=x.dtype)
    if is_step:
        y = constrain(y, None, None, "heads", out)
    return constrain_heads(y, "heads")
