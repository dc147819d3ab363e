"""Small FSDP2 job with KempnerForge's names and loop.

    torch_job.py SETTINGS.json RANKS PORT

One process imports torch and forks the ranks, which find each other by the port.

Trains from `load` (a DCP directory, `flat` or not) or from scratch for `steps` steps, and writes
their losses and gradient norms to `out`. `saves` are directories `step_N`, each flat or not.
"""

import json
import math
import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.h = m["dim"] // m["n_heads"]
        kv = m["n_kv_heads"] * self.h
        self.q_proj = nn.Linear(m["dim"], m["dim"], bias=False)
        self.k_proj = nn.Linear(m["dim"], kv, bias=False)
        self.v_proj = nn.Linear(m["dim"], kv, bias=False)
        self.o_proj = nn.Linear(m["dim"], m["dim"], bias=False)

    def forward(self, x):
        batch, seq, _ = x.shape
        q, k, v = (
            proj(x).view(batch, seq, -1, self.h).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        frequencies = 10000.0 ** (-torch.arange(0, self.h, 2).float() / self.h)
        angles = torch.arange(seq)[:, None] * frequencies
        q, k = (_rotated(t, angles.cos(), angles.sin()) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).reshape(batch, seq, -1))


def _rotated(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class MLP(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.gate_proj = nn.Linear(m["dim"], m["ffn_hidden_dim"], bias=False)
        self.up_proj = nn.Linear(m["dim"], m["ffn_hidden_dim"], bias=False)
        self.down_proj = nn.Linear(m["ffn_hidden_dim"], m["dim"], bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    """Weights of all experts, zero but for the best k; KempnerForge's bias is in the sigmoid."""

    def __init__(self, m):
        super().__init__()
        self.top_k, experts = m["moe_top_k"], m["num_experts"]
        self.gate = nn.Linear(m["dim"], experts, bias=False)
        self.is_sigmoid = m.get("moe_router") == "sigmoid_topk"
        if self.is_sigmoid:
            self.expert_bias = nn.Parameter(torch.zeros(experts))
            self.register_buffer("expert_ema", torch.full((experts,), 1 / experts))

    def forward(self, x):
        logits = self.gate(x)
        scores = torch.sigmoid(logits + self.expert_bias) if self.is_sigmoid else logits.softmax(-1)
        best, which = scores.topk(self.top_k, dim=-1)
        return torch.zeros_like(scores).scatter(-1, which, best / best.sum(-1, keepdim=True))


class MoE(nn.Module):
    """Every expert sees every token, so that each has a gradient on each rank."""

    def __init__(self, m):
        super().__init__()
        e, d, f = m["num_experts"], m["dim"], m["moe_expert_dim"]
        self.is_packed = m.get("moe_packed_experts", False)
        if self.is_packed:
            self.up_w, self.gate_w = (nn.Parameter(torch.empty(e, d, f)) for _ in range(2))
            self.down_w = nn.Parameter(torch.empty(e, f, d))
        self.router = Router(m)
        if m.get("moe_shared_experts"):
            self.shared_expert = MLP({**m, "ffn_hidden_dim": f})
        if not self.is_packed:
            self.experts = nn.ModuleList(MLP({**m, "ffn_hidden_dim": f}) for _ in range(e))

    def forward(self, x):
        weights = self.router(x)
        out = self.shared_expert(x) if hasattr(self, "shared_expert") else 0
        for e in range(weights.shape[-1]):
            out = out + weights[..., e, None] * self._expert(e, x)
        return out

    def _expert(self, e, x):
        if not self.is_packed:
            return self.experts[e](x)
        return (F.silu(x @ self.gate_w[e]) * (x @ self.up_w[e])) @ self.down_w[e]


class Block(nn.Module):
    def __init__(self, m, i):
        super().__init__()
        pattern = m.get("feed_forward_pattern") or ("experts",)
        has_experts = m.get("num_experts", 0) and pattern[i % len(pattern)] == "experts"
        self.attention_norm, self.attention = RMSNorm(m["dim"]), Attention(m)
        self.mlp_norm, self.mlp = RMSNorm(m["dim"]), (MoE if has_experts else MLP)(m)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Transformer(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.token_embedding = nn.ModuleDict({"embedding": nn.Embedding(m["vocab_size"], m["dim"])})
        self.layers = nn.ModuleDict({str(i): Block(m, i) for i in range(m["n_layers"])})
        self.norm = RMSNorm(m["dim"])
        head = nn.Linear(m["dim"], m["vocab_size"], bias=False)
        self.output_head = nn.ModuleDict({"proj": head})
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x = self.token_embedding["embedding"](tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output_head["proj"](self.norm(x))


def cosine(warmup, total, ratio=0.1):
    def factor(n):
        if n < warmup:
            return n / warmup
        progress = min(1.0, (n - warmup) / (total - warmup))
        return ratio + 0.5 * (1 - ratio) * (1 + math.cos(math.pi * progress))

    return factor


class Windows(torch.utils.data.Dataset):
    def __init__(self, path, seq):
        self.tokens, self.seq = np.load(path), seq

    def __len__(self):
        return len(self.tokens) // (self.seq + 1)

    def __getitem__(self, i):
        return torch.from_numpy(self.tokens[i * (self.seq + 1) :][: self.seq + 1].astype(np.int64))


def batches(dataset, per_rank, epoch, skip):
    sampler = DistributedSampler(dataset, seed=42)
    while True:
        sampler.set_epoch(epoch)
        loader = DataLoader(dataset, per_rank, sampler=sampler, drop_last=True)
        for i, batch in enumerate(loader):
            if i >= skip:
                yield epoch, i + 1, batch
        epoch, skip = epoch + 1, 0


def save(where, flat, model, optimizer, location):
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
    }
    dcp.save(state, checkpoint_id=where)
    if dist.get_rank() == 0:
        rng = {"torch_cpu": torch.get_rng_state(), "numpy": np.random.get_state()}
        torch.save({**location, "rng": rng}, Path(where, "train_state.pt"))


def fork(settings, ranks, port):
    """Runs all ranks; fails as the worst of them does."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            os.environ["RANK"] = str(rank)
            try:
                main(settings)
            except BaseException:
                traceback.print_exc()
            os._exit(1)
        children.append(child)
    while children:
        child, status = os.wait()
        children.remove(child)
        if status:
            for other in children:
                os.kill(other, signal.SIGKILL)
            raise SystemExit(1)


def main(settings):
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    torch.manual_seed(0)
    model = Transformer(settings["model"])
    for block in model.layers.values():
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    undecayed = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": undecayed, "weight_decay": 0.0}],
        lr=3e-3, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, cosine(settings["warmup"], settings["total"])
    )
    options = StateDictOptions(flatten_optimizer_state_dict=settings["flat"])
    step, tokens, epoch, drawn = 0, 0, 0, 0
    if settings["load"]:
        state = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer, options=options),
        }
        dcp.load(state, checkpoint_id=settings["load"])
        set_model_state_dict(model, state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
        location = torch.load(Path(settings["load"], "train_state.pt"), weights_only=False)
        step, tokens = location["step"], location["tokens_seen"]
        scheduler.load_state_dict(location["scheduler"])
        epoch, drawn = location["dataloader"]["epoch"], location["dataloader"]["batches_yielded"]
        torch.set_rng_state(location["rng"]["torch_cpu"])
        np.random.set_state(location["rng"]["numpy"])
    data = Windows(settings["tokens"], settings["seq_len"])
    source = batches(data, settings["rows"] // ranks, epoch, drawn)
    logged = []
    for _ in range(settings["steps"]):
        epoch, drawn, batch = next(source)
        logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step, tokens = step + 1, tokens + settings["rows"] * settings["seq_len"]
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        logged.append([step, mean.item() / ranks, float(norm.full_tensor())])
        location = {
            "step": step,
            "tokens_seen": tokens,
            "scheduler": scheduler.state_dict(),
            "dataloader": {
                "epoch": epoch,
                "batches_yielded": drawn,
                "sampler": {"epoch": epoch, "seed": 42, "num_replicas": ranks, "rank": 0},
            },
        }
        for where, flat in settings["saves"]:
            if Path(where).name == f"step_{step}":
                save(where, flat, model, optimizer, location)
    if dist.get_rank() == 0:
        Path(settings["out"]).write_text(json.dumps(logged))
    dist.barrier()
    sys.stdout.flush()
    # Threads of gloo that still hold tensors abort the process now and then while the interpreter
    # shuts down, whether or not the groups were destroyed (pytorch#179291, #190489).
    os._exit(0)


if __name__ == "__main__":
    fork(json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2]), sys.argv[3])
