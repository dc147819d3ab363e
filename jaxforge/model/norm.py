"""RMSNorm (arXiv:1910.07467) and LayerNorm (arXiv:1607.06450), computed in float32."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxforge.model.linear import Declare


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x²) + eps) · weight; the product too is float32, the result has x's dtype."""

    def __init__(self, dim: int, eps: float, declare: Declare) -> None:
        self.weight = declare((dim,), ("norm",), jax.nn.initializers.ones)
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalises the last dimension."""
        x32 = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32 * scale * self.weight[...].astype(jnp.float32)).astype(x.dtype)


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + eps) · weight + bias in float32; the result has x's dtype."""

    def __init__(self, dim: int, eps: float, declare: Declare) -> None:
        self.weight = declare((dim,), ("norm",), jax.nn.initializers.ones)
        self.bias = declare((dim,), ("norm",), jax.nn.initializers.zeros)
        self.eps = eps

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        """Normalises the last dimension."""
        x32 = x.astype(jnp.float32)
        x32 = x32 - jnp.mean(x32, axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        weight, bias = self.weight[...].astype(jnp.float32), self.bias[...].astype(jnp.float32)
        return (x32 * scale * weight + bias).astype(x.dtype)


NORMS = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}
