"""Reference in plain torch of a small decoder with experts, and of its training.

Parameters and non-trainable `state` have KempnerForge's names. The state is the mean load of each
expert, or its bias if that is not trained. Nothing is sorted, grouped or fused.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig

Named = dict[str, Tensor]

ACTIVATIONS = {
    "silu": functional.silu, "gelu": functional.gelu, "relu": functional.relu,
    "swiglu_oai": lambda gate: gate * torch.sigmoid(1.702 * gate),
}  # fmt: skip


def linear(p: Named, name: str, x: Tensor) -> Tensor:
    return functional.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def norm(c: ModelConfig, p: Named, name: str, x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + c.norm_eps) * p[f"{name}.weight"]


def rotated(c: ModelConfig, x: Tensor) -> Tensor:
    """Rotate queries or keys [batch, heads, length, channels] by their positions."""
    half = x.shape[-1] // 2
    frequencies = c.rope_theta ** -(torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[-2], dtype=x.dtype), frequencies)
    cos, sin, (first, second) = angles.cos(), angles.sin(), x.split(half, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(c: ModelConfig, p: Named, name: str, x: Tensor) -> Tensor:
    channels, length = c.dim // c.n_heads, x.shape[1]
    q, k, v = (
        linear(p, f"{name}.{item}_proj", x).unflatten(-1, (-1, channels)).transpose(1, 2)
        for item in "qkv"
    )
    k, v = (y.repeat_interleave(c.n_heads // y.shape[1], 1) for y in (rotated(c, k), v))
    scores = rotated(c, q) @ k.mT / math.sqrt(channels)
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(future, -math.inf)
    if c.attention_sinks:
        sinks = p[f"{name}.sinks"][None, :, None, None].expand(len(x), -1, length, 1)
        scores = torch.cat([scores, sinks], -1)
    seen = scores.softmax(-1)[..., :length] @ v
    return linear(p, f"{name}.o_proj", seen.transpose(1, 2).flatten(2))


def feed_forward(c: ModelConfig, p: Named, name: str, x: Tensor) -> Tensor:
    act, hidden = ACTIVATIONS[c.activation], linear(p, f"{name}.up_proj", x)
    if c.activation == "swiglu_oai":
        gate = linear(p, f"{name}.gate_proj", x).clamp(max=c.swiglu_limit)
        hidden = act(gate) * (hidden.clamp(-c.swiglu_limit, c.swiglu_limit) + 1)
    elif c.activation == "silu":
        hidden = act(linear(p, f"{name}.gate_proj", x)) * hidden
    else:
        hidden = act(hidden)
    return linear(p, f"{name}.down_proj", hidden)


def bias_update(c: ModelConfig) -> str:
    return c.moe_bias_update or ("kempnerforge" if c.moe_router == "sigmoid_topk" else "none")


@dataclass
class Routing:
    """Routing of T tokens: logits and scores [T, E], experts and their weights [T, K]."""

    logits: Tensor
    scores: Tensor
    chosen: Tensor
    weights: Tensor

    def counts(self) -> Tensor:
        return torch.bincount(self.chosen.flatten(), minlength=self.logits.shape[1])


def in_best_groups(c: ModelConfig, ranking: Tensor) -> Tensor:
    """Return the ranking [T, E], -inf outside of the groups with the best sums of two scores."""
    grouped = ranking.unflatten(-1, (c.moe_groups, -1))
    worth = grouped.topk(min(2, grouped.shape[-1])).values.sum(-1)
    best = worth.topk(c.moe_top_k_groups).indices
    out = torch.ones_like(worth).scatter(-1, best, 0).bool()
    return grouped.masked_fill(out[..., None], -math.inf).flatten(-2)


def route(c: ModelConfig, p: Named, named: Named, name: str, x: Tensor) -> Routing:
    logits, bias = linear(p, f"{name}.gate", x), f"{name}.expert_bias"
    if bias_update(c) == "kempnerforge":
        scores = ranking = torch.sigmoid(logits + p[bias])
    else:
        scores = logits.softmax(-1) if c.moe_router == "softmax_topk" else torch.sigmoid(logits)
        ranking = scores + named[bias] if bias_update(c) == "sign" else scores
    chosen = in_best_groups(c, ranking.detach()).topk(c.moe_top_k).indices
    weights = scores.gather(-1, chosen)
    if c.moe_norm_topk:
        weights = weights / weights.sum(-1, keepdim=True)
    return Routing(logits, scores, chosen, weights)


def routed(c: ModelConfig, p: Named, name: str, x: Tensor, r: Routing, training: bool) -> Tensor:
    """Return the sum over experts; each takes the first `room` tokens of a slot."""
    even = len(x) * c.moe_top_k / c.num_experts
    room = max(1, math.ceil(even * c.moe_capacity_factor)) if c.moe_capacity_factor else len(x)
    out, counts = torch.zeros_like(x), r.counts()
    for slot in range(c.moe_top_k):
        for j in range(c.num_experts):
            rows = (r.chosen[:, slot] == j).nonzero()[:room, 0]
            if not len(rows):  # no gradient instead of a gradient of zeros
                continue
            y = feed_forward(c, p, f"{name}.{j}", x[rows])
            if c.moe_gradient_scale and training:
                y = y * even / counts[j]
            out = out.index_add(0, rows, r.weights[rows, slot, None] * y)
    return c.moe_routed_scaling * out


def shared(c: ModelConfig, p: Named, name: str, x: Tensor) -> Tensor:
    y = feed_forward(c, p, name, x)
    return torch.sigmoid(linear(p, f"{name}_gate", x)) * y if c.moe_shared_expert_gate else y


def penalties(c: ModelConfig, r: Routing, sequences: int) -> Tensor:
    """Return the loss terms of one layer."""
    tokens, experts = r.logits.shape
    z = c.moe_router_z_loss_weight * r.logits.logsumexp(-1).square().mean()
    share = r.counts() / (tokens * c.moe_top_k)
    if bias_update(c) == "kempnerforge":
        weight = c.moe_aux_loss_weight * c.moe_sequence_aux_loss_weight
        return z + weight * experts * (share * r.scores.mean(0)).sum()
    scores = r.scores / r.scores.sum(-1, keepdim=True)
    switch = experts * (share * scores.mean(0)).sum()
    each = [
        balance(c, item, chosen)
        for item, chosen in zip(scores.chunk(sequences), r.chosen.chunk(sequences), strict=True)
    ]
    within = torch.stack(each).mean()
    return z + c.moe_aux_loss_weight * switch + c.moe_sequence_aux_loss_weight * within


def balance(c: ModelConfig, scores: Tensor, chosen: Tensor) -> Tensor:
    """Return DeepSeek-V3's balance term of one sequence."""
    length, experts = scores.shape
    counts = torch.bincount(chosen.flatten(), minlength=experts)
    return (experts / (c.moe_top_k * length) * counts * scores.mean(0)).sum()


