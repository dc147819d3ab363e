"""Tokens per second of an update, compared with the same update in plain PyTorch.

    python benchmarks/step.py [--quick] [--cases WORDS]

Both have the same model, data, threads and precision, and alternate in one run. On a GPU, a 1B
model and layers of the width of a 7B model run in bfloat16, compared only with torch.compile. On a
TPU, a 0.3B model is compared with plain JAX.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
import results
import torch
from torch import nn
from torch.nn import functional as F

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.model import flops
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.parallel import compilation, host_memory
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.state.train_state import TrainState
from jaxforge.step.train_step import Controls


@dataclass(frozen=True)
class Case:
    """Model and batch.

    Attributes:
        name: name in the table.
        model: the `[model]` section.
        batch: number of sequences.
        seq: tokens per sequence.
        precision: `train.mixed_precision`; "bf16" uses PyTorch's autocast.
    """

    name: str
    model: dict
    batch: int
    seq: int
    precision: str = "fp32"

    @property
    def vocab(self) -> int:
        """Size of the vocabulary."""
        return self.model["vocab_size"]


QUICK = Case("0.7M, 4 x 128 tokens", {"dim": 128, "n_layers": 2, "n_heads": 4,
                                      "vocab_size": 512}, 4, 128)  # fmt: skip
CPU_CASES = (
    Case("5M, 8 x 256 tokens", {"dim": 256, "n_layers": 6, "n_heads": 8, "n_kv_heads": 4,
                                "vocab_size": 4096}, 8, 256),
    Case("40M, 4 x 512 tokens", {"dim": 512, "n_layers": 10, "n_heads": 8, "vocab_size": 4096},
         4, 512),
)  # fmt: skip
_1B = {"dim": 2048, "n_layers": 16, "n_heads": 16, "n_kv_heads": 8, "ffn_hidden_dim": 8192,
       "vocab_size": 32768}  # fmt: skip
_7B_LAYERS = {"dim": 4096, "n_layers": 4, "n_heads": 32, "ffn_hidden_dim": 11008,
              "vocab_size": 32000}  # fmt: skip
GPU_CASES = tuple(
    Case(f"{name}, {rows} x 4096 tokens", model, rows, 4096, "bf16")
    for rows in (4, 1)
    for name, model in (("1B", _1B), ("4 layers of 7B", _7B_LAYERS))
)
TPU_CASES = (
    Case("0.3B, 4 x 2048 tokens", {"dim": 1024, "n_layers": 12, "n_heads": 8, "n_kv_heads": 8,
                                   "ffn_hidden_dim": 4096, "vocab_size": 32768}, 4, 2048, "bf16"),
)  # fmt: skip
_BOTH_FIT = (
    130e9  # bytes of a GPU that holds our 1B model with 4 rows and PyTorch's: 49 GB and more
)


def cases(words: str = "", *, quick: bool = False) -> list[Case]:
    """Return the cases for this device whose names have these words; of a quick run, one."""
    result: Sequence[Case] = (QUICK,) if quick else CPU_CASES
    if jax.default_backend() == "tpu":
        result = TPU_CASES
    if jax.default_backend() == "gpu":
        rows = 4 if torch.cuda.get_device_properties(0).total_memory > _BOTH_FIT else 1
        result = [case for case in GPU_CASES if case.batch == rows]
    return [case for case in result if words in case.name][: 1 if quick else None]


class TorchBlock(nn.Module):
    """Pre-norm block as torch users write it: RMSNorm, rotary attention, SwiGLU."""

    def __init__(self, c: ModelConfig) -> None:
        super().__init__()
        dim, heads, kv_heads, ffn = c.dim, c.n_heads, c.kv_heads, c.ffn_dim
        self.h, self.heads, self.kv_heads = c.head_size, heads, kv_heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(dim, 1e-5), nn.RMSNorm(dim, 1e-5)
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.h, bias=False)
        self.o = nn.Linear(dim, dim, bias=False)
        self.gate_up = nn.Linear(dim, 2 * ffn, bias=False)
        self.down = nn.Linear(ffn, dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        b, s, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(b, s, -1, self.h).transpose(1, 2)
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.feed_forward(self.mlp_norm(x))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute [b, s, d] -> [b, s, d]."""
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class TorchModel(nn.Module):
    """Decoder in plain PyTorch with the same architecture."""

    def __init__(
        self, c: ModelConfig, block: Callable[[ModelConfig], nn.Module] | None = None
    ) -> None:
        super().__init__()
        block = block or TorchBlock
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.layers = nn.ModuleList(block(c) for _ in range(c.n_layers))
        self.norm, self.head = nn.RMSNorm(c.dim, 1e-5), nn.Linear(c.dim, c.vocab_size, bias=False)
        self.h = c.head_size

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Compute the mean cross-entropy."""
        at = tokens.device
        frequencies = 10000.0 ** (-torch.arange(0, self.h, 2, device=at) / self.h)
        angles = torch.outer(torch.arange(tokens.shape[1], device=at), frequencies)
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, angles.cos(), angles.sin())
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def torch_step(
    case: Case, *, compiled: bool, block: Callable[[ModelConfig], nn.Module] | None = None
) -> Callable[[], None]:
    """Return an update of the PyTorch model with fused AdamW and clipping."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = TorchModel(job(case).model, block).to(device)
    loss_of = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True
    )
    tokens, labels = (
        torch.tensor(x, dtype=torch.long, device=device) for x in tokens_and_labels(case)
    )
    autocast = torch.autocast(device, torch.bfloat16, enabled=case.precision == "bf16")

    def step() -> None:
        with autocast:
            loss = loss_of(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if device == "cuda":
            torch.cuda.synchronize()

    return step


def plain_jax_step(case: Case) -> Callable[[], None]:
    """Return an update of plain JAX."""
    config, devices = job(case), jax.devices()[:1]
    attention = "splash" if devices[0].platform == "tpu" else "reference"
    lowered, abstract = plain_jax.lower_step(config, devices, attention)
    compiled = lowered.compile()
    tokens = jax.device_put(np.asarray(tokens_and_labels(case)[0], np.int32))
    state: list[plain_jax.State] = []

    def step() -> None:
        if not state:
            weights, moments = abstract
            state.append((
                jax.tree.map(lambda p: jnp.full(p.shape, 0.01, p.dtype), weights),
                jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), moments),
            ))  # fmt: skip
        params, optimizer, loss = compiled(*state.pop(), tokens)
        state.append((params, optimizer))
        loss.block_until_ready()

    return step


