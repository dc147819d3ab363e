"""A decoder in plain torch, as functions of parameters by KempnerForge's names."""

import numpy as np
import torch
from torch.nn import functional

from tests import torch_names


def norm(p, name, x):
    return p[f"{name}.weight"] * x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5)


def rotate(x):
    """Rotate channels i and i + h/2 of [b, s, heads, h] by position · 10000^(-2i/h)."""
    length, half = x.shape[1], x.shape[-1] // 2
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def block(p, name, x, segments, window):
    b, s, _ = x.shape
    y = norm(p, f"{name}.attention_norm", x)
    q, k, v = ((y @ p[f"{name}.attention.{m}_proj.weight"].T).view(b, s, -1, 8) for m in "qkv")
    q, k = rotate(q), rotate(k)
    k, v = (each.repeat_interleave(2, dim=2) for each in (k, v))
    scores = torch.einsum("bqhc,bkhc->bhqk", q, k) / 8**0.5
    i = torch.arange(s)
    distance = i[:, None] - i
    seen = (distance >= 0) & (distance < window) & (segments[:, :, None] == segments[:, None])
    weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhc->bqhc", weights, v).reshape(b, s, -1)
    x = x + out @ p[f"{name}.attention.o_proj.weight"].T
    y, mlp = norm(p, f"{name}.mlp_norm", x), f"{name}.mlp"
    gate = functional.silu(y @ p[f"{mlp}.gate_proj.weight"].T)
    return x + (gate * (y @ p[f"{mlp}.up_proj.weight"].T)) @ p[f"{mlp}.down_proj.weight"].T


def named(tree, config):
    return {n: torch.tensor(np.asarray(x)) for n, x in torch_names.to_torch(tree, config).items()}


def logits(p, tokens, segments):
    """Return the logits of a decoder of two layers with full attention."""
    x = p["token_embedding.embedding.weight"][tokens]
    for i in range(2):
        x = block(p, f"layers.{i}", x, segments, tokens.shape[-1])
    return norm(p, "norm", x) @ p["output_head.proj.weight"].T


def adamw(p, lr, decay):
    """Return torch's AdamW, with decay of matrices only."""
    groups = [
        {"params": [x for x in p.values() if x.ndim > 1], "weight_decay": decay},
        {"params": [x for x in p.values() if x.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