def forward(
    c: ModelConfig, p: Named, named: Named, tokens: Tensor, training: bool = True
) -> tuple[Tensor, Tensor, dict[int, Routing]]:
    """Return logits of tokens [batch, length], penalties, and the routing of each layer."""
    x, total, routings = p["token_embedding.embedding.weight"][tokens], torch.zeros(()), {}
    pattern = c.feed_forward_pattern or ("experts",)
    for i in range(c.n_layers):
        name = f"layers.{i}"
        x = x + attention(c, p, f"{name}.attention", norm(c, p, f"{name}.attention_norm", x))
        y, name = norm(c, p, f"{name}.mlp_norm", x), f"{name}.mlp"
        if i < c.moe_first_dense_layers or pattern[i % len(pattern)] == "dense":
            x = x + feed_forward(c, p, name, y)
            continue
        flat = y.flatten(0, 1)
        r = routings[i] = route(c, p, named, f"{name}.router", flat)
        has_latent = c.moe_latent_dim is not None
        inputs = linear(p, f"{name}.latent_down_proj", flat) if has_latent else flat
        out = routed(c, p, f"{name}.experts", inputs, r, training)
        if has_latent:
            out = linear(p, f"{name}.latent_up_proj", out)
        if c.moe_shared_experts:
            out = out + shared(c, p, f"{name}.shared_expert", flat)
        x = x + out.view_as(x)
        total = total + penalties(c, r, len(tokens))
    return linear(p, "output_head.proj", norm(c, p, "norm", x)), total, routings


def bias_rate(c: ModelConfig, progress: float) -> float:
    factor = {
        "constant": 1.0,
        "cosine_decay": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear_warmup": min(1.0, 10 * progress),
    }[c.moe_bias_schedule]
    return c.moe_bias_update_rate * factor


class Training:
    """Training with updates whose loss is the mean over microbatches.

    Experts without tokens have gradients of zeros, or none where `skips_idle`.
    """

    def __init__(self, config: JobConfig, params: Named, named: Named, *, skips_idle: bool = False):
        self.config, self.params, self.state, self.step = config, params, named, 0
        self.skips_idle = skips_idle
        o = config.optimizer
        decay = [x for name, x in params.items() if x.ndim > 1 and "bias" not in name]
        plain = [x for name, x in params.items() if x.ndim <= 1 or "bias" in name]
        for x in params.values():
            x.requires_grad_()
        groups = [
            {"params": decay, "weight_decay": o.weight_decay},
            {"params": plain, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=o.lr, betas=o.betas, eps=o.eps)

    def update(self, tokens: Tensor, labels: Tensor) -> tuple[float, Named, dict[int, Tensor]]:
        """Return loss, gradients before clipping, and numbers of tokens of each layer's experts.

        Tokens and labels are [microbatches, batch, length]; labels of -100 do not count.
        """
        self.optimizer.zero_grad()
        whole, counts = 0.0, {}
        for x, y in zip(tokens, labels, strict=True):
            logits, extra, routings = forward(self.config.model, self.params, self.state, x)
            loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten()) + extra
            (loss / len(tokens)).backward()
            whole += loss.item() / len(tokens)
            for i, r in routings.items():
                counts[i] = counts.get(i, 0) + r.counts()
        if not self.skips_idle:
            for x in self.params.values():
                x.grad = torch.zeros_like(x) if x.grad is None else x.grad
        grads = {n: x.grad.clone() for n, x in self.params.items() if x.grad is not None}
        torch.nn.utils.clip_grad_norm_(self.params.values(), self.config.train.grad_clip_norm)
        self.optimizer.step()
        for i, load in counts.items():
            self.move_bias(f"layers.{i}.mlp.router", load)
        self.step += 1
        return whole, grads, counts

    @torch.no_grad()
    def move_bias(self, name: str, counts: Tensor) -> None:
        c = self.config.model
        rate = bias_rate(c, self.step / self.config.train.max_steps)
        if bias_update(c) == "sign":
            missing = (
                counts.sum() - counts * c.num_experts
            )  # difference from the mean, without rounding
            self.state[f"{name}.expert_bias"] += rate * torch.sign(missing)
        if bias_update(c) == "kempnerforge":
            ema = self.state[f"{name}.expert_ema"]
            ema.lerp_(counts / counts.sum(dtype=ema.dtype), 0.01)
            self.params[f"{name}.expert_bias"] += rate * (1 / c.num_experts - ema)