def job(case: Case, xla_flags: Mapping[str, str] | None = None) -> JobConfig:
    """Return the config of a case, as a user would write it."""
    train = {"batch_size": case.batch, "seq_len": case.seq, "mixed_precision": case.precision,
             "xla_flags": xla_flags or {}}  # fmt: skip
    model = {**case.model, "max_seq_len": case.seq}
    return JobConfig.model_validate({"model": model, "train": train, "optimizer": {"lr": 1e-3}})


def jax_step(case: Case) -> Callable[[], None]:
    """Return an update of jaxforge's step."""
    return compiled_step(case)[0]


def compiled_step(
    case: Case, xla_flags: Mapping[str, str] | None = None
) -> tuple[Callable[..., None], jax.stages.Compiled]:
    """Return the compiled step and its program.

    The step takes another program for the same state as its optional argument.

    Args:
        case: model and batch.
        xla_flags: `train.xla_flags`.
    """
    config = job(case, xla_flags)
    program = Program(config, make_mesh(config, jax.devices()[:1]))
    tokens, labels = (np.asarray(x, np.int32)[None] for x in tokens_and_labels(case))
    data = {"input_ids": jax.device_put(tokens), "labels": jax.device_put(labels)}
    state: list[TrainState] = []
    with program.context():
        options = compilation.accepted_flags(config, program.model.runtime.unroll)
        lowered = program.step.lower(program.abstract_state(), data, Controls())
        compiled = lowered.compile(options)

    def step(program_to_run: jax.stages.Compiled = compiled) -> None:
        if not state:
            state.append(program.init(0))
        state[0], metrics = program_to_run(state[0], data, Controls())
        metrics["loss"].block_until_ready()

    return step, compiled


