"""Causal self-attention with grouped queries, with or without a cache of keys and values."""

import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxforge.config.mixers import HeadSizes
from jaxforge.config.model import ATTENTION, ModelConfig
from jaxforge.kernels.attention_backends import attend_with_masks
from jaxforge.kernels.context_parallel import attend_across_devices, context_size
from jaxforge.kernels.dot_product_attention import cached_attention
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.masking import (
    positions_in_documents,
    select_chunk,
    select_window,
    visible,
)
from jaxforge.kernels.scoring import Scoring
from jaxforge.model import mup
from jaxforge.model.attention_weights import capture_scores
from jaxforge.model.cost import MixerCost, attention_cost
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Declare, Linear, normal, residual_std
from jaxforge.model.mixer import Mixer, MixerOut, SavedValues, register_mixer
from jaxforge.model.norm import LayerNorm, RMSNorm, build_qk_norm
from jaxforge.parallel.sharding import constrain


class KVCache(NamedTuple):
    """Rotated keys and values of the tokens so far.

    The tokens of a head are contiguous, so that products with a cache do not transpose it.
    """

    k: Float[Array, "b kv t h"]
    v: Float[Array, "b kv t h"]

    def write(self, k: Array, v: Array, positions: Int[Array, "b s"]) -> "KVCache":
        """Return the cache with tokens [b, s, kv, h] at `positions`, which may differ by row."""
        # Mapped over rows: a scatter over the batch dimension would communicate between devices.
        write_rows = jax.vmap(lambda old, new, at: old.at[:, at].set(new.swapaxes(0, 1)))
        return KVCache(write_rows(self.k, k, positions), write_rows(self.v, v, positions))


Keys = KVCache | tuple[Float[Array, "b s kv h"], Float[Array, "b s kv h"]]
"""Keys and values that queries attend to: those of a sequence, or a cache."""


