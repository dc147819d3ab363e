"""Routers of experts: the choice of experts for each token, and its terms of the loss.

    softmax_topk    p = softmax(x Wᵀ); the k experts of the largest p (Mixtral, arXiv:2401.04088)
    sigmoid_topk    s = sigmoid(x Wᵀ), each expert on its own; the k largest (arXiv:2412.19437)

An expert's output counts as much as its score, divided by the sum of the chosen ones' if
`moe_norm_topk`. With groups, only experts of a token's best groups can be chosen.

What keeps experts busy alike counts all tokens of a microbatch but padding, however they are spread
over devices. f_e is the share of the assignments that expert e got:

    load balance    E Σ_e f_e · mean over tokens of p_e; no gradient through f
                    (Switch Transformer, arXiv:2101.03961, equation 4)
    sequence        the same within each sequence, and the mean over sequences (DeepSeek-V3)
    router z        mean over tokens of (log Σ_e exp logit_e)² (ST-MoE, arXiv:2202.08906)
    bias            `model.moe_bias_update`: added to the scores; no term of the loss
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jaxforge.aux_outputs import AuxOutputs, LossWeights, Mean, Metric
from jaxforge.config.model import ModelConfig
from jaxforge.model import mup
from jaxforge.model.linear import FLOAT32, Declare, normal, product_for, times
from jaxforge.parallel import collectives

_EMA_DECAY = 0.99  # KempnerForge's


class Routing(NamedTuple):
    """Routing decision for a batch of tokens.

    Attributes:
        experts: the k experts of each token; `num_experts` for padding, which goes to none.
        weights: what their outputs are multiplied with.
        counts: assignments to each expert in the microbatch, over all devices.
    """

    experts: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]
    counts: Float[Array, "e"]


class Gate(nnx.Module):
    """Logits of all experts, float32, from activations in their own dtype."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.axes, self.backward = (None, "embed"), declare.backward
        shape = (config.num_experts, config.dim)
        self.weight = declare(shape, self.axes, normal(config.init_std))
        self.multiplier = mup.output_multiplier(config)
        self.has_bias = config.moe_router_bias
        if self.has_bias:
            self.bias = declare((config.num_experts,), (None,), jax.nn.initializers.zeros)

    def __call__(self, x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """X Wᵀ + b, where x Wᵀ has muP's multiplier."""
        bias, x_BSD = self.bias[...] if self.has_bias else None, times(x_BSD, self.multiplier)
        product = product_for(self.backward, x_BSD.dtype)
        return product(self.axes, FLOAT32, self.backward, x_BSD, self.weight[...], bias)


class Router(nnx.Module):
    """Chooses experts. `expert_bias` is trained in KempnerForge's way, and untrained in others."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.config = config
        self.gate = Gate(config, declare)
        shape, zeros = (config.num_experts,), jax.nn.initializers.zeros
        if config.bias_update == "sign":
            self.expert_bias: nnx.Variable = declare.untrained(shape, (None,), zeros)
        elif config.bias_update == "kempnerforge":
            self.expert_bias = declare(shape, (None,), zeros)
            even = jax.nn.initializers.constant(1 / config.num_experts)
            self.expert_ema = declare.untrained(shape, (None,), even)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        loss_weights: LossWeights | None,
        is_padding: Bool[Array, "b s"] | None = None,
    ) -> tuple[Routing, AuxOutputs]:
        """Choose the experts of each token, and compute statistics where something is trained.

        Args:
            x_BSD: tokens.
            loss_weights: weights of terms of the loss; None where nothing is trained.
            is_padding: tokens that go to no expert and count in no statistic.
        """
        c, logits = self.config, self.gate(x_BSD)
        scores, choose_by = self._scores(logits)
        _, experts = jax.lax.top_k(_within_groups(choose_by, c), c.moe_top_k)
        weights = jnp.take_along_axis(scores, experts, axis=-1)
        if c.moe_norm_topk:
            weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
        is_real = None
        if is_padding is not None:
            is_real, experts = ~is_padding, jnp.where(is_padding[..., None], c.num_experts, experts)
        is_chosen = jnp.any(experts[..., None] == jnp.arange(c.num_experts), axis=-2)
        local = jnp.sum(is_chosen, axis=(0, 1), dtype=jnp.float32)
        counts = collectives.psum(local, "tokens")
        aux = AuxOutputs()
        if loss_weights is not None:
            aux = self._aux_outputs(
                logits, scores, is_chosen, (local, counts), loss_weights, is_real
            )
            if c.moe_gradient_scale:
                even = jnp.sum(counts) / c.num_experts
                weights = weights * (even / jnp.maximum(counts, 1))[experts]
        return Routing(experts, weights, counts), aux

    def _scores(
        self, logits: Float[Array, "b s e"]
    ) -> tuple[Float[Array, "b s e"], Float[Array, "b s e"]]:
        """Scores, and what experts are chosen by."""
        how = self.config.bias_update
        if how == "kempnerforge":
            scores = jax.nn.sigmoid(logits + self.expert_bias[...].astype(jnp.float32))
            return scores, scores
        is_softmax = self.config.moe_router == "softmax_topk"
        scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
        return scores, scores + self.expert_bias[...] if how == "sign" else scores

    def _aux_outputs(
        self,
        logits: Float[Array, "b s e"],
        scores: Float[Array, "b s e"],
        is_chosen: Bool[Array, "b s e"],
        assigned: tuple[Float[Array, "e"], Float[Array, "e"]],
        loss_weights: LossWeights,
        is_real: Bool[Array, "b s"] | None,
    ) -> AuxOutputs:
        """Return auxiliary outputs of routed tokens, with local and global assignments."""
        local, counts = assigned
        c, tokens = self.config, jnp.float32(logits.shape[0] * logits.shape[1])
        if is_real is not None:
            tokens = jnp.sum(is_real, dtype=jnp.float32)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
        balanced = scores if c.bias_update == "kempnerforge" else shares
        factor = c.moe_sequence_aux_loss_weight if c.bias_update == "kempnerforge" else 1.0
        assignments = jnp.sum(counts)
        if is_real is not None:  # there may be nothing but padding
            assignments = jnp.maximum(assignments, 1)
        load = counts / assignments
        balance = c.num_experts * jnp.sum(load * jnp.sum(_only(balanced, is_real), axis=(0, 1)))
        squares = jnp.sum(_only(jax.nn.logsumexp(logits, axis=-1) ** 2, is_real))
        values = {
            "moe_aux_loss": loss_weights.position * balance,
            "moe_sequence_aux_loss": loss_weights.sequence
            * jnp.sum(_balance_of_sequences(shares, is_chosen, c, is_real)),
            "router_z_loss": loss_weights.position * squares,
        }
        terms = {name: weight * values[name] for name, weight in term_weights(c).items()}
        metrics: dict[str, Metric] = {
            "expert_counts": local,
            "router_entropy": Mean(jnp.sum(_only(jax.scipy.special.entr(shares), is_real)), tokens),
            "aux_loss": Mean(balance * factor, tokens),
            "router_z": Mean(squares, tokens),
        }
        if c.bias_update != "none":
            largest = jnp.max(jnp.abs(self.expert_bias[...].astype(jnp.float32)))
            metrics["router_bias"] = Mean(largest * tokens, tokens)
        return AuxOutputs(terms, jax.lax.stop_gradient(metrics), {"counts": local})


def term_weights(config: ModelConfig) -> dict[str, float]:
    """The terms that routers add to the loss, and their weights."""
    balance, sequence = config.moe_aux_loss_weight, config.moe_sequence_aux_loss_weight
    if config.bias_update == "kempnerforge":
        balance, sequence = balance * sequence, 0.0
    weights = {
        "moe_aux_loss": balance,
        "moe_sequence_aux_loss": sequence,
        "router_z_loss": config.moe_router_z_loss_weight,
    }
    return {name: weight for name, weight in weights.items() if weight}


def _within_groups(scores: Float[Array, "b s e"], config: ModelConfig) -> Float[Array, "b s e"]:
    """The scores, and -inf for experts of other groups than a token's best ones."""
    groups, taken = config.moe_groups, config.moe_top_k_groups
    if groups == taken:
        return scores
    by_group = scores.reshape(*scores.shape[:2], groups, -1)
    best_two = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))[0]
    _, best = jax.lax.top_k(jnp.sum(best_two, axis=-1), taken)
    is_in = jnp.any(best[..., None] == jnp.arange(groups), axis=-2)
    return jnp.where(is_in[..., None], by_group, -jnp.inf).reshape(scores.shape)


