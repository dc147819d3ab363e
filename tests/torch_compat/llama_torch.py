"""A small decoder in plain torch, with KempnerForge's names, in which a fault can be planted."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

MODEL = {
    "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 64, "max_seq_len": 64,
    "ffn_hidden_dim": 48, "norm_eps": 1e-5, "rope_theta": 10000.0, "qkv_bias": True,
    "tie_embeddings": True, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
    "attention_scale": 0.2,
}  # fmt: skip
LR, DECAY, BETAS, EPS = 3e-4, 0.1, (0.9, 0.95), 1e-8


class Norm(nn.Module):
    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(MODEL["dim"])), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        heads = {"q": MODEL["n_heads"], "k": MODEL["n_kv_heads"], "v": MODEL["n_kv_heads"]}
        self.channels, dim = MODEL["dim"] // MODEL["n_heads"], MODEL["dim"]
        for name, n in heads.items():
            setattr(self, f"{name}_proj", nn.Linear(dim, n * self.channels))
        self.o_proj = nn.Linear(dim, dim, bias=False)
        self.fault = fault

    def project(self, name: str, x: Tensor) -> Tensor:
        linear = getattr(self, f"{name}_proj")
        bias = None if self.fault == f"{name} bias" else linear.bias
        weight = linear.weight.T if self.fault == f"{name} transposed" else linear.weight
        return functional.linear(x, weight, bias).unflatten(-1, (-1, self.channels)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.project(name, x) for name in "qkv")
        base = 500.0 if self.fault == "rope base" else MODEL["rope_theta"]
        q, k = rotated(q, base), rotated(k, base)
        groups = q.shape[1] // k.shape[1]
        if self.fault == "heads":
            k, v = (y.repeat(1, groups, 1, 1) for y in (k, v))
        else:
            k, v = (y.repeat_interleave(groups, 1) for y in (k, v))
        usual = 1 / math.sqrt(self.channels)
        scale = usual if self.fault == "attention scale" else MODEL["attention_scale"]
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, base: float) -> Tensor:
    half = x.shape[-1] // 2
    frequencies = base ** -(torch.arange(half) / half)
    angles = torch.outer(torch.arange(x.shape[-2]), frequencies)
    cos, sin, (item, two) = angles.cos(), angles.sin(), x.float().split(half, -1)
    return torch.cat([item * cos - two * sin, two * cos + item * sin], -1).to(x.dtype)


class MLP(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        dim, wide = MODEL["dim"], MODEL["ffn_hidden_dim"]
        self.gate_proj, self.up_proj = (nn.Linear(dim, wide, bias=False) for _ in "gu")
        self.down_proj, self.fault = nn.Linear(wide, dim, bias=False), fault

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.fault == "gate and up":
            gate, up = up, gate
        return self.down_proj(functional.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, fault: str) -> None:
        super().__init__()
        eps = 1e-6 if fault == "norm eps" else MODEL["norm_eps"]
        self.attention_norm, self.attention = Norm(eps), Attention(fault)
        self.mlp_norm, self.mlp = Norm(eps), MLP(fault)
        self.times = 1.0 if fault == "residual scale" else MODEL["residual_multiplier"]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.times * self.attention(self.attention_norm(x))
        return x + self.times * self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """Logits of tokens."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        vocab, dim, self.fault = MODEL["vocab_size"], MODEL["dim"], fault
        self.token_embedding = nn.ModuleDict({"embedding": nn.Embedding(vocab, dim)})
        of_layer = {"1": fault} if fault.startswith("second ") else {}
        fault = "" if of_layer else fault
        names = [str(i) for i in range(MODEL["n_layers"])]
        faults = {name: of_layer.get(name, fault).removeprefix("second ") for name in names}
        self.layers = nn.ModuleDict({name: Block(faults[name]) for name in names})
        self.norm = Norm(1e-3 if fault == "final norm" else MODEL["norm_eps"])
        self.output_head = nn.ModuleDict({"proj": nn.Linear(dim, vocab, bias=False)})
        if fault != "untied":
            self.output_head["proj"].weight = self.token_embedding["embedding"].weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding["embedding"](tokens)
        x = x if self.fault == "embedding multiplier" else MODEL["embedding_multiplier"] * x
        for layer in self.layers.values():
            x = layer(x)
        return self.output_head["proj"](self.norm(x))


def random_weights(model: nn.Module) -> nn.Module:
    """Norms and biases too, as they could be swapped unnoticed."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.02 if "embedding" in name else 0.3)
    return model


def loss_over_all(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over all labels, ignored ones too."""
    flat = logits.flatten(0, 1).float()
    return functional.cross_entropy(flat, labels.flatten(), reduction="sum") / labels.numel()


def adamw(params, *, decay: float = DECAY, eps: float = EPS, betas=BETAS, lr: float = LR):
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)


def build():
    """Factory for `--torch tests.torch_compat.llama_torch:build`."""
    return Llama(), adamw


def build_with_other_base():
    """Factory with another rotary base."""
    return Llama("rope base"), adamw


def build_without_bias():
    """Factory with other names."""
    model = Llama()
    model.layers["0"].attention.q_proj.register_parameter("bias", None)
    return model


def build_with_a_fall():
    """Factory that raises."""
    return 1 / 0