@register_mixer(ATTENTION)
class Attention(Mixer):
    """Attention of `n_heads` query and `kv_heads` key/value heads; optional norms of q and k.

    Optional sinks: one extra logit per head that joins the scores and has no value (gpt-oss,
    arXiv:2508.10925). Optional output gate: y · sigmoid(gate_proj(x)) for each channel of a head
    (arXiv:2505.06708). `n_heads * head_size` may differ from the width of the residual stream.
    """

    scores_pairs = True
    name: ClassVar[str] = ATTENTION
    is_wide: ClassVar[bool] = False

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c, sizes = config, self._sizes(config)
        width = sizes.head_size
        embed, heads = (c.dim, "embed"), (c.n_heads * width, "heads")
        kv_heads = (sizes.kv_heads * width, "kv_heads")
        project = functools.partial(
            Linear,
            inp=embed,
            std=c.init_std,
            declare=declare,
            bias=c.qkv_bias,
            out_head=width,
        )
        self.q_proj = project(heads)
        self.k_proj = project(kv_heads) if sizes.projections > 0 else None
        self.v_proj = project(kv_heads) if sizes.projections > 1 else None
        if c.attention_output_gate:
            self.gate_proj = project(heads)
        self.o_proj = Linear(
            embed, heads, std=residual_std(c), declare=declare, bias=c.o_bias, inp_head=width
        )
        norm = functools.partial(build_qk_norm, c, head_size=width, declare=declare)
        self.q_norm = norm(c.n_heads) if c.qk_norm else None
        self.k_norm = norm(sizes.kv_heads) if c.qk_norm and self.k_proj else None
        if c.attention_sinks:
            self.sinks = declare((c.n_heads,), ("heads",), normal(c.init_std))
        self.config = c
        self.scoring = Scoring(mup.attention_scale(c, width), c.attn_logit_softcap)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: KVCache | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> MixerOut:
        """Attend to the tokens of `x` and, with a cache, to all earlier tokens."""
        kind, plan = settings.kind, settings.plan
        c, q = self.config, self.q_proj(x_BSD, precision)
        q_BSHh = self._positioned(q, self.q_norm, "heads", context, settings)
        if c.attn_temperature_scale is not None:
            factor_BS = _temperature(c, q_BSHh.shape[1], context, plan.rotates(kind))
            q_BSHh = (q_BSHh * factor_BS[..., None, None]).astype(q_BSHh.dtype)
        keys = self._keys(x_BSD, context, cache, settings, precision)
        # Scores are float32, so sinks are, too.
        sinks = self.sinks[...].astype(jnp.float32) if c.attention_sinks else None
        captured: dict[str, Array] = {}
        if isinstance(keys, KVCache):
            assert context.positions is not None
            assert context.segment_ids is None  # a cache holds one document per row
            at = context.positions[..., None], jnp.arange(keys.k.shape[2])
            seen_BST = visible(
                *at, select_window(plan.masks, kind.mask), select_chunk(plan.masks, kind.mask)
            )
            y_BSHh = cached_attention(q_BSHh, *keys, seen_BST[:, None], self.scoring, sinks)
        else:
            y_BSHh, captured = attend_to_sequence(
                q_BSHh, *keys, context, settings, self.scoring, sinks, is_wide=self.is_wide
            )
        y_BSHh = constrain_heads(y_BSHh, "heads")
        if c.attention_output_gate:
            gate_BSHh = constrain_heads(self.gate_proj(x_BSD, precision), "heads")
            y_BSHh *= jax.nn.sigmoid(gate_BSHh)
        y_BSD = self.o_proj(y_BSHh, precision)
        next_cache = keys if cache is not None else None
        return MixerOut(y_BSD, next_cache, captured, keys=keys if settings.passes_keys else None)

    def _keys(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: KVCache | None,
        settings: LayerSettings,
        precision: LayerPrecision | None,
    ) -> Keys:
        """Return the keys and values that queries attend to, with the tokens of `x`."""
        assert self.k_proj is not None
        c, k = self.config, self.k_proj(x_BSD, precision)
        v = k if self.v_proj is None else self.v_proj(x_BSD, precision)
        k_BSKh = self._positioned(k, self.k_norm, "kv_heads", context, settings)
        v_BSKh = constrain_heads(_clipped(v, c.clip_qkv), "kv_heads")
        if c.value_norm:
            v_BSKh = _unit_rms(v_BSKh, c.qk_norm_eps, rotates=True)
        if cache is None:
            return k_BSKh, v_BSKh
        assert context.positions is not None
        # Written before it is read: a new token sees itself.
        return cache.write(k_BSKh, v_BSKh, context.positions)

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> KVCache:
        """Return a cache without tokens."""
        sizes = cls._sizes(config)
        shape = (batch, sizes.kv_heads, length, sizes.head_size)
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> KVCache:
        """Return the logical axes of a cache: heads are split over `tp`."""
        axes: Any = ("batch", "kv_heads", None, None)
        return KVCache(axes, axes)

    @classmethod
    def extend_cache(cls, cache: KVCache, tokens: int) -> KVCache:
        """Return a cache with room for more tokens."""
        room = ((0, 0), (0, tokens), (0, 0))  # of heads, tokens and channels
        longer: KVCache = jax.tree.map(
            lambda x: jnp.pad(x, ((0, 0),) * (x.ndim - len(room)) + room), cache
        )
        return longer

    @classmethod
    def scale_logits(
        cls, config: ModelConfig, params: dict[str, Any], factors: Float[Array, "l heads"]
    ) -> dict[str, Any]:
        """Return parameters with scaled queries and keys (`Mixer.scale_logits`).

        Queries and keys of a head are each multiplied by the root of its factor. Query heads that
        share a key head may have different factors. Their key has the root of the smallest one, and
        each query the remainder, which exceeds 1 for a head that is not scaled: its logits stay the
        same, and those of the others are multiplied by exactly their factors.
        """
        by_key = factors.reshape(len(factors), cls._sizes(config).kv_heads, -1)
        # [l, kv heads]; queries [l, kv heads, heads per key] have the remainder of their factor.
        of_keys = jnp.sqrt(jnp.min(by_key, axis=-1))
        of_queries = (by_key / of_keys[..., None]).reshape(factors.shape)
        return {
            **params,
            "q_proj": scale_outputs(params["q_proj"], of_queries[..., None]),
            "k_proj": scale_outputs(params["k_proj"], of_keys[..., None]),
        }

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer."""
        return attention_cost(config, cls._sizes(config))

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of q, k, v, gate and the heads' outputs, before and after rotation."""
        sizes = cls._sizes(config)
        heads = share(config.n_heads * sizes.head_size)
        kv = share(sizes.kv_heads * sizes.head_size)
        gates = config.attention_output_gate * heads
        inside = 2 * heads + min(2, 2 * sizes.projections) * kv + gates
        return SavedValues(heads + sizes.projections * kv + gates, mixed=heads, inside=inside)

    @classmethod
    def _sizes(cls, config: ModelConfig) -> HeadSizes:
        return config.head_sizes(cls.name)

    def _positioned(
        self,
        x_BSHh: Float[Array, "b s heads h"],
        norm: RMSNorm | LayerNorm | None,
        axis: str,
        context: Context,
        settings: LayerSettings,
    ) -> Float[Array, "b s heads h"]:
        """Return queries or keys that are normalized and rotated to their positions.

        The order matters to imported weights: norm over the projection, clip, norm of heads,
        rotation, norm of rotated heads or unit norm.
        """
        c = self.config
        if norm is not None and c.qk_norm_scope == "projection":
            x_BSHh = _over_heads(norm, x_BSHh)
        x_BSHh = constrain_heads(_clipped(x_BSHh, c.clip_qkv), axis)
        of_heads = norm if c.qk_norm_scope != "projection" else None
        if of_heads is not None and not c.qk_norm_after_rotary:
            x_BSHh = of_heads(x_BSHh)
        x_BSHh = settings.rotated(x_BSHh, context)
        if of_heads is not None and c.qk_norm_after_rotary:
            x_BSHh = of_heads(x_BSHh)
        if c.qk_l2_norm:
            x_BSHh = _unit_rms(x_BSHh, c.qk_norm_eps, settings.plan.rotates(settings.kind))
        return x_BSHh