def _only(x: Float[Array, "b s *rest"], is_real: Bool[Array, "b s"] | None) -> Array:
    """Return `x` with zeros for padding."""
    if is_real is None:
        return x
    return jnp.where(is_real.reshape(*is_real.shape, *(1,) * (x.ndim - 2)), x, 0)


def _balance_of_sequences(
    shares: Float[Array, "b s e"],
    is_chosen: Bool[Array, "b s e"],
    config: ModelConfig,
    is_real: Bool[Array, "b s"] | None,
) -> Float[Array, "b"]:
    """Equations 17 to 20 of DeepSeek-V3: Σ_e f_e P_e within each sequence.

    Devices that share a sequence tell an equal part of it each.
    """
    devices = collectives.axis_size("context")

    def mean(x_BSE: Array) -> Array:
        if is_real is None:
            return collectives.psum(jnp.mean(x_BSE, axis=1), "context") / devices
        of_device = jnp.sum(_only(x_BSE, is_real), axis=1), jnp.sum(is_real, axis=1)[:, None]
        total, tokens = (collectives.psum(x.astype(jnp.float32), "context") for x in of_device)
        return total / jnp.maximum(tokens, 1)

    f = mean(is_chosen) * (config.num_experts / config.moe_top_k)
    return jnp.sum(f * mean(shares), axis=-1) / devices


def next_bias(
    config: ModelConfig,
    bias: Float[Array, "l e"],
    counts: Float[Array, "l e"],
    progress: Float[Array, ""],
) -> Float[Array, "l e"]:
    """DeepSeek-V3's bias after an update: it rises where an expert got too little.

    Args:
        config: the model.
        bias: before it.
        counts: assignments in the update.
        progress: the share of the run that is behind, 0 to 1.
    """
    # From the mean, times experts: a mean by 1/n in a compiled program is not that of an even load.
    missing = jnp.sum(counts, axis=-1, keepdims=True) - counts * counts.shape[-1]
    return bias + bias_rate(config, progress) * jnp.sign(missing)


def next_ema(ema: Float[Array, "l e"], counts: Float[Array, "l e"]) -> Float[Array, "l e"]:
    """KempnerForge's running mean of the load after an update."""
    load = counts / (jnp.sum(counts, axis=-1, keepdims=True) + 1e-8)
    return ema + (1 - _EMA_DECAY) * (load - ema)


def bias_rate(config: ModelConfig, progress: Float[Array, ""]) -> Float[Array, ""]:
    """`moe_bias_update_rate` at some point of the run, by `moe_bias_schedule`."""
    factors = {
        "constant": jnp.ones_like(progress),
        "cosine_decay": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        "linear_warmup": jnp.minimum(1.0, 10 * progress),
    }
    return config.moe_bias_update_rate * factors[config.moe_bias_schedule]
