"""Models in plain PyTorch with the layers of jaxforge: the peers of `step.py` and `moe.py`.

They follow the published formulas, as torch users write them: fused projections, PyTorch's
attention kernels, grouped products with experts, `torch.compile`, float32 parameters under autocast
and fused AdamW. Each has as many parameters as jaxforge's model (tests/test_twins.py).
"""

import functools
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from jaxforge.config.fine_tuning import LoraConfig
from jaxforge.config.job import JobConfig
from jaxforge.config.mixers import GATED_DELTA_NET, LATENT_ATTENTION, MAMBA2
from jaxforge.config.model import ModelConfig

ON_GPU = torch.cuda.is_available()
Tensor = torch.Tensor
Projection = Callable[..., nn.Module]
"""(width of the input, widths of the outputs) -> layer that returns the outputs side by side."""
Mask = BlockMask | Tensor | None
"""Visible pairs of packed rows: blocks for `flex_attention`, or booleans on a CPU."""


def dense(inp: int, *outs: int) -> nn.Linear:
    """Return a linear layer without bias."""
    return nn.Linear(inp, sum(outs), bias=False)


class Adapted(nn.Module):
    """Frozen linear layer in bfloat16 with an adapter for each output (LoRA)."""

    def __init__(self, inp: int, *outs: int, lora: LoraConfig) -> None:
        super().__init__()
        self.base, self.scale = dense(inp, *outs).bfloat16(), lora.scale
        self.lora_a = dense(inp, *[lora.rank] * len(outs))
        self.lora_b = nn.ModuleList(dense(lora.rank, out) for out in outs)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ + scale · x Aᵀ Bᵀ."""
        parts = self.lora_a(x).chunk(len(self.lora_b), dim=-1)
        pairs = zip(self.lora_b, parts, strict=True)
        return self.base(x) + self.scale * torch.cat([b(part) for b, part in pairs], dim=-1)


class Fp8Linear(nn.Linear):
    """Linear layer with products in 8 bits and one dynamic scale per tensor, as in torchao."""

    def __init__(self, inp: int, *outs: int) -> None:
        super().__init__(inp, sum(outs), bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute x Wᵀ."""
        y = _Fp8Product.apply(x.flatten(0, -2).bfloat16(), self.weight.bfloat16())
        return y.unflatten(0, x.shape[:-1])


class _Fp8Product(torch.autograd.Function):
    """Product x Wᵀ with x and W in e4m3 and their result's gradient in e5m2."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, weight: Tensor) -> Tensor:
        inputs = *_to_fp8(x, torch.float8_e4m3fn), *_to_fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*inputs)
        x8, x_unit, w8, w_unit = inputs
        return _product(x8, w8.t(), x_unit, w_unit, fast=True)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_unit, w8, w_unit = ctx.saved_tensors
        dy8, dy_unit = _to_fp8(dy, torch.float8_e5m2)
        # `_scaled_mm` takes a row-major and a column-major matrix.
        dx = _product(dy8, w8.t().contiguous().t(), dy_unit, w_unit)
        dw = _product(dy8.t().contiguous(), x8.t().contiguous().t(), dy_unit, x_unit)
        return dx, dw


def _to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return x scaled by a power of two to the range of `dtype`, and the inverse of the scale."""
    largest = torch.finfo(dtype).max
    amax = x.abs().amax().float().clamp(min=1e-12)
    scale = torch.exp2(torch.floor(torch.log2(largest / amax)))
    return (x.float() * scale).clamp(-largest, largest).to(dtype), 1 / scale


def _product(x: Tensor, y: Tensor, *units: Tensor, fast: bool = False) -> Tensor:
    return torch._scaled_mm(
        x, y, scale_a=units[0], scale_b=units[1], out_dtype=torch.bfloat16,
        use_fast_accum=fast and ON_GPU,
    )  # fmt: skip


