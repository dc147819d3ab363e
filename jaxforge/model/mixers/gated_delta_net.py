"""Gated DeltaNet (arXiv:2412.06464) as in Qwen3-Next: linear attention with a state per head.

    q, k, v = silu(conv(x Wᵀ))          causal convolutions of each channel
    β       = sigmoid(x W_βᵀ)           share of a key's old value that a token replaces
    g       = -exp(a) softplus(x W_gᵀ + b)    decay of the state, per value head
    y       = gated delta rule (q, k, v, g, β)
    output  = (RMSNorm(y) · silu(x W_zᵀ)) W_oᵀ

`kernels/gated_delta.py` describes the rule. The decoding state has a constant size: the state of
each value head in float32, and the last inputs of the convolutions. Kimi Delta Attention has other
decays and output gates (`kimi_delta_attention.py`); `DeltaNet` is what both share.
"""

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxforge.config.mixers import GATED_DELTA_NET, DeltaSizes
from jaxforge.config.model import ModelConfig
from jaxforge.kernels import gated_delta
from jaxforge.kernels.causal_convolution import ConvolutionState, causal_convolution
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.kernels.gated_delta import (
    DeltaState,
    DeltaTokens,
    gated_delta_rule,
    gated_delta_step,
)
from jaxforge.model.cost import MixerCost
from jaxforge.model.initial_decays import log_rates
from jaxforge.model.layer import Context, LayerSettings
from jaxforge.model.linear import Declare, Linear, fan_in_uniform, residual_std
from jaxforge.model.mixer import Mixer, MixerOut, SavedValues, mix_shares, register_mixer
from jaxforge.model.norm import RMSNorm
from jaxforge.model.runtime import Runtime
from jaxforge.parallel.sharding import constrain


class DeltaNetState(NamedTuple):
    """Decoding state of a layer.

    Attributes:
        q, k, v: last inputs of the convolutions of queries, keys and values.
        state: state of each value head.
    """

    q: ConvolutionState
    k: ConvolutionState
    v: ConvolutionState
    state: DeltaState


class _Inputs(NamedTuple):
    """Projections of the tokens, before the convolutions."""

    q: Float[Array, "b s keys"]
    k: Float[Array, "b s keys"]
    v: Float[Array, "b s values"]
    log_decay: Float[Array, "b s He"]
    beta: Float[Array, "b s H"]


class _Convolutions(NamedTuple):
    """Weights of the causal convolutions."""

    q: Float[Array, "keys w"]
    k: Float[Array, "keys w"]
    v: Float[Array, "values w"]


