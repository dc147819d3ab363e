"""Gated short convolution, as in LFM2 (arXiv:2511.23404).

    b, c, x = u W_bᵀ, u W_cᵀ, u W_xᵀ        of the normalized input u
    y       = c · conv(b · x)               causal, of each channel, over a few tokens
    output  = y W_oᵀ

The decoding state has a constant size: the last inputs of the convolution. `tp` splits channels.
Devices that share sequences (`cp`) pass on the last inputs of their convolutions.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxforge.config.mixers import SHORT_CONVOLUTION
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.causal_convolution import ConvolutionState, causal_convolution
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.cost import MixerCost
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Convolution, Declare, Linear, residual_std
from jaxforge.model.mixer import Mixer, MixerOut, SavedValues, mix_shares, register_mixer
from jaxforge.parallel.sharding import constrain


@register_mixer(SHORT_CONVOLUTION)
class ShortConvolution(Mixer):
    """Gated short convolution of `model.short_convolution`."""

    is_recurrent = True

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c, embed, channels = config.short_convolution, (config.dim, "embed"), (config.dim, "heads")
        project = functools.partial(
            Linear, channels, embed, std=config.init_std, declare=declare, bias=c.bias
        )
        self.b_proj, self.c_proj, self.x_proj = project(), project(), project()
        self.conv = Convolution(*channels, c.conv_size, declare, bias=c.bias)
        std = residual_std(config)
        self.out_proj = Linear(embed, channels, std=std, declare=declare, bias=c.bias)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: ConvolutionState | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> MixerOut:
        """Mix the tokens of `x` and, with a decoding state, the last tokens before them."""
        gate_BSC = self.c_proj(x_BSD, precision)
        input_BSC = self.b_proj(x_BSD, precision) * self.x_proj(x_BSD, precision)
        has_bias = self.conv.has_bias
        weights = self.conv.weight[...], self.conv.bias[...] if has_bias else None
        weight_axes = ("heads", None), ("heads",) if has_bias else None
        strategy = settings.runtime.context

        def convolve(
            weights: tuple[Array, Array | None], x: Array, ids: Int[Array, "b s"] | None
        ) -> Float[Array, "b s c"]:
            return causal_convolution(x, *weights, ids, strategy=strategy)[0]

        if cache is None:
            y_BSC = mix_shares(
                convolve, weights, input_BSC, context.segment_ids,
                weight_axes=weight_axes, channels=("heads",),
            )  # fmt: skip
        else:
            assert context.segment_ids is None  # a cache holds one document per row
            # Tokens in order: devices of `cp` do not share a prompt.
            input_BSC = constrain(input_BSC, "batch", None, "heads")
            is_padding = context.is_padding
            lengths = None if is_padding is None else jnp.sum(~is_padding, axis=1)
            y_BSC, cache = causal_convolution(input_BSC, *weights, state=cache, lengths=lengths)
        y_BSC = constrain(y_BSC, "batch", "context", "heads")
        return MixerOut(self.out_proj(gate_BSC * y_BSC, precision), cache)

    @classmethod
    def empty_cache(
        cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype
    ) -> ConvolutionState:
        """Return the state before the first token; its size does not depend on `length`."""
        return jnp.zeros((batch, config.dim, config.short_convolution.conv_size - 1), dtype)

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> tuple[str | None, ...]:
        """Return the logical axes of a state: channels are split over `tp`."""
        return "batch", "heads", None

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer."""
        convolution = config.dim * config.short_convolution.conv_size
        return MixerCost(4 * config.dim**2, per_token=convolution)

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of projections, of gated outputs, and of the convolution's values."""
        channels = share(config.dim)
        return SavedValues(3 * channels, mixed=channels, inside=2 * channels)
