"""Causal self-attention with grouped queries, with or without a cache of keys and values."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import AuxOutputs, LossWeights, Max
from jaxforge.config.model import ModelConfig
from jaxforge.config.points import ATTENTION_WEIGHTS
from jaxforge.kernels.attention_backends import Scoring, attend_over, masked_attention
from jaxforge.kernels.context_parallel import attend_in_context, context_size
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.masking import chunk_of, visible, window_of
from jaxforge.model import mup
from jaxforge.model.attention_weights import attention_weights
from jaxforge.model.linear import Declare, Linear, normal
from jaxforge.model.norm import RMSNorm
from jaxforge.model.plan import LayerKind, LayerPlan
from jaxforge.model.rope import Rotation, rotate
from jaxforge.model.runtime import Runtime
from jaxforge.parallel.sharding import constrain


class Context(NamedTuple):
    """Properties of the tokens of a batch, shared by all layers.

    Attributes:
        positions: position of each token in its sequence; None: token i stands at i.
        segment_ids: document of each token; None: one document a row.
        rotations: the angles of the positions, by each of `LayerPlan.ropes`.
        loss_weights: what a layer's terms of the loss count for; None where nothing is trained.
        is_padding: which tokens go to no expert; None: each token goes to its experts.
    """

    positions: Int[Array, "b s"] | None = None
    segment_ids: Int[Array, "b s"] | None = None
    rotations: tuple[Rotation, ...] = ()
    loss_weights: LossWeights | None = None
    is_padding: Bool[Array, "b s"] | None = None

    def rotation(self, kind: LayerKind) -> Rotation:
        """Return the rotation of a kind of layer."""
        if isinstance(kind.rope, int):
            return self.rotations[kind.rope]
        if len(self.rotations) == 1:
            return self.rotations[0]
        return jax.tree.map(lambda *of_ropes: jnp.stack(of_ropes)[kind.rope], *self.rotations)


class KVCache(NamedTuple):
    """Keys and values of the tokens so far, after rotation; outside the scan, of all layers."""

    k: Float[Array, "b t kv h"]
    v: Float[Array, "b t kv h"]

    def write(self, k: Array, v: Array, positions: Int[Array, "b s"]) -> "KVCache":
        """The cache with new rows at `positions`, which may differ between sequences."""
        # Row by row, so that nothing crosses devices where rows are split over them.
        put = jax.vmap(lambda old, new, at: old.at[at].set(new))
        return KVCache(put(self.k, k, positions), put(self.v, v, positions))


class Capture(NamedTuple):
    """The activations that each layer returns (`LayerOut.activations`).

        attention           the attention's sum for the residual stream, [b, s, d]
        mlp                 the same of the feed-forward, or of experts
        residual            the output of the layer
        attention_weights   of each query and key, after the softmax, [b, heads, s, s]; computed by
                            a softmax of their own

    Attributes:
        points: their names (`config.points`).
        reduce: (name, value) -> the value to return.
    """

    points: Collection[str] = ()
    reduce: Callable[[str, Array], Array] = lambda name, value: value

    def collect(self, values: Mapping[str, Array | None]) -> dict[str, Array]:
        """Return the wanted ones of a layer's values, by name."""
        return {
            name: self.reduce(name, value)
            for name, value in values.items()
            if name in self.points and value is not None
        }


NO_CAPTURE = Capture()


class LayerSettings(NamedTuple):
    """Settings of a layer's forward pass.

    Attributes:
        kind: the layer's kind; its fields are traced where the stages of a pipeline differ.
        plan: masks and rotary positions that `kind` selects from.
        runtime: kernels and rematerialization.
        capture: the activations to return.
    """

    kind: LayerKind
    plan: LayerPlan
    runtime: Runtime
    capture: Capture = NO_CAPTURE


class LayerOut(NamedTuple):
    """Outputs of a layer in addition to x; outside the scan, of all layers.

    All layers of a model use the same names; a layer without a value has 0.

    Attributes:
        cache: the extended cache, if there was one.
        aux: auxiliary outputs.
        activations: the captured activations, by name.
    """

    cache: KVCache | None
    aux: AuxOutputs = AuxOutputs()
    activations: Mapping[str, Array] = {}


class AttentionOut(NamedTuple):
    """Outputs of attention.

    Attributes:
        y: sum for the residual stream.
        cache: the extended cache, if there was one.
        amax: amax of the linear layers, where the layer records them.
        weights: the attention weights, if they are captured.
    """

    y: Float[Array, "b s d"]
    cache: KVCache | None
    amax: dict[str, Max]
    weights: Float[Array, "b heads s s"] | None


