"""Tokens per second of an update, compared with the same update in plain PyTorch.

    python benchmarks/step.py [--quick] [--cases WORDS]

Both have the same model, data, threads and precision, and alternate in one run (`twins.py`). On a
GPU, everything computes in bfloat16, and `torch.compile` is the only peer: of the whole model in
dense cases, of one layer and the loss in `GPU_CASES` with other layers, products or parameters.
Notes have the model's FLOPs, and the time of the kernels by kind. On a TPU, a 0.3B model is
compared with plain JAX.
"""

import os
import re
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import plain_jax
import results
import torch
import twins
from torch import nn

from jaxforge.config.job import JobConfig
from jaxforge.model import flops
from jaxforge.model.transformer import build_model, parameter_count
from jaxforge.parallel import compilation, host_memory
from jaxforge.parallel.hardware import chip_by_kind
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
        precision: `train.mixed_precision`; all but "fp32" use PyTorch's autocast.
        sections: further keys of the config, by section.
    """

    name: str
    model: dict
    batch: int
    seq: int
    precision: str = "fp32"
    sections: Mapping[str, dict] = field(default_factory=dict)

    @property
    def packed(self) -> bool:
        """True if rows have several documents."""
        return "data" in self.sections

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
_LAYERS = {"dim": 2048, "n_layers": 4, "n_heads": 16, "ffn_hidden_dim": 8192, "vocab_size": 32768}
DENSE_1B = {**_LAYERS, "n_layers": 16, "n_kv_heads": 8}
_7B_LAYERS = {"dim": 4096, "n_layers": 4, "n_heads": 32, "ffn_hidden_dim": 11008,
              "vocab_size": 32000}  # fmt: skip
QWEN3_30B_A3B = {"dim": 2048, "n_layers": 48, "n_heads": 32, "n_kv_heads": 4, "head_dim": 128,
                 "qk_norm": True, "vocab_size": 151936, "ffn_hidden_dim": 6144, "num_experts": 128,
                 "moe_top_k": 8, "moe_expert_dim": 768}  # fmt: skip
LORA = {"lora": {"rank": 16}, "train": {"param_dtype": "bfloat16"}}
PACKED = {"data": {"pack_sequences": True}}
GPU_CASES = (
    Case("4 layers of Qwen3-30B-A3B, 2 x 4096 tokens", {**QWEN3_30B_A3B, "n_layers": 4}, 2, 4096,
         "bf16"),
    Case("1B in fp8, 4 x 4096 tokens", DENSE_1B, 4, 4096, "fp8"),
    Case("1B, packed, 4 x 4096 tokens", DENSE_1B, 4, 4096, "bf16", PACKED),
    Case("4 layers of latent attention, 4 x 4096 tokens",
         {**_LAYERS, "mixer_pattern": ["latent_attention"],
          "latent_attention": {"q_rank": 1536}}, 4, 4096, "bf16"),
    Case("4 layers of Gated DeltaNet, 4 x 4096 tokens",
         {**_LAYERS, "mixer_pattern": ["gated_delta_net"]}, 4, 4096, "bf16"),
    Case("4 layers of Mamba-2, 4 x 4096 tokens",
         {**_LAYERS, "mixer_pattern": ["mamba2"],
          "mamba2": {"heads": 64, "groups": 8}}, 4, 4096, "bf16"),
    Case("1B with LoRA, 4 x 4096 tokens", DENSE_1B, 4, 4096, "bf16", LORA),
    Case("1B, 4 x 4096 tokens", DENSE_1B, 4, 4096, "bf16"),
    Case("4 layers of 7B, 4 x 4096 tokens", _7B_LAYERS, 4, 4096, "bf16"),
)  # fmt: skip
"""On a GPU of 140 GB; of a smaller one, whose memory both models share, rows are halved twice."""
_SMALL = {"dim": 128, "n_layers": 3, "n_heads": 4, "vocab_size": 512}
MINIATURES = {
    "Qwen3-30B-A3B": {"n_layers": 2, "head_dim": 64, "qk_norm": True, "num_experts": 8,
                      "moe_top_k": 2, "moe_expert_dim": 64},
    "latent attention": {"mixer_pattern": ["latent_attention"],
                         "latent_attention": {"q_rank": 64, "kv_rank": 32, "nope_head_dim": 32,
                                              "rope_head_dim": 16, "value_head_dim": 32}},
    "Gated DeltaNet": {"mixer_pattern": ["gated_delta_net"],
                       "gated_delta_net": {"key_heads": 2, "value_heads": 4, "key_head_dim": 32,
                                           "value_head_dim": 32}},
    "Mamba-2": {"mixer_pattern": ["mamba2"],
                "mamba2": {"heads": 8, "head_dim": 32, "state_size": 32, "groups": 2,
                           "chunk_size": 32}},
}  # fmt: skip
"""Words in the name of a case of `GPU_CASES` -> keys of its model for a CPU."""
TPU_CASES = (
    Case("0.3B, 4 x 2048 tokens", {"dim": 1024, "n_layers": 12, "n_heads": 8, "n_kv_heads": 8,
                                   "ffn_hidden_dim": 4096, "vocab_size": 32768}, 4, 2048, "bf16"),
)  # fmt: skip
_BOTH_FIT = 130e9  # bytes of a GPU that holds both models of each case
KERNELS = {"attention": r"fmha|sdpa|flash|cudnn::fusion", "experts": r"mosaic|ragged|grouped",
           "products": r"nvjet|gemm|cutlass|cublas"}  # fmt: skip
"""Kind of work -> pattern of the names of its kernels on a GPU; all other kernels are "memory"."""


def miniature(case: Case) -> Case:
    """Return a case of `GPU_CASES` with the same layers for a CPU."""
    keys = next((keys for words, keys in MINIATURES.items() if words in case.name), {})
    return replace(case, name=f"{case.name}, in miniature", model={**_SMALL, **keys}, batch=2,
                   seq=128)  # fmt: skip


def cases(words: str = "", *, quick: bool = False) -> list[Case]:
    """Return the cases for this device whose names have these words; of a quick run, one."""
    result: Sequence[Case] = (QUICK, *map(miniature, GPU_CASES)) if quick else CPU_CASES
    if jax.default_backend() == "tpu":
        result = TPU_CASES
    if jax.default_backend() == "gpu":
        fits = torch.cuda.get_device_properties(0).total_memory > _BOTH_FIT
        result = GPU_CASES if fits else [smaller(case) for case in GPU_CASES]
    return [case for case in result if words in case.name][: 1 if quick else None]


def smaller(case: Case) -> Case:
    """Return a case with one row."""
    name = case.name.replace(f"{case.batch} x", "1 x")
    return replace(case, name=name, batch=1)


def torch_step(
    case: Case, *, compiled: bool, layers: bool = False, grouped: bool = twins.ON_GPU
) -> Callable[[], None]:
    """Return an update of the PyTorch model with fused AdamW and clipping.

    Args:
        case: model and batch.
        compiled: use `torch.compile`.
        layers: compile one layer and the loss, instead of the whole model.
        grouped: products of all experts at once.
    """
    device = "cuda" if twins.ON_GPU else "cpu"
    model = twins.Model(job(case), grouped=grouped).to(device)
    loss_of: Callable[..., torch.Tensor] = model
    if compiled and layers:
        model.compile_layers()
    elif compiled:
        loss_of = torch.compile(model)
    params = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.AdamW(params, 1e-3, (0.9, 0.95), weight_decay=0.1, fused=True)
    arrays = tokens_and_labels(case) + ((documents(case),) if case.packed else ())
    batch = [torch.tensor(x, dtype=torch.long, device=device) for x in arrays]
    autocast = torch.autocast(device, torch.bfloat16, enabled=case.precision != "fp32")

    def step() -> None:
        with autocast:
            loss = loss_of(*batch)
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
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
    sections = {
        **case.sections,
        "model": {**case.model, "max_seq_len": case.seq},
        "optimizer": {"lr": 1e-3},
        "train": {"batch_size": case.batch, "seq_len": case.seq, "mixed_precision": case.precision,
                  "xla_flags": xla_flags or {}, **case.sections.get("train", {})},
    }  # fmt: skip
    return JobConfig.model_validate(sections)


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
    arrays = dict(zip(("input_ids", "labels"), tokens_and_labels(case), strict=True))
    if case.packed:
        arrays["segment_ids"] = documents(case)
    data = {name: jax.device_put(np.asarray(x, np.int32)[None]) for name, x in arrays.items()}
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


def documents(case: Case) -> np.ndarray:
    """Return the document of each token, eight in a row on average."""
    rng = np.random.default_rng(1)
    return np.sort(rng.integers(0, 8, (case.batch, case.seq)), axis=1)


def kernel_seconds(run: Callable[[], None], steps: int = 2) -> Counter[str]:
    """Return the seconds of a GPU's kernels in a step, by name; empty on a CPU."""
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            for _ in range(steps):
                run()
        (path,) = Path(directory).rglob("*.xplane.pb")
        planes = list(jax.profiler.ProfileData.from_file(str(path)).planes)
    seconds: Counter[str] = Counter()
    for plane in planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if line.name.startswith("Stream") else ():
                seconds[event.name] += event.duration_ns / 1e9 / steps
    return seconds


