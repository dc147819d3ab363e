"""Kimi Delta Attention (arXiv:2510.26692): the gated delta rule with a decay for each channel.

It differs from Gated DeltaNet (`gated_delta_net.py`) in decays and output gates, which pass through
bottlenecks of the width of a head:

    g       = -exp(a) softplus(x W_fᵀ W_gᵀ + b)      decay of each key channel; a per head
    output  = (RMSNorm(y) · sigmoid(x W_uᵀ W_zᵀ)) W_oᵀ
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxforge.config.mixers import KIMI_DELTA_ATTENTION
from jaxforge.config.model import ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model.initial_decays import log_rates, time_step_biases
from jaxforge.model.linear import Declare, Linear
from jaxforge.model.mixer import register_mixer
from jaxforge.model.mixers.gated_delta_net import DeltaNet

_TIME_STEPS = 0.001, 0.1  # range of the initial softplus(b), as in Mamba-2


@register_mixer(KIMI_DELTA_ATTENTION)
class KimiDeltaAttention(DeltaNet):
    """Kimi Delta Attention of `model.kimi_delta_attention`."""

    table = KIMI_DELTA_ATTENTION
    decays_channels = True

    def declare_gates(self, project: Callable[..., Linear]) -> None:
        """Declare the matrices of β, of the decays and of the output gates."""
        c = self.sizes
        latent, latent_embed = ((c.value_head_dim, axis) for axis in ("latent", "latent_embed"))
        self.beta_proj = project((c.value_heads, "heads"))
        self.decay_a_proj, self.gate_a_proj = project(latent), project(latent)
        self.decay_b_proj, self.gate_b_proj = (
            project((size, "heads"), latent_embed) for size in (c.key_size, c.value_size)
        )

    def declare_decays(self, declare: Declare) -> None:
        """Declare `decay_log` and `decay_bias`."""
        c = self.sizes
        self.decay_log = declare((c.value_heads,), ("heads",), log_rates(1.0))
        self.decay_bias = declare((c.key_size,), ("heads",), time_step_biases(*_TIME_STEPS))

    def decay_input(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None
    ) -> Float[Array, "b s keys"]:
        """Return what the decay of each channel follows from."""
        return self.decay_b_proj(self.decay_a_proj(x_BSD, precision), precision)

    def output_gate(
        self, x_BSD: Float[Array, "b s d"], precision: LayerPrecision | None
    ) -> Float[Array, "b s values"]:
        """Return the sigmoids of the low-rank projection."""
        gate = self.gate_b_proj(self.gate_a_proj(x_BSD, precision), precision)
        return jax.nn.sigmoid(gate.astype(jnp.float32))

    @classmethod
    def gate_cost(cls, config: ModelConfig) -> int:
        """Return the multiply-adds of a token in the matrices of decays and output gates."""
        c = cls.sizes_of(config)
        return 2 * c.value_head_dim * (config.dim + c.value_size)