class Attention(nn.Module):
    """Causal attention with rotary positions; packed rows are masked."""

    def __init__(self, c: ModelConfig, project: Projection) -> None:
        super().__init__()
        self.heads, self.kv, self.size = c.n_heads, c.kv_heads, c.head_size
        self.qkv = project(c.dim, *(n * self.size for n in (self.heads, self.kv, self.kv)))
        self.o = project(self.heads * self.size, c.dim)
        norms = (nn.RMSNorm(self.size, 1e-5) if c.qk_norm else nn.Identity() for _ in "qk")
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        b, s, _ = x.shape
        qkv = self.qkv(x).view(b, s, -1, self.size).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv, self.kv], dim=1)
        q, k = _rotate(self.q_norm(q), cos, sin), _rotate(self.k_norm(k), cos, sin)
        if isinstance(mask, BlockMask):
            y = flex_attention(q.to(v.dtype), k.to(v.dtype), v, block_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
            )
        return self.o(y.transpose(1, 2).reshape(b, s, -1))


class LatentAttention(nn.Module):
    """Multi-head latent attention of DeepSeek-V3 (arXiv:2412.19437, section 2.1.1)."""

    def __init__(self, c: ModelConfig, project: Projection) -> None:
        super().__init__()
        at = self.at = c.latent_attention
        self.heads = c.n_heads
        self.q_a, self.q_norm = project(c.dim, at.q_rank), nn.RMSNorm(at.q_rank, 1e-6)
        self.q_b = project(at.q_rank, self.heads * at.query_head_dim)
        self.kv_a, self.kv_norm = project(c.dim, at.cached_values), nn.RMSNorm(at.kv_rank, 1e-6)
        self.kv_b = project(at.kv_rank, self.heads * (at.nope_head_dim + at.value_head_dim))
        self.o = project(self.heads * at.value_head_dim, c.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        assert mask is None
        b, s, at = *x.shape[:2], self.at
        q = self._heads(self.q_b(self.q_norm(self.q_a(x))))
        q_nope, q_rope = q.split([at.nope_head_dim, at.rope_head_dim], dim=-1)
        latent, k_rope = self.kv_a(x).split([at.kv_rank, at.rope_head_dim], dim=-1)
        kv = self._heads(self.kv_b(self.kv_norm(latent)))
        k_nope, v = kv.split([at.nope_head_dim, at.value_head_dim], dim=-1)
        k_rope = _rotate(k_rope[:, None], cos, sin).expand(-1, self.heads, -1, -1)
        q = torch.cat([q_nope, _rotate(q_rope, cos, sin).to(q.dtype)], dim=-1)
        k = torch.cat([k_nope, k_rope.to(q.dtype)], dim=-1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, -1))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv:2412.06464) with the layers of Qwen3-Next."""

    def __init__(self, c: ModelConfig, project: Projection) -> None:
        super().__init__()
        at = self.at = c.gated_delta_net.sizes
        self.sizes = [at.key_size, at.key_size, at.value_size]
        self.widths = [*self.sizes, at.value_size, at.value_heads, at.value_heads]
        self.inputs = project(c.dim, *self.widths)
        self.conv = nn.Conv1d(channels := sum(self.sizes), channels, at.conv_size,
                              groups=channels, padding=at.conv_size - 1, bias=False)  # fmt: skip
        self.decay_log = nn.Parameter(torch.empty(at.value_heads).uniform_(0.01, 16).log())
        self.decay_bias = nn.Parameter(torch.ones(at.value_heads))
        self.norm, self.o = nn.RMSNorm(at.value_head_dim, 1e-5), project(at.value_size, c.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        assert mask is None
        at, s = self.at, x.shape[1]
        *qkv, gate, beta, decay = self.inputs(x).split(self.widths, dim=-1)
        mixed = F.silu(self.conv(torch.cat(qkv, dim=-1).mT)[..., :s].mT)
        q, k, v = mixed.split(self.sizes, dim=-1)
        log_decay = -self.decay_log.exp() * F.softplus(decay.float() + self.decay_bias)
        heads = (q.unflatten(-1, (at.key_heads, -1)), k.unflatten(-1, (at.key_heads, -1)),
                 v.unflatten(-1, (at.value_heads, -1)))  # fmt: skip
        y = gated_delta_rule(*heads, log_decay, beta.float().sigmoid())
        y = self.norm(y.float()).flatten(-2) * F.silu(gate.float())
        return self.o(y.to(x.dtype))


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, chunk: int = 64
) -> Tensor:
    """Apply the rule by chunks, in the WY form of arXiv:2412.06464 (section 3.2).

    Args:
        q: queries [b, s, key heads, d], of any length.
        k: keys [b, s, key heads, d], of any length.
        v: values [b, s, heads, v].
        log_decay: logarithms of the decays [b, s, heads].
        beta: strengths [b, s, heads].
        chunk: tokens of a chunk.

    Returns:
        Outputs [b, s, heads, v].
    """
    repeats = v.shape[2] // k.shape[2]
    q, k = (F.normalize(x.float(), dim=-1).repeat_interleave(repeats, 2) for x in (q, k))
    chunks = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (q * q.shape[-1] ** -0.5, k, v))
    q, k, v = chunks  # [b, heads, n, chunk, width]
    log_decay, beta = (x.transpose(1, 2).unflatten(2, (-1, chunk)) for x in (log_decay, beta))
    total, beta = log_decay.cumsum(-1), beta[..., None]
    decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    begun = total.exp()[..., None]
    system = torch.eye(chunk, device=k.device) + (beta * decay * (k @ k.mT)).tril(-1)
    right = torch.cat([beta * v, beta * begun * k], dim=-1).float()
    solved = torch.linalg.solve_triangular(system.float(), right, upper=False, unitriangular=True)
    values, keys = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    inside, reads = (q @ k.mT) * decay, begun * q
    ended = total[..., -1:].exp()[..., None]
    writes = ((total[..., -1:] - total).exp()[..., None] * k).mT
    return _scan_chunks(values, keys, reads, inside, ended, writes).flatten(2, 3).transpose(1, 2)


@torch.compiler.disable  # unrolled over 64 chunks, it takes minutes to compile
def _scan_chunks(
    values: Tensor, keys: Tensor, reads: Tensor, inside: Tensor, ended: Tensor, writes: Tensor
) -> Tensor:
    """Return the outputs of all chunks; each changes the state [b, heads, d, v]."""
    state = torch.zeros_like(writes[:, :, 0] @ values[:, :, 0])
    outputs = []
    for n in range(keys.shape[2]):
        new = values[:, :, n] - keys[:, :, n] @ state
        outputs.append(reads[:, :, n] @ state + inside[:, :, n] @ new)
        state = ended[:, :, n] * state + writes[:, :, n] @ new
    return torch.stack(outputs, dim=2)


class Mamba2(nn.Module):
    """Mamba-2 (arXiv:2405.21060) with a gated norm for each group, as in Nemotron-H."""

    def __init__(self, c: ModelConfig, project: Projection) -> None:
        super().__init__()
        at = self.at = c.mamba2
        self.sizes = [at.inner_size, at.group_size, at.group_size]
        self.widths = [at.inner_size, *self.sizes, at.heads]
        self.inputs = project(c.dim, *self.widths)
        self.conv = nn.Conv1d(channels := sum(self.sizes), channels, at.conv_size,
                              groups=channels, padding=at.conv_size - 1)  # fmt: skip
        self.a_log = nn.Parameter(torch.empty(at.heads).uniform_(1, 16).log())
        self.dt_bias = nn.Parameter(torch.empty(at.heads).uniform_(-7, -2))
        self.skip = nn.Parameter(torch.ones(at.heads))
        self.norm = nn.Parameter(torch.ones(at.inner_size))
        self.o = project(at.inner_size, c.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        assert mask is None
        at, s = self.at, x.shape[1]
        z, *xbc, dt = self.inputs(x).split(self.widths, dim=-1)
        mixed = F.silu(self.conv(torch.cat(xbc, dim=-1).mT)[..., :s].mT)
        u, b, c = mixed.split(self.sizes, dim=-1)
        u = u.unflatten(-1, (at.heads, -1))
        b, c = (y.unflatten(-1, (at.groups, -1)) for y in (b, c))
        dt = F.softplus(dt.float() + self.dt_bias)
        y = state_space(u, dt, -self.a_log.exp(), b, c, min(at.chunk_size, s))
        y = (y + self.skip[:, None] * u).flatten(-2).float() * F.silu(z.float())
        y = F.rms_norm(y.unflatten(-1, (at.groups, -1)), (at.inner_size // at.groups,), eps=1e-5)
        return self.o((y.flatten(-2) * self.norm).to(x.dtype))


def state_space(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, chunk: int) -> Tensor:
    """Run the recurrence by chunks (SSD, arXiv:2405.21060, section 6), without the skip.

    Args:
        x: values [b, s, heads, p].
        dt: time steps [b, s, heads].
        a: decay rates of the heads.
        b: input projections [b, s, groups, n].
        c: output projections [b, s, groups, n].
        chunk: tokens of a chunk.

    Returns:
        Outputs [b, s, heads, p].
    """
    groups = b.shape[2]
    # [b, chunks, tokens, groups, heads of a group, ...]
    x, dt, total = (y.unflatten(1, (-1, chunk)).unflatten(3, (groups, -1)) for y in (x, dt, dt * a))
    b, c = (y.unflatten(1, (-1, chunk)) for y in (b, c))
    values, total = x * dt[..., None], total.cumsum(2)
    scores = torch.einsum("zkqgn,zkugn->zkgqu", c, b)
    inside = torch.einsum("zkgqu,zkghqu,zkughp->zkqghp", scores, _decays(total, 2), values)
    left = (total[:, :, -1:] - total).exp()
    added = torch.einsum("zkugn,zkugh,zkughp->zkghpn", b, left, values)
    # The state before chunk i has what earlier chunks added, decayed by all chunks in between.
    ends = F.pad(total[:, :, -1], (0, 0, 0, 0, 1, 0)).cumsum(1)
    between = _decays(ends, 1)[..., :-1, 1:]  # [b, groups, heads, to, from]
    states = torch.einsum("zghij,zjghpn->zighpn", between, added)
    before = torch.einsum("zkqgn,zkghpn,zkqgh->zkqghp", c, states, total.exp())
    return (inside + before).flatten(3, 4).flatten(1, 2)


def _decays(total: Tensor, axis: int) -> Tensor:
    """Return exp(total_i - total_j) for j ≤ i, else 0; `axis` becomes the last two axes."""
    total = total.movedim(axis, -1)
    return (total[..., :, None] - total[..., None, :]).tril().exp().tril()


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, c: ModelConfig, project: Projection) -> None:
        super().__init__()
        self.gate_up, self.down = project(c.dim, c.ffn_dim, c.ffn_dim), project(c.ffn_dim, c.dim)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class Experts(nn.Module):
    """Softmax over experts, top-k, and grouped products; or a loop over experts."""

    def __init__(self, c: ModelConfig, *, grouped: bool) -> None:
        super().__init__()
        self.k, self.n, self.grouped = c.moe_top_k, c.num_experts, grouped
        self.router = dense(c.dim, self.n)
        shapes = (self.n, 2 * c.expert_dim, c.dim), (self.n, c.dim, c.expert_dim)
        stacked = [torch.empty(shape).normal_(std=0.02) for shape in shapes]
        # In a loop, gradients of single matrices need no copy into a stack.
        self.gate_up, self.down = (
            nn.Parameter(w) if grouped else nn.ParameterList(map(torch.clone, w)) for w in stacked
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(self.k)
        weights = weights / weights.sum(-1, keepdim=True)
        run = self._grouped if self.grouped else self._one_by_one
        return run(tokens, weights, chosen).view_as(x)

    def _grouped(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        order = chosen.flatten().argsort(stable=True)
        experts = torch.arange(self.n, device=tokens.device)
        ends = (chosen.flatten()[:, None] == experts).sum(0).cumsum(0).to(torch.int32)
        rows = tokens[order // self.k].bfloat16()
        gate, up = self._product(rows, self.gate_up, ends).chunk(2, dim=-1)
        out = self._product(F.silu(gate) * up, self.down, ends)
        out = out * weights.flatten()[order, None].to(out.dtype)
        return torch.zeros_like(tokens).index_add(0, order // self.k, out.to(tokens.dtype))

    @staticmethod
    def _product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        return torch._grouped_mm(rows, weights.bfloat16().mT, offs=ends)

    def _one_by_one(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        y = torch.zeros_like(tokens)
        for expert in range(self.n):
            token, slot = torch.where(chosen == expert)
            gate, up = F.linear(tokens[token], self.gate_up[expert]).chunk(2, dim=-1)
            out = F.linear(F.silu(gate) * up, self.down[expert]) * weights[token, slot, None]
            y = y.index_add(0, token, out.to(y.dtype))
        return y


MIXERS = {"attention": Attention, LATENT_ATTENTION: LatentAttention, GATED_DELTA_NET: GatedDeltaNet,
          MAMBA2: Mamba2}  # fmt: skip


class Block(nn.Module):
    """Pre-norm block: a mixer, then a feed-forward or experts."""

    def __init__(self, c: ModelConfig, project: Projection, *, grouped: bool) -> None:
        super().__init__()
        self.mixer_norm, self.mlp_norm = nn.RMSNorm(c.dim, 1e-5), nn.RMSNorm(c.dim, 1e-5)
        (mixer,) = c.mixers
        self.mixer = MIXERS[mixer](c, project)
        self.mlp = Experts(c, grouped=grouped) if c.is_moe else FeedForward(c, project)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Mask) -> Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        x = x + self.mixer(self.mixer_norm(x), cos, sin, mask)
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    """Decoder with the layers of a config.

    Args:
        config: the config of jaxforge's step.
        grouped: products of all experts at once, in bfloat16, instead of a loop.
    """

    def __init__(self, config: JobConfig, *, grouped: bool = ON_GPU) -> None:
        super().__init__()
        c, train = config.model, config.train
        self.config = c
        eight_bit = range(train.num_layers_at_start_in_bf16,
                          c.n_layers - train.num_layers_at_end_in_bf16)  # fmt: skip
        project: Projection = dense
        if config.lora.rank:
            project = functools.partial(Adapted, lora=config.lora)
        is_fp8 = train.mixed_precision == "fp8"
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(
            Block(c, Fp8Linear if is_fp8 and n in eight_bit else project, grouped=grouped)
            for n in range(c.n_layers)
        )
        self.norm, self.head = nn.RMSNorm(c.dim, 1e-5), dense(c.dim, c.vocab_size)
        for name, param in self.named_parameters():
            if config.lora.rank and "lora_" not in name:
                param.requires_grad_(False)
                param.data = param.data.bfloat16()

    def forward(self, tokens: Tensor, labels: Tensor, documents: Tensor | None = None) -> Tensor:
        """Compute the mean cross-entropy."""
        c, at = self.config, tokens.device
        frequencies = 10000.0 ** (-torch.arange(0, c.rotary_size, 2, device=at) / c.rotary_size)
        angles = torch.outer(torch.arange(tokens.shape[1], device=at), frequencies)
        mask = None if documents is None else mask_of(documents)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return self.loss(x, labels)

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Compute the mean cross-entropy of the last layer's output."""
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())

    def compile_layers(self) -> None:
        """Compile one layer for all, and the loss: minutes faster than the whole model."""
        for layer in self.layers:
            layer.compile()
        self.loss = torch.compile(self.loss)


def mask_of(documents: Tensor) -> Mask:
    """Return the mask of causal attention within documents [b, s]."""
    s = documents.shape[1]
    if not ON_GPU:  # flex_attention has no gradient on CPUs
        same = documents[:, None, :, None] == documents[:, None, None, :]
        return same & torch.ones(s, s, dtype=torch.bool).tril()

    def visible(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (q >= kv) & (documents[b, q] == documents[b, kv])

    return _create_block_mask(visible, documents.shape[0], None, s, s, device=documents.device)


_create_block_mask = torch.compile(create_block_mask) if ON_GPU else create_block_mask


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