def by_kind(kernels: Mapping[str, float]) -> Counter[str]:
    """Return the seconds of kernels by kind of work."""
    seconds: Counter[str] = Counter()
    for name, each in kernels.items():
        kind = next((kind for kind, names in KERNELS.items() if re.search(names, name)), "memory")
        seconds[kind] += each
    return seconds


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


def peer_steps(case: Case, *, quick: bool) -> dict[str, Callable[[], Callable[[], None]]]:
    """Return functions that build the updates to compare with on this device, by name."""
    if jax.default_backend() == "tpu":
        return {"plain JAX": lambda: plain_jax_step(case)}
    if case in CPU_CASES or case == QUICK:
        peers = {"torch eager": lambda: torch_step(case, compiled=False)}
        compiled = {"torch.compile": lambda: torch_step(case, compiled=True)}
        return peers if quick else peers | compiled
    config, compiles = job(case), not quick
    is_special = config.model.mixer_pattern or config.model.is_moe or case.sections
    layers = bool(is_special) or case.precision == "fp8"
    # In miniature, with the operations of a GPU, but not compiled.
    peers = {
        torch_name(case, compiled=compiles): lambda: torch_step(
            case, compiled=compiles, layers=layers, grouped=True
        )
    }
    if case.precision == "fp8":
        peers["jaxforge in bf16"] = lambda: jax_step(replace(case, precision="bf16"))
    return peers


