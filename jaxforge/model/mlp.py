"""The feed-forward block: SwiGLU (arXiv:2002.05202) for `silu`, two matrices for `gelu`, `relu`."""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jaxtyping import Array, Float

from jaxforge.config.model import ModelConfig
from jaxforge.model.attention import residual_std
from jaxforge.model.linear import Declare, Linear
from jaxforge.parallel.sharding import constrain

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
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
