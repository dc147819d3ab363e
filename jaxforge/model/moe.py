"""Mixture of experts instead of a feed-forward: router, experts and shared expert."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jaxtyping import Array, Bool, Float

from jaxforge.aux_outputs import AuxOutputs, LossWeights, Mean
from jaxforge.config.model import LAYERS, MTP, ModelConfig
from jaxforge.kernels.fp8 import LayerPrecision
from jaxforge.model import mup
from jaxforge.model.experts import Experts
from jaxforge.model.linear import Declare, Linear, residual_std, times
from jaxforge.model.mlp import MLP
from jaxforge.model.norm import apply_norm, apply_output_norm, build_norm
from jaxforge.model.router import Router, bias_rate, next_bias, next_ema, term_weights
from jaxforge.parallel.stages import Stack

Params = dict[str, Any]
"""Nested dicts of arrays, as in `model.transformer`."""

_ROUTER = ("mlp", "router")


class MoE(nnx.Module):
    """Mixture scaling · Σ_k weight_k · expert_k(x) over a token's experts, plus a shared expert.

    With `moe_latent_dim`, experts read and write a narrower latent ℓ, which is also what devices
    exchange (LatentMoE of Nemotron 3, arXiv:2512.20856):

        ℓ = latent_down_proj(x),  y = latent_up_proj(scaling · Σ_k weight_k · expert_k(ℓ))

    Each device of a `tp` group computes both projections for all tokens: `tp` splits neither side.

    With `moe_separate_norms`, x is the residual stream, and n(·) are four norms (Gemma 4):

        y = n(scaling · Σ_k weight_k · expert_k(n(x))) + n(shared_expert(n(x)))
    """

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        c = self.config = config
        self.routed_norm, self.routed_post_norm, self.shared_norm, self.shared_post_norm = (
            build_norm(c, declare) if c.moe_separate_norms else None for _ in range(4)
        )
        self.router = Router(c, declare)
        self.experts = Experts(c, declare)
        if c.moe_latent_dim is not None:
            embed, latent = (c.dim, "embed"), (c.moe_latent_dim, "latent")
            linear = functools.partial(Linear, declare=declare, bias=c.mlp_bias)
            self.latent_down_proj = linear(latent, embed, std=c.init_std)
            self.latent_up_proj = linear(embed, latent, std=residual_std(c))
        if c.shared_expert_dim:
            self.shared_expert = MLP(c, declare, width=c.shared_expert_dim)
        if c.moe_shared_expert_gate:
            self.shared_expert_gate = Linear(
                (1, "norm"), (c.dim, "embed"), std=c.init_std, declare=declare
            )

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        loss_weights: LossWeights | None,
        backend: str,
        is_padding: Bool[Array, "b s"] | None = None,
        precision: LayerPrecision | None = None,
        strategy: str = "ulysses",
    ) -> tuple[Float[Array, "b s d"], AuxOutputs]:
        """Return the outputs of tokens and, in training, auxiliary outputs about the expert load.

        Args:
            x_BSD: tokens.
            loss_weights: weights of the loss terms; None outside of training.
            backend: kernel of the grouped products (`grouped.GROUPED_BACKENDS`).
            is_padding: tokens that are routed to no expert and left out of statistics.
            precision: precision of the block, where the model multiplies in 8 bits.
            strategy: "ulysses" or "ring": how devices share sequences.
        """
        c = self.config
        in_8_bits = precision is not None and precision.in_8_bits
        routing, aux = self.router(x_BSD, loss_weights, is_padding)
        has_padding = is_padding is not None
        has_latent = c.moe_latent_dim is not None
        inputs = apply_norm(self.routed_norm, x_BSD)
        inputs = self.latent_down_proj(inputs, precision) if has_latent else inputs
        y_BSD, dropped = self.experts(
            inputs, routing, backend, has_padding=has_padding, in_8_bits=in_8_bits,
            strategy=strategy,
        )  # fmt: skip
        if c.moe_routed_scaling != 1.0:
            # Only the routed part: the shared expert is outside of the scale, as in DeepSeek-V3.
            y_BSD = y_BSD * jnp.asarray(c.moe_routed_scaling, y_BSD.dtype)
        if has_latent:
            y_BSD = self.latent_up_proj(y_BSD, precision)
        y_BSD = apply_output_norm(self.routed_post_norm, y_BSD)
        if c.shared_expert_dim:
            shared_BSD = self.shared_expert(apply_norm(self.shared_norm, x_BSD), precision)
            if c.moe_shared_expert_gate:
                # An output of the width, like the head: muP scales its input in the same way.
                gated_BSD = times(x_BSD, mup.output_multiplier(c))
                shared_BSD = shared_BSD * jax.nn.sigmoid(
                    self.shared_expert_gate(gated_BSD, precision)
                )
            y_BSD = y_BSD + apply_output_norm(self.shared_post_norm, shared_BSD)
        if loss_weights is not None:
            assigned = jnp.float32(routing.experts.size)
            if is_padding is not None:
                # Padding has no assignments, so it does not lower the share of dropped ones.
                assigned = jnp.sum(~is_padding, dtype=jnp.float32) * c.moe_top_k
            dropped_share = Mean(dropped, assigned)
            aux = aux._replace(metrics={**aux.metrics, "dropped": dropped_share})
        return y_BSD, aux


def empty_expert_aux(config: ModelConfig) -> AuxOutputs:
    """Return the auxiliary outputs of a dense layer in a model with experts elsewhere."""
    # All layers of a scan return one structure; a dense layer adds nothing to sums and means.
    zero, load = jnp.zeros(()), jnp.zeros((config.num_experts,))
    means = ["router_entropy", "aux_loss", "router_z", "dropped"]
    if config.bias_update != "none":
        means.append("router_bias")
    return AuxOutputs(
        dict.fromkeys(term_weights(config), zero),
        {"expert_counts": load, **dict.fromkeys(means, Mean(zero, zero))},
        {"counts": load},
    )


def expert_counts(stats: dict[str, Array], order: Stack, stack: str) -> Float[Array, "l e"]:
    """Return the number of assignments per expert in an update, for each row of a stack.

    Args:
        stats: statistics of the layers, by row of `order`.
        order: order of all layers.
        stack: name of a stack of layers with experts.
    """
    return order.rows_of_stack(stack, stats["counts"])


def next_state(
    config: ModelConfig,
    state: Params,
    stats: dict[str, Any],
    order: Stack,
    progress: Float[Array, ""],
) -> Params:
    """Return the state of the routers after an update.

    Args:
        config: the model.
        state: non-trainable state before the update.
        stats: statistics of the layers (LAYERS) and of modules of multi-token prediction (MTP);
            `counts` are assignments in the update [layers, experts].
        order: order of the layers in `stats`.
        progress: completed fraction of the run.
    """
    flat = flatten_dict(state)
    counts_of: dict[tuple[str, ...], Array] = {
        (stack,): expert_counts(stats[LAYERS], order, stack) for stack in config.moe_stacks
    }
    # Modules of multi-token prediction have the parts of the last layer.
    if config.has_experts[-1]:
        counts_of |= {(MTP, depth): of["counts"] for depth, of in stats.get(MTP, {}).items()}
    for block, counts in counts_of.items():
        if config.bias_update == "sign":
            path = (*block, *_ROUTER, "expert_bias")
            flat[path] = next_bias(config, flat[path], counts, progress)
        else:
            path = (*block, *_ROUTER, "expert_ema")
            flat[path] = next_ema(flat[path], counts)
    return unflatten_dict(flat)


def next_params(
    config: ModelConfig, params: Params, state: Params, progress: Float[Array, ""]
) -> Params:
    """Return the parameters with KempnerForge's trained bias moved by rate · (1/E - load)."""
    if not (config.is_moe and config.bias_update == "kempnerforge"):
        return params
    averages, moved = flatten_dict(state), flatten_dict(params)
    # KempnerForge's bias is a parameter, and is moved after the optimizer's update.
    for path, load in averages.items():
        if path[-1] != "expert_ema":
            continue
        router = path[:-1]
        bias = moved[*router, "expert_bias"]
        step = bias_rate(config, progress) * (1 / config.num_experts - load)
        moved[*router, "expert_bias"] = (bias + step).astype(bias.dtype)
    return unflatten_dict(moved)