class DeltaNet(Mixer):
    """Base class of mixers with the gated delta rule; heads are split over `tp`.

    Devices that share sequences pass on the last inputs of their convolutions and the effect of
    their tokens on the state.

    Attributes:
        table: table of `[model]`, whose `sizes` the mixer has.
        decays_channels: whether each channel of a key has a decay, instead of each head.
        beta_proj: matrix of β.
        decay_log, decay_bias: a and b of the decays.
    """

    is_recurrent = True
    table: ClassVar[str]
    decays_channels: ClassVar[bool] = False
    beta_proj: Linear
    decay_log: nnx.Param[Array]
    decay_bias: nnx.Param[Array]

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = self.sizes = self.sizes_of(config)
        embed = (config.dim, "embed")
        keys = (c.key_size, "kv_heads")
        values = (c.value_size, "heads")

        def project(out: tuple[int, str], inp: tuple[int, str] = embed) -> Linear:
            return Linear(out, inp, std=config.init_std, declare=declare)

        self.q_proj, self.k_proj, self.v_proj = project(keys), project(keys), project(values)
        self.declare_gates(project)
        self.q_conv, self.k_conv, self.v_conv = (
            declare((size, c.conv_size), (axis, None), fan_in_uniform)
            for size, axis in (keys, keys, values)
        )
        self.declare_decays(declare)
        self.norm = RMSNorm(c.value_head_dim, config.norm_eps, declare)
        self.o_proj = Linear(embed, values, std=residual_std(config), declare=declare)

    def declare_gates(self, project: Callable[..., Linear]) -> None:
        """Declare the matrices of β, of the decays and of the output gates.

        Args:
            project: (out, inp) -> matrix, by default from the residual stream.
        """
        raise NotImplementedError

    def declare_decays(self, declare: Declare) -> None:
        """Declare `decay_log` and `decay_bias`."""
        raise NotImplementedError

    @classmethod
    def sizes_of(cls, config: ModelConfig) -> DeltaSizes:
        """Return the sizes of the mixer's heads."""
        sizes: DeltaSizes = getattr(config, cls.table).sizes
        return sizes

    def decay_input(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None
    ) -> Float[Array, "b s He"]:
        """Return what the decays follow from, for each head or for each of its channels."""
        raise NotImplementedError

    def output_gate(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None
    ) -> Float[Array, "b s values"]:
        """Return the factors of the normalized outputs, in float32."""
        raise NotImplementedError

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        context: Context,
        cache: DeltaNetState | None = None,
        *,
        settings: LayerSettings,
        precision: LayerPrecision | None = None,
    ) -> MixerOut:
        """Mix the tokens of `x` and, with a decoding state, all earlier tokens."""
        inputs = _Inputs(
            self.q_proj(x_BSD, precision),
            self.k_proj(x_BSD, precision),
            self.v_proj(x_BSD, precision),
            self._log_decay(self.decay_input(x_BSD, precision)),
            # Decays and strengths are float32 in every precision: errors add up along a sequence.
            jax.nn.sigmoid(self.beta_proj(x_BSD, precision).astype(jnp.float32)),
        )
        weights = _Convolutions(self.q_conv[...], self.k_conv[...], self.v_conv[...])
        if cache is None:
            mix = functools.partial(self._mix, runtime=settings.runtime)
            y_BSHv = mix_shares(
                mix, weights, inputs, context.segment_ids,
                weight_axes=_WEIGHT_AXES, channels=_AXES,
            )  # fmt: skip
        else:
            y_BSHv, cache = self._extend(weights, inputs, context, cache)
        y_BSHv = constrain(y_BSHv, "batch", "context", "heads", None)
        gate_BSHv = self.output_gate(x_BSD, precision).reshape(y_BSHv.shape)
        # Normalized before the gate, as in the authors' code; Mamba-2 gates first.
        y_BSHv = self.norm(y_BSHv.astype(jnp.float32)) * gate_BSHv
        y_BSD = self.o_proj(y_BSHv.astype(x_BSD.dtype).reshape(*x_BSD.shape[:2], -1), precision)
        return MixerOut(y_BSD, cache)

    def _log_decay(self, x_BSe: Float[Array, "b s He"]) -> Float[Array, "b s He"]:
        rate, bias = jnp.exp(self.decay_log[...].astype(jnp.float32)), self.decay_bias[...]
        rate = jnp.repeat(rate, len(bias) // len(rate))
        return -rate * jax.nn.softplus(x_BSe.astype(jnp.float32) + bias.astype(jnp.float32))

    def _mix(
        self,
        weights: _Convolutions,
        inputs: _Inputs,
        segment_ids: Int[Array, "b s"] | None,
        runtime: Runtime,
    ) -> Float[Array, "b s H v"]:
        convolved = [
            causal_convolution(x, weight, segment_ids=segment_ids, strategy=runtime.context)[0]
            for x, weight in zip(inputs[:3], weights, strict=True)
        ]
        tokens = self._tokens(convolved, inputs.log_decay, inputs.beta)
        return gated_delta_rule(
            tokens, segment_ids, None, runtime.context, runtime.delta_chunk,
            maps_states=runtime.maps_states,
        )[0]  # fmt: skip

    def _extend(
        self, weights: _Convolutions, inputs: _Inputs, context: Context, cache: DeltaNetState
    ) -> tuple[Float[Array, "b s H v"], DeltaNetState]:
        """Mix new tokens with the state of earlier ones; padding leaves the state unchanged."""
        assert context.segment_ids is None  # a cache holds one document per row
        # The recurrence needs the tokens in order: devices of `cp` do not share a prompt.
        inputs = _Inputs._make(
            constrain(x, "batch", None, axis) for x, axis in zip(inputs, _AXES, strict=True)
        )
        lengths = None
        if context.is_padding is not None:
            is_token = ~context.is_padding
            lengths = jnp.sum(is_token, axis=1)
            # A decay of exp(0) = 1 and a strength of 0 leave the state as it is.
            log_decay, beta = (x * is_token[..., None] for x in inputs[3:])
            inputs = inputs._replace(log_decay=log_decay, beta=beta)
        convolved, states = [], []
        for x, weight, state in zip(inputs[:3], weights, cache[:3], strict=True):
            y, last = causal_convolution(x, weight, state=state, lengths=lengths)
            convolved.append(y)
            states.append(last)
        tokens = self._tokens(convolved, inputs.log_decay, inputs.beta)
        # One token needs no chunks: the step reads the state once.
        if tokens.v.shape[1] == 1:
            y_BSHv, new = gated_delta_step(tokens, cache.state)
        else:
            y_BSHv, new = gated_delta_rule(tokens, state=cache.state)
        return y_BSHv, DeltaNetState._make((*states, new))

    def _tokens(self, convolved: Sequence[Array], log_decay: Array, beta: Array) -> DeltaTokens:
        """Return the inputs of the rule, by head, from the results of the convolutions."""
        c = self.sizes
        sizes = (c.key_head_dim, c.key_head_dim, c.value_head_dim)
        q, k, v = (
            jax.nn.silu(x).reshape(*x.shape[:2], -1, size)
            for x, size in zip(convolved, sizes, strict=True)
        )
        return DeltaTokens(q, k, v, log_decay.reshape(*beta.shape, -1), beta)

    @classmethod
    def empty_cache(
        cls, config: ModelConfig, batch: int, length: int, dtype: jnp.dtype
    ) -> DeltaNetState:
        """Return the state before the first token; its size does not depend on `length`."""
        c = cls.sizes_of(config)
        inputs = [
            jnp.zeros((batch, n, c.conv_size - 1), dtype)
            for n in (c.key_size, c.key_size, c.value_size)
        ]
        shape = (batch, c.value_heads, c.key_head_dim, c.value_head_dim)
        return DeltaNetState._make((*inputs, jnp.zeros(shape, jnp.float32)))

    @classmethod
    def cache_axes(cls, config: ModelConfig) -> DeltaNetState:
        """Return the logical axes of a state: heads are split over `tp`."""
        inputs = [("batch", axis, None) for axis in _AXES[:3]]
        return DeltaNetState._make((*inputs, ("batch", "heads", None, None)))

    @classmethod
    def cost(cls, config: ModelConfig) -> MixerCost:
        """Return the multiply-adds of one layer.

        A token reads the value of its key, writes the correction and reads with its query: three
        times the size of the state. Chunks compute more, which is not work of the model.
        """
        c = cls.sizes_of(config)
        projections = 2 * c.key_size + 2 * c.value_size + c.value_heads
        convolutions = c.conv_size * (2 * c.key_size + c.value_size)
        states = 3 * c.key_head_dim * c.value_size
        matrices = config.dim * projections + cls.gate_cost(config)
        return MixerCost(matrices, per_token=convolutions + states)

    @classmethod
    def gate_cost(cls, config: ModelConfig) -> int:
        """Return the multiply-adds of a token in the matrices of decays and output gates."""
        raise NotImplementedError

    @classmethod
    def saved_values(cls, config: ModelConfig, share: Callable[[int], int]) -> SavedValues:
        """Return the size of projections, of the rule's output, and of normalized values."""
        c = cls.sizes_of(config)
        keys, values, heads = share(c.key_size), share(c.value_size), share(c.value_heads)
        decays = keys if cls.decays_channels else heads
        return SavedValues(2 * keys + 2 * values + heads + decays, mixed=values,
                           inside=2 * keys + 3 * values)  # fmt: skip

    @classmethod
    def working_values(cls, config: ModelConfig, share: Callable[[int], int]) -> int:
        """Return the size of the values of all chunks, and of their gradients."""
        c = cls.sizes_of(config)
        heads = share(c.key_heads), share(c.value_heads)
        return gated_delta.working_values(
            *heads, c.key_head_dim, c.value_head_dim, by_channel=cls.decays_channels
        )


@register_mixer(GATED_DELTA_NET)
class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet of `model.gated_delta_net`."""

    table = GATED_DELTA_NET

    def declare_gates(self, project: Callable[..., Linear]) -> None:
        """Declare the matrices of β, of the decays and of the output gates."""
        heads = (self.sizes.value_heads, "heads")
        self.gate_proj = project((self.sizes.value_size, "heads"))
        self.beta_proj, self.decay_proj = project(heads), project(heads)

    def declare_decays(self, declare: Declare) -> None:
        """Declare `decay_log` and `decay_bias`."""
        heads = self.sizes.value_heads
        self.decay_log = declare((heads,), ("heads",), log_rates(0.01))
        self.decay_bias = declare((heads,), ("heads",), jax.nn.initializers.ones)

    def decay_input(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None
    ) -> Float[Array, "b s H"]:
        """Return what the decay of each head follows from."""
        return self.decay_proj(x_BSD, precision)

    def output_gate(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None
    ) -> Float[Array, "b s values"]:
        """Return silu(x W_zᵀ)."""
        return jax.nn.silu(self.gate_proj(x_BSD, precision).astype(jnp.float32))

    @classmethod
    def gate_cost(cls, config: ModelConfig) -> int:
        """Return the multiply-adds of a token in the matrices of decays and output gates."""
        c = cls.sizes_of(config)
        return config.dim * (c.value_heads + c.value_size)


_AXES = ("kv_heads", "kv_heads", "heads", "heads", "heads")
"""Logical axes of the channels of `_Inputs`."""

_WEIGHT_AXES = _Convolutions._make((axis, None) for axis in _AXES[:3])