def measure(
    steps: Mapping[str, Callable[[], object]], rounds: int, repeats: int
) -> dict[str, float]:
    """Return the median seconds of a step of each, alternating."""
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


def tokens_and_labels(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """Return the random tokens of a case, and their successors."""
    tokens = np.random.default_rng(0).integers(0, case.vocab, (case.batch, case.seq))
    return tokens, np.roll(tokens, -1, axis=1)


def product_rate() -> float:
    """Return the TFLOP/s of a product of 8192 x 8192 bfloat16 matrices, the device's best rate."""
    n, repeats = 8192, 20
    x = (jax.random.normal(jax.random.key(0), (n, n)) / n**0.5).astype(jnp.bfloat16)
    multiply = jax.jit(lambda x: jax.lax.fori_loop(0, repeats, lambda _, y: y @ x, x))
    multiply(x).block_until_ready()
    started = time.perf_counter()
    multiply(x).block_until_ready()
    return repeats * 2 * n**3 / (time.perf_counter() - started) / 1e12


def peak_gigabytes() -> tuple[float, float]:
    """Return the peak memory of the allocators of JAX and PyTorch on a GPU."""
    stats = jax.local_devices()[0].memory_stats() or {}
    peaks = stats.get("peak_bytes_in_use", 0), torch.cuda.max_memory_allocated()
    return round(peaks[0] / 1e9, 2), round(peaks[1] / 1e9, 2)


def peer_steps(case: Case, *, quick: bool) -> dict[str, Callable[[], None]]:
    """Return the updates to compare with on this device, by name."""
    if jax.default_backend() == "tpu":
        return {"plain JAX": plain_jax_step(case)}
    on_gpu = jax.default_backend() == "gpu"
    peers = {} if on_gpu else {"torch eager": torch_step(case, compiled=False)}
    if on_gpu or not quick:
        peers["torch.compile"] = torch_step(case, compiled=True)
    return peers


def compare(case: Case, *, quick: bool) -> tuple[list[results.Row], list[str]]:
    """Return rows of a case; on a GPU also the fraction of the device's best product rate."""
    ours, config = jax_step(case), job(case)
    on_gpu = jax.default_backend() == "gpu"
    peers = peer_steps(case, quick=quick)
    rounds, repeats = (2, 2) if quick else (5, 4)
    seconds = measure({"ours": ours, **peers}, rounds, repeats)
    tokens = case.batch * case.seq
    parameters = parameter_count(build_model(config).abstract)
    named = f"{case.name}, {parameters / 1e6:.1f}M parameters"
    rows = [
        results.Row(named, round(tokens / seconds["ours"]), peer, round(tokens / seconds[peer]),
                    "tokens/s")
        for peer in peers
    ]  # fmt: skip
    if on_gpu:
        ours_gb, theirs_gb = peak_gigabytes()
        rows.append(results.Row(f"{named}, memory", ours_gb, "torch.compile", theirs_gb, "GB",
                                smaller_is_better=True))  # fmt: skip
    if case.precision != "bf16":
        return rows, []
    rate = flops.causal_flops_per_token(config.model, case.seq) * tokens / seconds["ours"] / 1e12
    return rows, [f"{named}: {rate:.0f} TFLOP/s; products alone reach {product_rate():.0f}"]


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    quick = args.quick
    results.leave_room()
    host_memory.keep_freed_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    rows, notes = [], []
    for case in cases(args.cases, quick=quick):
        result = compare(case, quick=quick)
        rows += result[0]
        notes += result[1]
    packages = ("jax", "flax", "optax", "torch")
    results.report("step", rows, packages, notes=notes, write=not quick)


if __name__ == "__main__":
    main()
