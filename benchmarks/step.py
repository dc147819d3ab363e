"""Tokens per second of one update: jaxforge's step against the same step in plain PyTorch.

    python benchmarks/step.py [--quick]

Same model, data and threads, float32, alternating in one run. Writes
`benchmarks/results/step-<device>.json`; a ratio above 1 means that jaxforge is faster.
"""

import os
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import results
import torch
from torch import nn
from torch.nn import functional as F

from jaxforge.config.job import JobConfig
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.optim.optimizer import build_optimizer
from jaxforge.parallel.mesh import make_mesh
from jaxforge.training.state import init_state
from jaxforge.training.step import Controls, make_train_step

CASES = {
    "5M, 8 x 256 tokens": {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4},
    "40M, 4 x 512 tokens": {"dim": 512, "n_layers": 10, "n_heads": 8, "n_kv_heads": 8},
}
SHAPES = {"5M, 8 x 256 tokens": (8, 256), "40M, 4 x 512 tokens": (4, 512)}
VOCABULARY = 4096


class TorchBlock(nn.Module):
    """Pre-norm block as torch users write it: RMSNorm, rotary attention, SwiGLU."""

    def __init__(self, dim: int, heads: int, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.h, self.heads, self.kv_heads = dim // heads, heads, kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.h, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = (
            nn.Linear(dim, 2 * ffn, bias=False),
            nn.Linear(ffn, dim, bias=False),
        )

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """[b, s, d] -> [b, s, d]."""
        b, s, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(b, s, -1, self.h).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


class TorchModel(nn.Module):
    """The same decoder in plain PyTorch."""

    def __init__(self, dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        blocks = [TorchBlock(dim, n_heads, n_kv_heads, ffn) for _ in range(n_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm, self.head = nn.RMSNorm(dim, 1e-5), nn.Linear(dim, VOCABULARY, bias=False)
        self.h = dim // n_heads

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy."""
        frequencies = 10000.0 ** (-torch.arange(0, self.h, 2) / self.h)
        angles = torch.outer(torch.arange(tokens.shape[1]), frequencies)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def torch_step(case: str, ffn: int, *, compiled: bool) -> Callable[[], None]:
    """One update of the PyTorch model: fused AdamW, clipping."""
    model = TorchModel(**CASES[case], ffn=ffn)
    loss_of = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens, labels = (torch.tensor(x, dtype=torch.long) for x in _tokens(case))

    def step() -> None:
        loss_of(tokens, labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def jax_step(case: str) -> tuple[Callable[[], None], int, int]:
    """One update of jaxforge's step; also its parameters and feed-forward width."""
    batch, seq = SHAPES[case]
    config = JobConfig.model_validate(
        {
            "model": {**CASES[case], "vocab_size": VOCABULARY, "max_seq_len": seq},
            "train": {"batch_size": batch, "seq_len": seq, "mixed_precision": "fp32"},
            "optimizer": {"lr": 1e-3},
        }
    )
    mesh = make_mesh(config, jax.devices()[:1])
    model = build_model(config)
    optimizer = build_optimizer(config, model.axes)
    jitted = make_train_step(model, optimizer, config, mesh)
    tokens, labels = (np.asarray(x, np.int32)[None] for x in _tokens(case))
    data = {"input_ids": jax.device_put(tokens), "labels": jax.device_put(labels)}
    with jax.set_mesh(mesh):
        state = [init_state(model, optimizer, mesh, 0)]
        compiled = jitted.lower(state[0], data, Controls()).compile()

    def step() -> None:
        state[0], metrics = compiled(state[0], data, Controls())
        metrics["loss"].block_until_ready()

    return step, parameter_count(model.abstract), config.model.ffn_dim


def measure(steps: dict[str, Callable[[], None]], rounds: int, repeats: int) -> dict[str, float]:
    """Median seconds of a step of each, taking turns."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            started = time.perf_counter()
            for _ in range(repeats):
                step()
            seconds[name].append((time.perf_counter() - started) / repeats)
    return {name: statistics.median(times) for name, times in seconds.items()}


def _tokens(case: str) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (*SHAPES[case],))
    return tokens, np.roll(tokens, -1, axis=1)


def main() -> None:
    """Prints the table and writes the results."""
    quick = results.arguments(__doc__).parse_args().quick
    torch.set_num_threads(os.cpu_count() or 1)
    rows = []
    for case in list(CASES)[: 1 if quick else None]:
        ours, parameters, ffn = jax_step(case)
        peers = {"torch eager": torch_step(case, ffn, compiled=False)}
        if not quick:
            peers["torch.compile"] = torch_step(case, ffn, compiled=True)
        rounds, repeats = (2, 2) if quick else (5, 4)
        seconds = measure({"ours": ours, **peers}, rounds, repeats)
        tokens = int(np.prod(SHAPES[case]))
        named = f"{case}, {parameters / 1e6:.1f}M parameters"
        for peer in peers:
            speeds = tokens / seconds["ours"], tokens / seconds[peer]
            rows.append(results.Row(named, round(speeds[0]), peer, round(speeds[1]), "tokens/s"))
    results.report("step", rows, ("jax", "flax", "optax", "torch"), write=not quick)


if __name__ == "__main__":
    main()
