"""The feed-forward block: gated (arXiv:2002.05202) with three matrices, or plain with two."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PyTree

from jaxforge.config.model import ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.linear import Declare, Linear, residual_std, times
from jaxforge.parallel.sharding import constrain


@jax.custom_jvp
def gelu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute the Gaussian error linear unit x Φ(x) (arXiv:1606.08415) in float32, as torch does.

    The gradient is explicit: the gradient of JAX 0.12 fails inside `shard_map` (docs/upstream.md).
    """
    x32 = x.astype(jnp.float32)
    return (x32 * _normal_cdf(x32)).astype(x.dtype)


def _gelu_slope(x: Array) -> Array:
    """Return the derivative Φ(x) + x φ(x)."""
    x32 = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * x32 * x32) / (2 * math.pi) ** 0.5
    return (_normal_cdf(x32) + x32 * density).astype(x.dtype)


def _normal_cdf(x32: Array) -> Array:
    return 0.5 * (1 + jax.lax.erf(x32 * 0.5**0.5))


gelu.defjvps(lambda d_x, y, x: d_x * _gelu_slope(x))


def gelu_tanh(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Approximate `gelu` by x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2, in float32."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def scaled_silu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Approximate `gelu` by x sigmoid(1.702 x)."""
    return x * jax.nn.sigmoid(1.702 * x)


def squared_relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Compute max(0, x)² (Primer, arXiv:2109.08668)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "relu": jax.nn.relu,
    "relu2": squared_relu,
    "swiglu_oai": scaled_silu,
}


def gated(
    gate: Float[Array, "..."], up: Float[Array, "..."], config: ModelConfig
) -> Float[Array, "..."]:
    """Return act(gate) · up, clamped by `swiglu_limit`; with up + 1 for gpt-oss's activation."""
    if (limit := config.swiglu_limit) is not None:
        gate = _at_most(gate, limit)
        up = -_at_most(-_at_most(up, limit), limit)
    if config.activation == "swiglu_oai":
        up = up + 1
    return ACTIVATIONS[config.activation](gate) * up


def _at_most(x: Array, limit: float) -> Array:
    """Clamp x; the gradient at the limit is 1 as in torch, while that of `jnp.minimum` is 1/2."""
    return jnp.where(x > limit, limit, x)


def activated(
    up: Float[Array, "... f"],
    gate: Float[Array, "... f"] | None,
    config: ModelConfig,
    scale: Float[Array, "..."] | None = None,
    *,
    recomputes: bool = True,
) -> Float[Array, "... f"]:
    """Return the input of a feed-forward's last matrix: act(gate) · up, or act(up) without a gate.

    Args:
        up: output of `up_proj`.
        gate: output of `gate_proj`, if there is one.
        config: the model.
        scale: factor of each row.
        recomputes: whether the backward pass recomputes the result and saves only the arguments.
            Rematerialized blocks do so anyway, and XLA:TPU fuses them better without it: 1 % of the
            cycles of a Llama 2 7B (docs/kernels.md).
    """
    function = functools.partial(_activated, config)
    inputs = up, gate, scale
    return _recomputed(function, inputs) if recomputes else function(inputs)


def _activated(config: ModelConfig, inputs: tuple[Array, Array | None, Array | None]) -> Array:
    up, gate, scale = inputs
    y = ACTIVATIONS[config.activation](up) if gate is None else gated(gate, up, config)
    return y if scale is None else (y * scale[..., None]).astype(y.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _recomputed(function: Callable[[PyTree], Array], inputs: PyTree) -> Array:
    """Return `function(inputs)`; the backward pass saves only the inputs."""
    return function(inputs)


_recomputed.defvjp(
    lambda function, inputs: (function(inputs), inputs),
    # Without the barrier, XLA would reuse, and thus keep, the values of the forward pass.
    lambda function, inputs, d_y: jax.vjp(function, jax.lax.optimization_barrier(inputs))[1](d_y),
)


class MLP(nnx.Module):
    """Feed-forward block: down(act(gate(x)) · up(x)) if gated, else down(act(up(x)))."""

    def __init__(self, config: ModelConfig, declare: Declare, *, width: int | None = None) -> None:
        embed, hidden = (config.dim, "embed"), (width or config.ffn_dim, "mlp")
        self.config, self.recomputes = config, declare.backward.regathers
        linear = functools.partial(Linear, declare=declare, bias=config.mlp_bias)
        if config.is_gated:
            self.gate_proj = linear(hidden, embed, std=config.init_std)
        self.up_proj = linear(hidden, embed, std=config.init_std)
        self.down_proj = linear(embed, hidden, std=residual_std(config))

    def __call__(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None = None
    ) -> Float[Array, "b s d"]:
        """Apply the block to each position; `precision` is that of the enclosing block."""
        of_gate, of_output = self.config.mlp_multipliers
        up_BSF, gate_BSF = self.up_proj(x_BSD, precision), None
        if self.config.is_gated:
            gate_BSF = times(self.gate_proj(x_BSD, precision), of_gate)
        hidden_BSF = activated(up_BSF, gate_BSF, self.config, recomputes=self.recomputes)
        hidden_BSF = constrain(hidden_BSF, "batch", "context", "mlp")
        return times(self.down_proj(hidden_BSF, precision), of_output)
