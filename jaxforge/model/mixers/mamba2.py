"""State-space layer of Mamba-2 (arXiv:2405.21060), as in Nemotron-H, Granite 4 and Bamba.

    z, x, B, C, Δ = u W_zᵀ, u W_xᵀ, u W_Bᵀ, u W_Cᵀ, u W_Δᵀ        of the normalized input u,
                                                                times constant factors (Falcon-H1)
    x, B, C       = silu(conv(x)), silu(conv(B)), silu(conv(C))   causal, of each channel
    Δ             = clamp(softplus(Δ + bias))                     time step of each head
    y             = recurrence of `kernels/state_space.py`, with A = -exp(a)
    output        = (RMSNorm(y · silu(z)) · weight) W_oᵀ          a norm for each group of heads;
                                                                or before the gate, or none

B and C are to the heads of a group what keys and queries are to value heads. The decoding state has
a constant size: the state of each head in float32, and the last inputs of the convolutions.

`tp` splits heads and groups. A single group is not split: each device computes its B and C, which
are small, for itself. Devices that share sequences (`cp`) pass on the last inputs of their
convolutions and the effect of their tokens on the states.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxforge.config.mixers import MAMBA2, Mamba2Config
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.causal_convolution import ConvolutionState, causal_convolution
from jaxforge.kernels.context_parallel import context_size
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.state_space import (
    Inputs,
    State,
    state_space,
    state_space_step,
    time_steps,
)
from jaxforge.model.cost import MixerCost
from jaxforge.model.initial_decays import log_rates, time_step_biases
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import (
    Convolution,
    Declare,
    Linear,
    residual_std,
    times,
)
from jaxforge.model.mixer import Mixer, MixerOut, SavedValues, mix_shares, register_mixer
from jaxforge.model.runtime import Runtime
from jaxforge.parallel.sharding import (
    Axes,
    automatic_axes,
    automatic_size,
    constrain,
)


class Mamba2State(NamedTuple):
    """Decoding state of a layer.

    Attributes:
        x: last inputs of the convolution of x.
        b: last inputs of the convolution of B.
        c: last inputs of the convolution of C.
        state: float32 state of each head.
    """

    x: ConvolutionState
    b: ConvolutionState
    c: ConvolutionState
    state: State


class _Projections(NamedTuple):
    """Projections of the tokens that enter the recurrence, before the convolutions."""

    x: Float[Array, "b s inner"]
    b: Float[Array, "b s groups*n"]
    c: Float[Array, "b s groups*n"]
    dt: Float[Array, "b s heads"]


class _Weights(NamedTuple):
    """Parameters of the convolutions of x, B and C, and float32 parameters of the recurrence."""

    convolutions: tuple[Float[Array, "c w"], ...]
    biases: tuple[Float[Array, "c"] | None, ...]
    a_log: Float[Array, "heads"]
    dt_bias: Float[Array, "heads"]
    skip: Float[Array, "heads"]


class GatedRMSNorm(nnx.Module):
    """Product y · silu(z) with an RMSNorm of each group of channels after or before it, in float32.

    Args:
        config: settings; `gated_norm` is the order of gate and norm, or "none" without a norm.
        eps: added to the variance.
        declare: declares the parameters.
    """

    def __init__(self, config: Mamba2Config, eps: float, declare: Declare) -> None:
        self.groups, self.eps, self.order = config.groups, eps, config.gated_norm
        if self.order != "none":
            self.weight = declare((config.inner_size,), ("heads",), jax.nn.initializers.ones)

    def __call__(
        self, y: Float[Array, "b s inner"], z: Float[Array, "b s inner"]
    ) -> Float[Array, "b s inner"]:
        """Gate and normalize; the result has the dtype of z."""
        y, gate = y.astype(jnp.float32), jax.nn.silu(z.astype(jnp.float32))
        if self.order == "before_gate":
            return (self._normed(y) * gate).astype(z.dtype)
        gated = y * gate
        return (gated if self.order == "none" else self._normed(gated)).astype(z.dtype)

    def _normed(self, x: Float[Array, "b s inner"]) -> Float[Array, "b s inner"]:
        # Groups [b, s, groups, channels of a group]: tp splits between groups, never within one.
        grouped = x.reshape(*x.shape[:-1], self.groups, -1)
        squares = jnp.mean(grouped * grouped, axis=-1, keepdims=True)
        normed = (grouped * jax.lax.rsqrt(squares + self.eps)).reshape(x.shape)
        return normed * self.weight[...].astype(jnp.float32)


@register_mixer(MAMBA2)
class Mamba2(Mixer):
    """Mamba-2 of `model.mamba2`."""

    is_recurrent = True

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = self.config = config.mamba2
        embed, heads = (config.dim, "embed"), (c.heads, "heads")
        inner, groups = (c.inner_size, "heads"), (c.group_size, _group_axis(c))
        project = functools.partial(
            Linear, inp=embed, std=config.init_std, declare=declare, bias=c.proj_bias
        )
        self.z_proj, self.x_proj = project(inner), project(inner)
        self.b_proj, self.c_proj = project(groups), project(groups)
        self.dt_proj = project(heads)
        self.x_conv, self.b_conv, self.c_conv = (
            Convolution(*channels, c.conv_size, declare, bias=c.conv_bias)
            for channels in (inner, groups, groups)
        )
        self.a_log = declare((c.heads,), ("heads",), log_rates(1.0))
        steps = time_step_biases(c.init_time_step_min, c.init_time_step_max)
        self.dt_bias = declare((c.heads,), ("heads",), steps)
        self.skip = declare((c.heads,), ("heads",), jax.nn.initializers.ones)
        self.norm = GatedRMSNorm(c, config.norm_eps, declare)
        std = residual_std(config)
        self.out_proj = Linear(embed, inner, std=std, declare=declare, bias=c.proj_bias)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: Mamba2State | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> MixerOut:
        """Mix the tokens of `x` and, with a decoding state, all earlier tokens."""
        layers = self.z_proj, self.x_proj, self.b_proj, self.c_proj, self.dt_proj
        factors = self.config.multipliers or (1.0,) * len(layers)
        z_BSI, *projected = (
            times(project(x_BSD, precision), factor)
            for project, factor in zip(layers, factors, strict=True)
        )
        projections = _Projections(*projected)
        if cache is None:
            mix = functools.partial(self._mix, runtime=settings.runtime)
            y_BSHP = self._mix_shares(mix, projections, context.segment_ids)
        else:
            assert context.segment_ids is None  # a cache holds one document per row
            y_BSHP, cache = self._extend(self._weights(), projections, context.is_padding, cache)
        y_BSHP = constrain(y_BSHP, "batch", "context", "heads", None)
        y_BSI = self.norm(y_BSHP.reshape(z_BSI.shape), z_BSI)
        y_BSD = self.out_proj(y_BSI, precision)
        return MixerOut(y_BSD, cache)

    def _weights(self) -> _Weights:
        convolutions = (self.x_conv, self.b_conv, self.c_conv)
        has_bias = self.config.conv_bias
        return _Weights(
            tuple(conv.weight[...] for conv in convolutions),
            tuple(conv.bias[...] if has_bias else None for conv in convolutions),
            # These determine decays, whose errors add up along a sequence.
            *(param[...].astype(jnp.float32) for param in (self.a_log, self.dt_bias, self.skip)),
        )

    def _mix(
        self,
        weights: _Weights,
        projections: _Projections,
        segment_ids: Int[Array, "b s"] | None,
        *,
        runtime: Runtime,
    ) -> Float[Array, "b s heads p"]:
        """Run convolutions and recurrence over whole sequences, or over the parts of a device."""
        convolved = [
            causal_convolution(u, weight, bias, segment_ids, strategy=runtime.context)[0]
            for u, weight, bias in zip(
                projections[:3], weights.convolutions, weights.biases, strict=True
            )
        ]
        inputs = self._inputs(weights, convolved, projections.dt)
        # Where the partitioner splits rows and heads, a device has its share of the elements.
        elements = runtime.chunk_elements * automatic_size("batch") * automatic_size("heads")
        return state_space(
            inputs, weights.skip, segment_ids, None, self.config.chunk_size, elements,
            runtime.context,
        )[0]  # fmt: skip

    def _extend(
        self,
        weights: _Weights,
        projections: _Projections,
        is_padding: Bool[Array, "b s"] | None,
        cache: Mamba2State,
    ) -> tuple[Float[Array, "b s heads p"], Mamba2State]:
        """Extend sequences from their state; padding on the right leaves the state unchanged."""
        # The recurrence needs the tokens in order: devices of `cp` do not share a prompt.
        axes = _projection_axes(self.config)
        projections = _Projections(
            *(constrain(u, "batch", None, axis) for u, axis in zip(projections, axes, strict=True))
        )
        lengths = None if is_padding is None else jnp.sum(~is_padding, axis=1)
        convolved, states = zip(
            *(
                causal_convolution(u, weight, bias, state=state, lengths=lengths)
                for u, weight, bias, state in zip(
                    projections[:3], weights.convolutions, weights.biases, cache[:3], strict=True
                )
            ),
            strict=True,
        )
        inputs = self._inputs(weights, convolved, projections.dt, is_padding)
        if inputs.x.shape[1] == 1:
            y_BSHP, state = state_space_step(inputs, weights.skip, cache.state)
        else:
            size = self.config.chunk_size
            y_BSHP, state = state_space(inputs, weights.skip, None, cache.state, size)
        return y_BSHP, Mamba2State._make((*states, state))

    def _inputs(
        self,
        weights: _Weights,
        convolved: Sequence[Array],
        dt: Array,
        is_padding: Bool[Array, "b s"] | None = None,
    ) -> Inputs:
        """Return the inputs of the recurrence from the results of the convolutions."""
        sizes = (self.config.head_dim, self.config.state_size, self.config.state_size)
        x, b, c = (
            jax.nn.silu(u).reshape(*u.shape[:2], -1, size)
            for u, size in zip(convolved, sizes, strict=True)
        )
        steps = time_steps(dt, weights.dt_bias, self.config.time_step_limits, is_padding)
        # A is negative by construction, so that the state decays.
        return Inputs(x, steps, -jnp.exp(weights.a_log), b.astype(x.dtype), c.astype(x.dtype))

    def _mix_shares(
        self,
        mix: Callable[..., Array],
        projections: _Projections,
        segment_ids: Int[Array, "b s"] | None,
    ) -> Float[Array, "b s heads p"]:
        """Call `mix` on each device's share, if devices share sequences."""
        axes = _projection_axes(self.config)
        if axes[1] is None and context_size() > 1 and automatic_axes():
            # Gradients of B and C are summed over tp, in float32.
            b, c = (u.astype(jnp.float32) for u in (projections.b, projections.c))
            projections = projections._replace(b=b, c=c)
        has_bias = self.config.conv_bias
        of_weights = _Weights._make(
            (
                tuple((axis, None) for axis in axes[:3]),
                tuple((axis,) if has_bias else None for axis in axes[:3]),
                *[("heads",)] * 3,
            )
        )
        return mix_shares(
            mix, self._weights(), projections, segment_ids, weight_axes=of_weights, channels=axes
        )

    @classmethod
    def empty_cache(
        cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype
    ) -> Mamba2State:
        """Return the state before the first token; its size does not depend on `length`."""
        c = config.mamba2
        inputs = (
            jnp.zeros((batch, size, c.conv_size - 1), dtype)
            for size in (c.inner_size, c.group_size, c.group_size)
        )
        shape = (batch, c.heads, c.head_dim, c.state_size)
        return Mamba2State._make((*inputs, jnp.zeros(shape, jnp.float32)))

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> Mamba2State:
        """Return the logical axes of a state: heads and groups are split over `tp`."""
        x, b, c, _ = _projection_axes(config.mamba2)
        inputs = [("batch", axis, None) for axis in (x, b, c)]
        return Mamba2State._make((*inputs, ("batch", "heads", None, None)))

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer.

        A token writes to the state of each head and reads from it: twice the size of the states.
        Chunks compute more, which is not work of the model.
        """
        c = config.mamba2
        projections = 3 * c.inner_size + 2 * c.group_size + c.heads
        convolutions = c.conv_size * (c.inner_size + 2 * c.group_size)
        states = 2 * c.inner_size * c.state_size
        return MixerCost(config.dim * projections, per_token=convolutions + states)

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of projections, outputs of the recurrence, convolutions and states."""
        c = config.mamba2
        inner, heads = share(c.inner_size), share(c.heads)
        groups = c.group_size if c.groups == 1 else share(c.group_size)
        states = 2 * inner * c.state_size // c.chunk_size  # float32, one for each chunk
        return SavedValues(
            2 * inner + 2 * groups + heads,
            mixed=inner,
            inside=3 * inner + 2 * groups + 2 * heads + states,
        )


def _group_axis(config: Mamba2Config) -> str | None:
    """Return the logical axis of B and C: as of key heads; a single group is not split."""
    return None if config.groups == 1 else "kv_heads"


def _projection_axes(config: Mamba2Config) -> Axes:
    """Return the logical axes of the channels of `_Projections`."""
    groups = _group_axis(config)
    return "heads", groups, groups, "heads"
