"""Routers: the choice of experts for each token, and the loss terms that balance their load.

    softmax_topk    p = softmax(x Wᵀ); the k experts of the largest p (Mixtral, arXiv:2401.04088)
    sigmoid_topk    s = sigmoid(x Wᵀ), independent per expert; the k largest (arXiv:2412.19437)

The weight of an expert's output is its score, divided by the sum of the chosen scores with
`moe_norm_topk`. With groups, only experts of a token's best groups can be chosen.

Load balancing counts all tokens of a microbatch except padding, on all devices. f_e is the fraction
of assignments to expert e:

    load balance    E Σ_e f_e · mean over tokens of p_e; no gradient through f
                    (Switch Transformer, arXiv:2101.03961, equation 4)
    sequence        load balance within each sequence, averaged over sequences (DeepSeek-V3)
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
from jaxforge.model.linear import Declare, Float32Linear, times
from jaxforge.model.norm import build_norm
from jaxforge.parallel import collectives

_EMA_DECAY = 0.99  # as in KempnerForge


class Routing(NamedTuple):
    """Routing decision for a batch of tokens.

    Attributes:
        experts: the k experts of each token; `num_experts` for padding, which has no expert.
        weights: factors of the experts' outputs, or inputs (`moe_score_inputs`).
        counts: number of assignments to each expert in the microbatch, over all devices.
    """

    experts: Int[Array, "b s k"]
    weights: Float[Array, "b s k"]
    counts: Float[Array, "e"]


class Gate(Float32Linear):
    """Projection of activations to the logits of all experts."""

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        out, inp = (config.num_experts, None), (config.dim, "embed")
        super().__init__(out, inp, config.init_std, declare, bias=config.moe_router_bias)
        self.multiplier = mup.output_multiplier(config)

    def __call__(self, x_BSD: Float[Array, "b s d"]) -> Float[Array, "b s e"]:
        """Compute x Wᵀ + b; x Wᵀ is multiplied by muP's output multiplier."""
        return super().__call__(times(x_BSD, self.multiplier))


class Router(nnx.Module):
    """Router; `expert_bias` is trained under "kempnerforge", else non-trainable state.

    With `moe_separate_norms`, its input is the residual stream, which it normalizes and divides by
    √d. With `moe_expert_scales`, weights of experts are multiplied by learned `expert_scales`.
    """

    def __init__(self, config: ModelConfig, declare: Declare) -> None:
        self.config = config
        self.norm = build_norm(config, declare) if config.moe_separate_norms else None
        self.gate = Gate(config, declare)
        shape, zeros = (config.num_experts,), jax.nn.initializers.zeros
        if config.bias_update == "sign":
            self.expert_bias: nnx.Variable = declare.untrained(shape, (None,), zeros)
        elif config.bias_update == "kempnerforge":
            self.expert_bias = declare(shape, (None,), zeros)
            even = jax.nn.initializers.constant(1 / config.num_experts)
            self.expert_ema = declare.untrained(shape, (None,), even)
        if config.moe_expert_scales:
            self.expert_scales = declare(shape, (None,), jax.nn.initializers.ones)

    def __call__(
        self,
        x_BSD: Float[Array, "b s d"],
        loss_weights: LossWeights | None,
        is_padding: Bool[Array, "b s"] | None = None,
    ) -> tuple[Routing, AuxOutputs]:
        """Choose the experts of each token, and compute auxiliary outputs in training.

        Args:
            x_BSD: tokens.
            loss_weights: weights of the loss terms; None outside of training.
            is_padding: tokens that are routed to no expert and left out of statistics.
        """
        c = self.config
        if self.norm is not None:
            x_BSD = self.norm(x_BSD) * jnp.asarray(c.dim**-0.5, x_BSD.dtype)
        logits = self.gate(x_BSD)
        scores, ranking = self._scores(logits)
        _, experts = jax.lax.top_k(_within_groups(ranking, c), c.moe_top_k)
        weights = chosen = _scores_of(experts, scores)
        if c.moe_expert_scales:  # of all scores: a gradient without indices
            weights = _scores_of(experts, scores * self.expert_scales[...].astype(scores.dtype))
        if c.moe_norm_topk:
            weights = weights / jnp.sum(chosen, axis=-1, keepdims=True)
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
        """Return the scores, and the values that rank experts."""
        bias_update = self.config.bias_update
        if bias_update == "kempnerforge":
            scores = jax.nn.sigmoid(logits + self.expert_bias[...].astype(jnp.float32))
            return scores, scores
        is_softmax = self.config.moe_router == "softmax_topk"
        scores = jax.nn.softmax(logits) if is_softmax else jax.nn.sigmoid(logits)
        return scores, scores + self.expert_bias[...] if bias_update == "sign" else scores

    def _aux_outputs(
        self,
        logits: Float[Array, "b s e"],
        scores: Float[Array, "b s e"],
        is_chosen: Bool[Array, "b s e"],
        assigned: tuple[Float[Array, "e"], Float[Array, "e"]],
        loss_weights: LossWeights,
        is_real: Bool[Array, "b s"] | None,
    ) -> AuxOutputs:
        """Return auxiliary outputs; `assigned` are local and global numbers of assignments."""
        local, counts = assigned
        c, tokens = self.config, jnp.float32(logits.shape[0] * logits.shape[1])
        if is_real is not None:
            tokens = jnp.sum(is_real, dtype=jnp.float32)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
        balanced = scores if c.bias_update == "kempnerforge" else shares
        factor = c.moe_sequence_aux_loss_weight if c.bias_update == "kempnerforge" else 1.0
        assignments = jnp.sum(counts)
        if is_real is not None:  # all tokens may be padding
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
    """Return the names and weights of the loss terms of routers."""
    balance, sequence = config.moe_aux_loss_weight, config.moe_sequence_aux_loss_weight
    if config.bias_update == "kempnerforge":
        balance, sequence = balance * sequence, 0.0
    weights = {
        "moe_aux_loss": balance,
        "moe_sequence_aux_loss": sequence,
        "router_z_loss": config.moe_router_z_loss_weight,
    }
    return {name: weight for name, weight in weights.items() if weight}