def working_peers(case: Case, *, quick: bool) -> tuple[dict[str, Callable[[], None]], list[str]]:
    """Return the peers that run, and the errors of the others: jaxforge is measured without them.

    On a GPU, a model that `torch.compile` fails on runs without it.
    """
    peers, errors = dict[str, Callable[[], None]](), list[str]()

    def add(name: str, build: Callable[[], Callable[[], None]]) -> None:
        try:
            step = build()
            step()
        except Exception as error:  # of any kind: minutes on a device are few
            errors.append(f"{case.name}: {name} failed: {repr(error)[:1000]}")
        else:
            peers[name] = step

    for name, build in peer_steps(case, quick=quick).items():
        add(name, build)
        if name not in peers and name.startswith("torch.compile"):
            add(torch_name(case, compiled=False),
                lambda: torch_step(case, compiled=False, grouped=True))  # fmt: skip
    return peers, errors


def torch_name(case: Case, *, compiled: bool) -> str:
    """Return the name of the PyTorch peer on a GPU."""
    config = job(case)
    with_ops = {
        ", grouped_mm": config.model.is_moe,
        ", scaled_mm": case.precision == "fp8",
        ", flex_attention": case.packed,
    }
    return ("torch.compile" if compiled else "torch eager") + "".join(
        name for name, has in with_ops.items() if has
    )


def compare(case: Case, *, quick: bool) -> tuple[list[results.Row], list[str], list[str]]:
    """Return rows of a case, notes about its FLOPs and its kernels, and errors of peers."""
    config, on_gpu = job(case), jax.default_backend() == "gpu"
    with ThreadPoolExecutor(1) as pool:  # XLA compiles while the peers do
        compiling = pool.submit(jax_step, case)
        peers, errors = working_peers(case, quick=quick)
        ours = compiling.result()
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
    if on_gpu and len(peers) == 1:  # with two of jaxforge's, its allocator has both
        ours_gb, theirs_gb = peak_gigabytes()
        rows.append(results.Row(f"{named}, memory", ours_gb, *peers, theirs_gb, "GB",
                                smaller_is_better=True))  # fmt: skip
    if case.precision == "fp32":
        return rows, [], errors
    rate = flops.causal_flops_per_token(config.model, case.seq) * tokens / seconds["ours"]
    chip = chip_by_kind(jax.devices()[0].device_kind)
    share = f", {rate / chip.peak_flops:.1%} of the bf16 peak" if chip else ""
    notes = [f"{named}: {tokens / seconds['ours']:,.0f} tokens/s, {rate / 1e12:.3g} TFLOP/s of the "
             f"model{share}"]  # fmt: skip
    if on_gpu:
        notes[0] += f"; products alone reach {product_rate():.0f} TFLOP/s"
        kernels = kernel_seconds(ours)
        kinds = [f"{kind} {1e3 * each:.1f} ms" for kind, each in by_kind(kernels).most_common()]
        longest = [f"{name[:60]} {1e3 * each:.1f} ms" for name, each in kernels.most_common(5)]
        notes += [f"{named}: kernels of a step of {1e3 * seconds['ours']:.1f} ms: "
                  f"{', '.join(kinds)}; the longest: {', '.join(longest)}"]  # fmt: skip
    return rows, notes, errors


def main() -> int:
    """Print the table and write the results; return 1 if a peer failed."""
    args = results.arguments(__doc__, cases=True).parse_args()
    quick = args.quick
    results.leave_room()
    host_memory.keep_freed_memory()
    torch.set_num_threads(os.cpu_count() or 1)
    rows, notes, errors = list[results.Row](), list[str](), list[str]()
    for case in cases(args.cases, quick=quick):
        for total, part in zip((rows, notes, errors), compare(case, quick=quick), strict=True):
            total.extend(part)
    packages = ("jax", "flax", "optax", "torch")
    results.report("step", rows, packages, notes=[*notes, *errors], write=not quick)
    return bool(errors)


if __name__ == "__main__":
    raise SystemExit(main())
