"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450), computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxforge.config.model import ModelConfig
from jaxforge.model.linear import Declare
from jaxforge.parallel.sharding import split_over_tp


class RMSNorm(nnx.Module):
    """RMSNorm x / sqrt(mean(x²) + eps) · weight in float32; the result has the dtype of x.

    With a unit offset, the factor is 1 + weight, and weights are initially zero. Heads [.., n, h]
    may have weights of their own, n h in total.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        declare: Declare,
        *,
        unit_offset: bool = False,
        heads: int | None = None,
    ) -> None:
        init = jax.nn.initializers.zeros if unit_offset else jax.nn.initializers.ones
        self.weight = declare((dim,), ("norm",), init)
        self.eps, self.unit_offset, self.heads = eps, unit_offset, heads

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalize the last dimension."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = _of_heads(self.weight[...].astype(jnp.float32), self.heads)
        return (x32 * scale * (1 + weight if self.unit_offset else weight)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm (x - mean) / sqrt(var + eps) · weight + bias in float32; returns the dtype of x.

    With a unit offset, the factor is 1 + weight, and weights are initially zero. Heads [.., n, h]
    may have weights of their own, n h in total, then without a bias.
    """

    def __init__(
        self,
        dim: int,
        eps: float,
        declare: Declare,
        *,
        unit_offset: bool = False,
        bias: bool = True,
        heads: int | None = None,
    ) -> None:
        init = jax.nn.initializers.zeros if unit_offset else jax.nn.initializers.ones
        self.weight = declare((dim,), ("norm",), init)
        if bias:
            self.bias = declare((dim,), ("norm",), jax.nn.initializers.zeros)
        self.eps, self.unit_offset, self.has_bias, self.heads = eps, unit_offset, bias, heads

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalize the last dimension."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight = _of_heads(self.weight[...].astype(jnp.float32), self.heads)
        bias = self.bias[...].astype(jnp.float32) if self.has_bias else None
        y32 = x32 * scale * (1 + weight if self.unit_offset else weight)
        return (y32 if bias is None else y32 + bias).astype(x.dtype)


def _of_heads(weight: Float[Array, "d"], heads: int | None) -> Float[Array, "..."]:
    """Return weights [d], or [heads, d / heads] where heads have weights of their own."""
    return weight if heads is None else weight.reshape(heads, -1)


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def build_norm(config: ModelConfig, declare: Declare) -> RMSNorm | LayerNorm:
    """Return the norm of the residual stream that `[model]` selects."""
    options = {"unit_offset": True} if config.norm_unit_offset else {}
    if not config.norm_bias:
        options["bias"] = False
    return NORMS[config.norm_type](config.dim, config.norm_eps, declare, **options)


def apply_norm(
    norm: RMSNorm | LayerNorm | None, x_BSD: Float[Array, "b s d"]
) -> Float[Array, "b s d"]:
    """Return x normalized; None: x as it is."""
    return x_BSD if norm is None else norm(x_BSD)


def apply_output_norm(
    norm: RMSNorm | LayerNorm | None, y_BSD: Float[Array, "b s d"]
) -> Float[Array, "b s d"]:
    """Normalize the output of a part, a sum over `tp`, with sequences split over `tp`."""
    return y_BSD if norm is None else norm(split_over_tp(y_BSD))


def build_qk_norm(
    config: ModelConfig, heads: int, head_size: int, declare: Declare
) -> RMSNorm | LayerNorm:
    """Return the norm of queries or keys that `[model]` selects, for heads of a width."""
    c, options = config, {"unit_offset": config.norm_unit_offset}
    if c.qk_norm_type == "layernorm":
        options["bias"] = False
    per_head = {"heads": heads} if c.qk_norm_scope == "each_head" else {}
    size = head_size if c.qk_norm_scope == "head" else heads * head_size
    return NORMS[c.qk_norm_type](size, c.qk_norm_eps, declare, **options, **per_head)
