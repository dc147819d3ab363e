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
from jaxforge.config.points import ATTENTION_WEIGHTS, MAX_LOGITS
from jaxforge.kernels.attention_backends import Scoring, attend_with_masks, cached_attention
from jaxforge.kernels.context_parallel import attend_across_devices, context_size
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.masking import select_chunk, select_window, visible
from jaxforge.model import mup
from jaxforge.model.attention_weights import attention_weights, max_logits
from jaxforge.model.linear import Declare, Linear, normal
from jaxforge.model.norm import RMSNorm
from jaxforge.model.plan import LayerKind, LayerPlan
from jaxforge.model.rope import Rotation, rotate
from jaxforge.model.runtime import Runtime
from jaxforge.parallel.sharding import constrain


class Context(NamedTuple):
    """Properties of the tokens of a batch, shared by all layers.

    Attributes:
        positions: position of each token in its sequence; None: token i is at position i.
        segment_ids: document of each token; None: each row is one document.
        rotations: rotary angles of the positions for each of `LayerPlan.ropes`.
        loss_weights: weights of the layers' loss terms; None outside of training.
        is_padding: tokens that are routed to no expert; None: there is no padding.
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
        return jax.tree.map(lambda *angles: jnp.stack(angles)[kind.rope], *self.rotations)


class KVCache(NamedTuple):
    """Rotated keys and values of the tokens so far; outside of the layer scan, stacked by layer.

    The tokens of a head are contiguous, so that products with a cache do not transpose it.
    """

    k: Float[Array, "b kv t h"]
    v: Float[Array, "b kv t h"]

    def write(self, k: Array, v: Array, positions: Int[Array, "b s"]) -> "KVCache":
        """Return the cache with tokens [b, s, kv, h] at `positions`, which may differ by row."""
        # Mapped over rows: a scatter over the batch dimension would communicate between devices.
        write_rows = jax.vmap(lambda old, new, at: old.at[:, at].set(new.swapaxes(0, 1)))
        return KVCache(write_rows(self.k, k, positions), write_rows(self.v, v, positions))


Cache = KVCache | list[KVCache]
"""Cache of all layers: stacked, or a list by layer."""


class Capture(NamedTuple):
    """The activations that each layer returns (`LayerOut.activations`).

        attention           output of attention that is added to the residual stream, [b, s, d]
        mlp                 output of the feed-forward or experts, [b, s, d]
        residual            output of the layer, [b, s, d]
        attention_weights   weight of each key for each query, [b, heads, s, s], by an explicit
                            softmax
        max_logits          largest logit of attention before the soft cap, [b, heads]

    Attributes:
        points: names of the activations (`config.points`).
        reduce: (name, value) -> the value to return.
    """

    points: Collection[str] = ()
    reduce: Callable[[str, Array], Array] = lambda name, value: value

    def collect(self, values: Mapping[str, Array | None]) -> dict[str, Array]:
        """Return the captured values of a layer, by name."""
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
    """Outputs of a layer in addition to x; outside of the layer scan, stacked by layer.

    All layers of a model use the same names; a layer without a value has 0.

    Attributes:
        cache: the extended cache, if the layer was given one; a list by layer for unstacked layers.
        aux: auxiliary outputs.
        activations: the captured activations, by name.
    """

    cache: Cache | None
    aux: AuxOutputs = AuxOutputs()
    activations: Mapping[str, Array] = {}


class AttentionOut(NamedTuple):
    """Outputs of attention.

    Attributes:
        y: output to add to the residual stream.
        cache: the extended cache, if attention was given one.
        amax: amax of the linear layers, if the layer records them.
        weights: the attention weights, if they are captured.
        max_logits: the largest logits, if they are captured.
    """

    y: Float[Array, "b s d"]
    cache: KVCache | None
    amax: dict[str, Max]
    weights: Float[Array, "b heads s s"] | None
    max_logits: Float[Array, "b heads"] | None


class Attention(nnx.Module):
    """Attention of `n_heads` query and `kv_heads` key/value heads; optional RMSNorm on q and k.

    Optional sinks: one extra logit per head that joins the scores and has no value (gpt-oss,
    arXiv:2508.10925). Optional output gate: y · sigmoid(gate_proj(x)) for each channel of a head
    (arXiv:2505.06708). `n_heads * head_size` may differ from the width of the residual stream.
    """

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = config
        embed, heads = (c.dim, "embed"), (c.n_heads * c.head_size, "heads")
        kv_heads = (c.kv_heads * c.head_size, "kv_heads")
        project = functools.partial(
            Linear, inp=embed, std=c.init_std, declare=declare, bias=c.qkv_bias
        )
        self.q_proj, self.k_proj, self.v_proj = project(heads), project(kv_heads), project(kv_heads)
        if c.attention_output_gate:
            self.gate_proj = project(heads)
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
        """Attend to the tokens of `x` and, with a cache, to all earlier tokens."""
        kind, plan, runtime, capture = settings
        # A separate record of amax: values leave a `jax.checkpoint` only as its outputs.
        precision = precision and dataclasses.replace(precision, amax={})
        c, q, k = self.config, self.q_proj(x_BSD, precision), self.k_proj(x_BSD, precision)
        if c.qk_norm and c.qk_norm_scope == "projection":
            q, k = self.q_norm(q), self.k_norm(k)
        q_BSHh, k_BSKh = self._split_heads(q, "heads"), self._split_heads(k, "kv_heads")
        if c.qk_norm and c.qk_norm_scope == "head":
            q_BSHh, k_BSKh = self.q_norm(q_BSHh), self.k_norm(k_BSKh)
        v_BSKh = self._split_heads(self.v_proj(x_BSD, precision), "kv_heads")
        if plan.has_rope(kind):
            rope = functools.partial(
                rotate, by=context.rotation(kind), rope_as_matmul=runtime.rope_as_matmul
            )
            q_BSHh, k_BSKh = rope(q_BSHh), rope(k_BSKh)
        # Scores are float32, so sinks are, too.
        sinks = self.sinks[...].astype(jnp.float32) if c.attention_sinks else None
        weights = largest = None
        if cache is None:
            inputs = plan.masks, kind.mask, q_BSHh, k_BSKh, context.segment_ids, self.scoring
            if ATTENTION_WEIGHTS in capture.points:
                assert context_size() == 1  # otherwise no device has all keys
                weights = attention_weights(*inputs, sinks)
            if MAX_LOGITS in capture.points:
                assert context_size() == 1
                largest = max_logits(*inputs)
            attend: Callable[..., Array] = attend_with_masks
            kernel = runtime.attention
            if context_size() > 1:
                attend = functools.partial(attend_across_devices, runtime.context)
                kernel = runtime.ring if runtime.context == "ring" else kernel
            y_BSHh = attend(
                kernel, plan.masks, kind.mask, q_BSHh, k_BSKh, v_BSKh,
                context.segment_ids, context.positions, self.scoring, sinks,
            )  # fmt: skip
        else:
            assert context.positions is not None
            assert context.segment_ids is None  # a cache holds one document per row
            cache = cache.write(k_BSKh, v_BSKh, context.positions)
            at = context.positions[..., None], jnp.arange(cache.k.shape[2])
            seen_BST = visible(
                *at, select_window(plan.masks, kind.mask), select_chunk(plan.masks, kind.mask)
            )
            y_BSHh = cached_attention(q_BSHh, *cache, seen_BST[:, None], self.scoring, sinks)
        y_BSHh = _constrain_heads(y_BSHh, "heads")
        if c.attention_output_gate:
            gate_BSHh = self._split_heads(self.gate_proj(x_BSD, precision), "heads")
            y_BSHh *= jax.nn.sigmoid(gate_BSHh)
        y_BSD = self.o_proj(y_BSHh.reshape(*x_BSD.shape[:2], -1), precision)
        return AttentionOut(y_BSD, cache, precision.amax if precision else {}, weights, largest)

    def _split_heads(self, x: Float[Array, "b s d"], axis: str) -> Float[Array, "b s heads h"]:
        return _constrain_heads(x.reshape(*x.shape[:2], -1, self.config.head_size), axis)


def _constrain_heads(x_BSHh: Float[Array, "b s heads h"], axis: str) -> Float[Array, "b s heads h"]:
    return constrain(x_BSHh, "batch", "context", axis, None)


def residual_std(config: ModelConfig) -> float:
    """Return the initial std of matrices that write to the residual stream: init_std / √(2 L)."""
    return config.init_std / (2 * config.n_layers) ** 0.5