def _scores_of(experts: Int[Array, "b s k"], scores: Float[Array, "b s e"]) -> Array:
    """Return the scores of distinct experts of each token.

    `jnp.take_along_axis` cannot state that they are distinct: XLA:TPU sorts the indices of its
    gradient.
    """

    def pick(experts: Array, scores: Array) -> Array:
        return scores.at[experts].get(unique_indices=True, mode="promise_in_bounds")

    return jax.vmap(jax.vmap(pick))(experts, scores)


def _within_groups(scores: Float[Array, "b s e"], config: ModelConfig) -> Float[Array, "b s e"]:
    """Return the scores, with -inf for experts outside of a token's best groups."""
    groups, n_best = config.moe_groups, config.moe_top_k_groups
    if groups == n_best:
        return scores
    by_group = scores.reshape(*scores.shape[:2], groups, -1)
    counted = 1 if config.moe_group_score == "max" else min(2, by_group.shape[-1])
    best_experts = jax.lax.top_k(by_group, counted)[0]
    _, best = jax.lax.top_k(jnp.sum(best_experts, axis=-1), n_best)
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
    """Return Σ_e f_e P_e of each sequence (equations 17 to 20 of DeepSeek-V3).

    Devices that share a sequence return equal parts of its sum.
    """
    devices = collectives.axis_size("context")

    def mean(x_BSE: Array) -> Array:
        if is_real is None:
            return collectives.psum(jnp.mean(x_BSE, axis=1), "context") / devices
        local = jnp.sum(_only(x_BSE, is_real), axis=1), jnp.sum(is_real, axis=1)[:, None]
        total, tokens = (collectives.psum(x.astype(jnp.float32), "context") for x in local)
        return total / jnp.maximum(tokens, 1)

    f = mean(is_chosen) * (config.num_experts / config.moe_top_k)
    return jnp.sum(f * mean(shares), axis=-1) / devices


def next_bias(
    config: ModelConfig,
    bias: Float[Array, "l e"],
    counts: Float[Array, "l e"],
    progress: Float[Array, ""],
) -> Float[Array, "l e"]:
    """Return DeepSeek-V3's bias after an update: raised for experts with less than the mean load.

    Args:
        config: the model.
        bias: bias before the update.
        counts: number of assignments in the update.
        progress: completed fraction of the run.
    """
    # Compared with the mean times the number of experts: a compiled division by n multiplies by
    # 1/n, which need not give the exact mean of an even load.
    missing = jnp.sum(counts, axis=-1, keepdims=True) - counts * counts.shape[-1]
    return bias + bias_rate(config, progress) * jnp.sign(missing)


def next_ema(ema: Float[Array, "l e"], counts: Float[Array, "l e"]) -> Float[Array, "l e"]:
    """Return KempnerForge's moving average of the load after an update."""
    load = counts / (jnp.sum(counts, axis=-1, keepdims=True) + 1e-8)
    return ema + (1 - _EMA_DECAY) * (load - ema)


def bias_rate(config: ModelConfig, progress: Float[Array, ""]) -> Float[Array, ""]:
    """Return `moe_bias_update_rate` scaled by `moe_bias_schedule` at a fraction of the run."""
    factors = {
        "constant": jnp.ones_like(progress),
        "cosine_decay": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        "linear_warmup": jnp.minimum(1.0, 10 * progress),
    }
    return config.moe_bias_update_rate * factors[config.moe_bias_schedule]