class Attention(nnx.Module):
    """Attention of `n_heads` query and `kv_heads` key/value heads; optional RMSNorm on q and k.

    Optional sinks: a logit of each head next to its scores, of no value (gpt-oss,
    arXiv:2508.10925). The heads together may be wider or narrower than the residual stream.
    """

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        embed, heads = (c.dim, "embed"), (c.n_heads * c.head_size, "heads")
        kv_heads = (c.kv_heads * c.head_size, "kv_heads")
        project = functools.partial(
            Linear, inp=embed, std=c.init_std, declare=declare, bias=c.qkv_bias
        )
        self.q_proj, self.k_proj, self.v_proj = project(heads), project(kv_heads), project(kv_heads)
        self.o_proj = Linear(embed, heads, std=residual_std(c), declare=declare, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(
                    c.head_size if c.qk_norm_scope == "head" else size, c.qk_norm_eps, declare,
                    unit_offset=c.norm_unit_offset,
                )
                for size, _ in (heads, kv_heads)
            )  # fmt: skip
        if c.attention_sinks:
            self.sinks = declare((c.n_heads,), ("heads",), normal(c.init_std))
        self.config = c
        self.scoring = Scoring(mup.score_scale(c), c.attn_logit_softcap)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: KVCache | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> AttentionOut:
        """Attend within `x`, or, with a cache, to the earlier tokens as well."""
        kind, plan, runtime, capture = settings
        # A record of its own: values cannot leave a `jax.checkpoint` except as its outputs.
        precision = precision and dataclasses.replace(precision, amax={})
        c, q, k = self.config, self.q_proj(x_BSD, precision), self.k_proj(x_BSD, precision)
        if c.qk_norm and c.qk_norm_scope == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSHh, k_BSKh = self._heads(q, "heads"), self._heads(k, "kv_heads")
        if c.qk_norm and c.qk_norm_scope == "head":
            q_BSHh, k_BSKh = self.q_norm(q_BSHh), self.k_norm(k_BSKh)
        v_BSKh = self._heads(self.v_proj(x_BSD, precision), "kv_heads")
        if plan.turns(kind):
            by = context.rotation(kind)
            turn = functools.partial(rotate, by=by, rope_as_matmul=runtime.rope_as_matmul)
            q_BSHh, k_BSKh = turn(q_BSHh), turn(k_BSKh)
        weights = None
        if cache is None:
            if ATTENTION_WEIGHTS in capture.points:
                assert context_size() == 1  # or no device has all keys
                weights = attention_weights(
                    plan.masks, kind.mask, q_BSHh, k_BSKh, context.segment_ids, self.scoring,
                    self._sinks(),
                )  # fmt: skip
            attend: Callable[..., Array] = attend_over
            kernel = runtime.attention
            if context_size() > 1:
                attend = functools.partial(attend_in_context, runtime.context)
                kernel = runtime.ring if runtime.context == "ring" else kernel
            y_BSHh = attend(
                kernel, plan.masks, kind.mask, q_BSHh, k_BSKh, v_BSKh,
                context.segment_ids, context.positions, self.scoring, self._sinks(),
            )  # fmt: skip
        else:
            assert context.positions is not None
            assert context.segment_ids is None  # no cache holds packed documents
            cache = cache.write(k_BSKh, v_BSKh, context.positions)
            at = context.positions[..., None], jnp.arange(cache.k.shape[1])
            seen_BST = visible(
                *at, window_of(plan.masks, kind.mask), chunk_of(plan.masks, kind.mask)
            )
            y_BSHh = masked_attention(
                q_BSHh, *cache, seen_BST[:, None], self.scoring, self._sinks()
            )
        y_BSHh = _of_heads(y_BSHh, "heads")
        y_BSD = self.o_proj(y_BSHh.reshape(*x_BSD.shape[:2], -1), precision)
        return AttentionOut(y_BSD, cache, precision.amax if precision else {}, weights)

    def _sinks(self) -> Float[Array, "heads"] | None:
        """Float32, as scores are."""
        return self.sinks[...].astype(jnp.float32) if self.config.attention_sinks else None

    def _heads(self, x: Float[Array, "b s d"], axis: str) -> Float[Array, "b s heads h"]:
        return _of_heads(x.reshape(*x.shape[:2], -1, self.config.head_size), axis)


def _of_heads(x_BSHh: Float[Array, "b s heads h"], axis: str) -> Float[Array, "b s heads h"]:
    return constrain(x_BSHh, "batch", "context", axis, None)


def residual_std(config: ModelConfig) -> float:
    """Initial std of the two matrices that write to the residual stream: init_std / √(2 L)."""
    return config.init_std / (2 * config.n_layers) ** 0.5
