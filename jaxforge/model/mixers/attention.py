"""Causal self-attention with grouped queries, with or without a cache of keys and values."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

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
from jaxforge.model.norm import build_qk_norm
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


@register_mixer(ATTENTION)
class Attention(Mixer):
    """Attention of `n_heads` query and `kv_heads` key/value heads; optional norms of q and k.

    Optional sinks: one extra logit per head that joins the scores and has no value (gpt-oss,
    arXiv:2508.10925). Optional output gate: y · sigmoid(gate_proj(x)) for each channel of a head
    (arXiv:2505.06708). `n_heads * head_size` may differ from the width of the residual stream.
    """

    scores_pairs = True

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        embed, heads = (c.dim, "embed"), (c.n_heads * c.head_size, "heads")
        kv_heads = (c.kv_heads * c.head_size, "kv_heads")
        project = functools.partial(
            Linear,
            inp=embed,
            std=c.init_std,
            declare=declare,
            bias=c.qkv_bias,
            out_head=c.head_size,
        )
        self.q_proj, self.k_proj, self.v_proj = project(heads), project(kv_heads), project(kv_heads)
        if c.attention_output_gate:
            self.gate_proj = project(heads)
        self.o_proj = Linear(
            embed, heads, std=residual_std(c), declare=declare, bias=c.o_bias, inp_head=c.head_size
        )
        if c.qk_norm:
            self.q_norm, self.k_norm = (
                build_qk_norm(c, n, declare) for n in (c.n_heads, c.kv_heads)
            )
        if c.attention_sinks:
            self.sinks = declare((c.n_heads,), ("heads",), normal(c.init_std))
        self.config = c
        self.scoring = Scoring(mup.attention_scale(c), c.attn_logit_softcap)

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
        c, q, k = self.config, self.q_proj(x_BSD, precision), self.k_proj(x_BSD, precision)
        # The order matters to imported weights: norm over the projection, clip, norm of heads,
        # rotation, norm of rotated heads or unit norm, temperature.
        if c.qk_norm and c.qk_norm_scope == "projection":
            q, k = _over_heads(self.q_norm, q), _over_heads(self.k_norm, k)
        q_BSHh = constrain_heads(_clipped(q, c.clip_qkv), "heads")
        k_BSKh = constrain_heads(_clipped(k, c.clip_qkv), "kv_heads")
        if c.qk_norm and c.qk_norm_scope != "projection" and not c.qk_norm_after_rotary:
            q_BSHh, k_BSKh = self.q_norm(q_BSHh), self.k_norm(k_BSKh)
        v = _clipped(self.v_proj(x_BSD, precision), c.clip_qkv)
        v_BSKh = constrain_heads(v, "kv_heads")
        q_BSHh, k_BSKh = self._with_positions(q_BSHh, k_BSKh, context, settings)
        # Scores are float32, so sinks are, too.
        sinks = self.sinks[...].astype(jnp.float32) if c.attention_sinks else None
        captured: dict[str, Array] = {}
        if cache is None:
            y_BSHh, captured = attend_to_sequence(
                q_BSHh, k_BSKh, v_BSKh, context, settings, self.scoring, sinks
            )
        else:
            assert context.positions is not None
            assert context.segment_ids is None  # a cache holds one document per row
            # Written before it is read: a new token sees itself.
            cache = cache.write(k_BSKh, v_BSKh, context.positions)
            at = context.positions[..., None], jnp.arange(cache.k.shape[2])
            seen_BST = visible(
                *at, select_window(plan.masks, kind.mask), select_chunk(plan.masks, kind.mask)
            )
            y_BSHh = cached_attention(q_BSHh, *cache, seen_BST[:, None], self.scoring, sinks)
        y_BSHh = constrain_heads(y_BSHh, "heads")
        if c.attention_output_gate:
            gate_BSHh = constrain_heads(self.gate_proj(x_BSD, precision), "heads")
            y_BSHh *= jax.nn.sigmoid(gate_BSHh)
        y_BSD = self.o_proj(y_BSHh, precision)
        return MixerOut(y_BSD, cache, captured)

    @classmethod
    def empty_cache(cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype) -> KVCache:
        """Return a cache without tokens."""
        shape = (batch, config.kv_heads, length, config.head_size)
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
        by_key = factors.reshape(len(factors), config.kv_heads, -1)
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
        return attention_cost(config)

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of q, k, v, gate and the heads' outputs, before and after rotation."""
        heads = share(config.n_heads * config.head_size)
        kv = share(config.kv_heads * config.head_size)
        gates = config.attention_output_gate * heads
        return SavedValues(heads + 2 * kv + gates, mixed=heads, inside=2 * heads + 2 * kv + gates)

    def _with_positions(
        self,
        q_BSHh: Float[Array, "b s heads h"],
        k_BSKh: Float[Array, "b s kv h"],
        context: Context,
        settings: LayerSettings,
    ) -> tuple[Float[Array, "b s heads h"], Float[Array, "b s kv h"]]:
        """Return queries and keys that depend on positions, by rotation and temperature.

        Norms that follow the rotation are applied between the two.
        """
        c, (kind, plan, *_) = self.config, settings
        q_BSHh, k_BSKh = (settings.rotated(x, context) for x in (q_BSHh, k_BSKh))
        if c.qk_norm_after_rotary:
            q_BSHh, k_BSKh = self.q_norm(q_BSHh), self.k_norm(k_BSKh)
        if c.qk_l2_norm:
            rotates = plan.rotates(kind)
            q_BSHh, k_BSKh = (_unit_rms(x, c.qk_norm_eps, rotates) for x in (q_BSHh, k_BSKh))
        if c.attn_temperature_scale is not None:
            factor_BS = _temperature(c, q_BSHh.shape[1], context, plan.rotates(kind))
            q_BSHh = (q_BSHh * factor_BS[..., None, None]).astype(q_BSHh.dtype)
        return q_BSHh, k_BSKh


def attend_to_sequence(
    q_BSHh: Float[Array, "b s heads h"],
    k_BSKh: Float[Array, "b s kv h"],
    v_BSKh: Float[Array, "b s kv hv"],
    context: Context,
    settings: LayerSettings,
    scoring: Scoring,
    sinks: Float[Array, "heads"] | None = None,
) -> tuple[Float[Array, "b s heads hv"], dict[str, Array]]:
    """Attend within sequences with the platform's kernel, and across devices that share them.

    Returns:
        The result, and the captured weights and logits by name.
    """
    kind, plan, runtime, _ = settings
    attend: Callable[..., Array] = attend_with_masks
    kernel = runtime.attention
    if context_size() > 1:
        attend = functools.partial(attend_across_devices, runtime.context)
        kernel = runtime.ring if runtime.context == "ring" else kernel
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