def attend_to_sequence(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv hv"],
    context: Context,
    settings: LayerSettings,
    scoring: Scoring,
    sinks: Float[Array, "heads"] | None = None,
    *,
    is_wide: bool = False,
) -> tuple[Float[Array, "b s heads hv"], dict[str, Array]]:
    """Attend within sequences with the platform's kernel, and across devices that share them.

    The kernel is that of wide heads if they are (`Runtime.wide_attention`).

    Returns:
        The result, and the captured weights and logits by name.
    """
    kind, plan, runtime, *_ = settings
    attend: Callable[..., Array] = attend_with_masks
    kernels = (runtime.wide_attention if is_wide else None) or runtime.attention
    kernel = kernels.whole
    if context_size() > 1:
        attend = functools.partial(attend_across_devices, runtime.context)
        kernel = kernels.ring if runtime.context == "ring" else kernel
    y_BSHh = attend(
        kernel, plan.masks, kind.mask, q_BSHh, k_BSKh, v_BSKh, context.segment_ids,
        context.positions, scoring, sinks,
    )  # fmt: skip
    return y_BSHh, capture_scores(q_BSHh, k_BSKh, context, settings, scoring, sinks)


def scale_outputs(
    linear: dict[str, Array], factors: Float[Array, "l heads #h"]
) -> dict[str, Array]:
    """Return weights [l, heads * h, d] and biases [l, heads * h] with their outputs scaled."""

    def scaled(x: Array) -> Array:
        by_head = x.reshape(*factors.shape[:2], -1, *x.shape[2:])
        columns = factors.reshape(*factors.shape, *[1] * (x.ndim - 2))
        return (by_head * columns).astype(x.dtype).reshape(x.shape)

    return {name: scaled(x) for name, x in linear.items()}


def constrain_heads(x_BSHh: Float[Array, "b s heads h"], axis: str) -> Float[Array, "b s heads h"]:
    """Split heads over `tp`, by the logical axis "heads" or "kv_heads"."""
    return constrain(x_BSHh, "batch", "context", axis, None)


def _over_heads(
    norm: Callable[[Array], Array], x_BSHh: Float[Array, "b s heads h"]
) -> Float[Array, "b s heads h"]:
    """Normalize over all heads of a token."""
    return norm(x_BSHh.reshape(*x_BSHh.shape[:2], -1)).reshape(x_BSHh.shape)


def _clipped(x: Float[Array, "..."], limit: float | None) -> Float[Array, "..."]:
    return x if limit is None else jnp.clip(x, -limit, limit)


def _unit_rms(
    x_BSHh: Float[Array, "b s heads h"], eps: float, rotates: bool | Bool[Array, ""]
) -> Float[Array, "b s heads h"]:
    """Divide each head by its root mean square in a layer with rotary positions."""
    if rotates is False:
        return x_BSHh
    x32 = x_BSHh.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * jnp.where(rotates, scale, 1.0)).astype(x_BSHh.dtype)


def _temperature(
    config: ModelConfig, length: int, context: Context, rotates: bool | Bool[Array, ""]
) -> Float[Array, "*b s"]:
    """Return the factor of queries by their position in the document.

    Scalable softmax (arXiv:2501.19399) in steps of `attn_temperature_floor` tokens. Llama 4's is 1
    in layers that rotate, and its steps begin a token earlier than Ministral 3's.
    """
    is_llama4 = config.attn_temperature_type == "llama4"
    at_BS = context.positions
    if at_BS is None:
        rows = 1 if context.segment_ids is None else len(context.segment_ids)
        at_BS = positions_in_documents(rows, length, context.segment_ids)
    # float32 has all positions up to 2^24.
    offset_BS = at_BS.astype(jnp.float32) + (1.0 if is_llama4 else 0.0)
    steps = jnp.floor(offset_BS / config.attn_temperature_floor)
    factor_BS = 1.0 + jnp.log1p(steps) * (config.attn_temperature_scale or 0.0)
    return jnp.where(rotates, 1.0, factor_BS) if is_llama4 else factor_BS
