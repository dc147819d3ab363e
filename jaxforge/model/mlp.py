"""The feed-forward block: SwiGLU (arXiv:2002.05202) for `silu`, two matrices for `gelu`, `relu`."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxforge.config.model import ModelConfig
from jaxforge.model.attention import residual_std
from jaxforge.model.linear import Declare, Linear
from jaxforge.parallel.sharding import constrain


@jax.custom_jvp
def _erf(x: Array) -> Array:
    """The gradient is written out: JAX 0.12's fails inside `shard_map` (docs/upstream.md)."""
    return jax.lax.erf(x)


_erf.defjvps(lambda d_x, y, x: d_x * (2 / math.pi**0.5) * jnp.exp(-x * x))


def gelu(x: Array) -> Array:
    """The Gaussian error linear unit x Φ(x) (arXiv:1606.08415), as torch computes it."""
    return 0.5 * x * (1 + _erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": gelu,
    "relu": jax.nn.relu,
}


class MLP(nnx.Module):
    """down(act(gate(x)) · up(x)) for silu, down(act(up(x))) otherwise."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        embed, hidden = (config.dim, "embed"), (config.ffn_dim, "mlp")
        self.gated = config.activation == "silu"
        self.activation = ACTIVATIONS[config.activation]
        if self.gated:
            self.gate_proj = Linear(hidden, embed, std=config.init_std, declare=declare)
        self.up_proj = Linear(hidden, embed, std=config.init_std, declare=declare)
        self.down_proj = Linear(embed, hidden, std=residual_std(config), declare=declare)

    def __call__(self, x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s d"]:
        """Position by position."""
        up_BSF = self.up_proj(x_BSD)
        if self.gated:
            hidden_BSF = self.activation(self.gate_proj(x_BSD)) * up_BSF
        else:
            hidden_BSF = self.activation(up_BSF)
        return self.down_proj(constrain(hidden_BSF, "batch", None, "mlp"))
