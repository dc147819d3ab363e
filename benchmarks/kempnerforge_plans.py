"""Plans of KempnerForge's configs for text models on their machines.

    pip install ".[plan-gpu]"
    python benchmarks/kempnerforge_plans.py [--quick]

The machines are nodes of 4 H200s. Each file is reduced to the settings that determine memory and
speed. Plans are compared with published runs: memory with weights and moments in bfloat16, as in
KempnerForge, instead of jaxforge's default float32. Nothing runs on a device.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import planned
import results
from rich.console import Console

LLAMA = {"n_kv_heads": 8, "vocab_size": 128256, "max_seq_len": 4096, "rope_theta": 500000.0,
         "ffn_dim_multiplier": 1.3}  # fmt: skip
B7 = {**LLAMA, "dim": 4096, "n_layers": 32, "n_heads": 32}
B13 = {**LLAMA, "dim": 5120, "n_layers": 40, "n_heads": 40}
B29 = {**LLAMA, "dim": 6144, "n_layers": 56, "n_heads": 48}
B70 = {**LLAMA, "dim": 8192, "n_layers": 80, "n_heads": 64, "ffn_hidden_dim": 28672}
MOE = {**LLAMA, "dim": 2048, "n_layers": 24, "n_heads": 16, "n_kv_heads": 4, "num_experts": 8,
       "moe_top_k": 2}  # fmt: skip
SMALL = {"dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "vocab_size": 32000,
         "max_seq_len": 512}  # fmt: skip
WIKITEXT = {"dim": 512, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 50257,
            "max_seq_len": 1024}  # fmt: skip
AS_THERE = ("--train.param_dtype=bfloat16", "--train.opt_state_dtype=bfloat16")
PROCESSES = 2


@dataclass(frozen=True)
class File:
    """Properties of a file that determine memory and speed, and its published figures.

    Attributes:
        nodes: number of nodes.
        model: `[model]`.
        rows: sequences of `model["max_seq_len"]` tokens per rank and microbatch.
        accum: microbatches per update.
        mesh: `[distributed]`; dp_shard takes the remaining devices.
        train: further settings of `[train]`; rematerialisation is full.
        optimizer: `[optimizer]`.
        tokens: published tokens per second of all devices.
        gigabytes: published memory of a device.
    """

    nodes: int
    model: dict[str, Any]
    rows: int
    accum: int = 1
    mesh: dict[str, int] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    tokens: float | None = None
    gigabytes: float | None = None

    @property
    def topology(self) -> str:
        """Topology of nodes with four GPUs."""
        return f"h200:{self.nodes}x4"

    def toml(self) -> str:
        """Return the file as TOML."""
        steps = {"batch_size": self.rows, "grad_accum_steps": self.accum,
                 "seq_len": self.model["max_seq_len"]}  # fmt: skip
        train = {**steps, "activation_checkpointing": "full", **self.train}
        sections = {"model": self.model, "train": train, "optimizer": self.optimizer,
                    "distributed": self.mesh}  # fmt: skip
        return "\n".join(
            f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in keys.items())
            for name, keys in sections.items()
        )


PLAIN = {"activation_checkpointing": "none"}
MUON = {"loss_fn": "chunked_cross_entropy", "ce_chunk_size": 4096, "z_loss_weight": 1e-4}
FILES = {
    "debug": File(1, SMALL, 4, train=PLAIN, tokens=537_787, gigabytes=0.7),
    "debug_moe": File(1, {**SMALL, "n_kv_heads": 2, "num_experts": 4, "moe_frequency": 2}, 4,
                      train=PLAIN),
    "hf_wikitext": File(1, WIKITEXT, 16, tokens=958_700, gigabytes=6.5),
    "7b": File(1, B7, 8, 4, tokens=38_858, gigabytes=81.0),
    "7b_12gpu_tp4": File(3, B7, 4, 8, {"dp_shard": 3, "tp": 4}, tokens=67_045, gigabytes=30.4),
    "7b_16gpu_adamw": File(4, B7, 8, 4, tokens=150_000, gigabytes=72.6),
    "7b_16gpu_fp8": File(4, B7, 4, 4, train={"mixed_precision": "fp8"}),
    "7b_16gpu_muon": File(4, B7, 4, 4, train=MUON, optimizer={"name": "muon", "lr": 0.003}),
    "7b_32gpu_fsdp": File(8, B7, 4, 4, tokens=297_384, gigabytes=51.3),
    "13b_24gpu_validation": File(6, B13, 2, 4, {"dp_shard": 6, "tp": 4}),
    "13b_32gpu_tp4_pp2": File(8, B13, 4, 4, {"dp_shard": 4, "tp": 4, "pp": 2}, tokens=52_554,
                              gigabytes=24.0),
    "29b_32gpu_tp4_pp2": File(8, B29, 1, 8, {"dp_shard": 4, "tp": 4, "pp": 2}, tokens=22_688,
                              gigabytes=32.8),
    "70b_32gpu_tp4": File(8, B70, 2, 4, {"dp_shard": 8, "tp": 4}, tokens=17_769, gigabytes=93.2),
    "70b_32gpu_tp4_pp4": File(8, B70, 1, 4, {"dp_shard": 2, "tp": 4, "pp": 4}, tokens=7_641,
                              gigabytes=51.0),
    "moe_8gpu_stress": File(2, MOE, 10, 1, {"dp_shard": 2, "tp": 4}),
    "moe_24gpu": File(6, MOE, 2, 32, {"dp_shard": 6, "tp": 4}, train=PLAIN),
    "moe_ep_32gpu": File(8, MOE, 12, 1, {"dp_shard": 4, "tp": 4, "ep": 2}, tokens=27_000,
                         gigabytes=106.7),
}  # fmt: skip


def report_of(name: str, *settings: str) -> dict[str, Any]:
    """Return the `jaxforge plan --json` report of a file."""
    file = FILES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.toml"
        path.write_text(file.toml())
        return planned.report(path, file.topology, *settings)


def row(name: str) -> dict[str, Any]:
    """Return a row of the table."""
    file, report = FILES[name], report_of(name)
    result: dict[str, Any] = {
        "file": name,
        "topology": file.topology,
        "mesh": planned.mesh_in_words(report) or "-",
        "rows x microbatches": f"{file.rows} x {file.accum}",
        "reduces": report["execution"]["grad_sync"] if "execution" in report else "-",
        "fits": "yes" if report["fits"] else "; ".join(report["errors"] + report["advice"]),
    }
    if memory := report.get("memory_per_device"):
        result["memory, GB"] = _gb(memory)
        as_there = report_of(name, *AS_THERE).get("memory_per_device")
        result["bfloat16 state"] = _gb(as_there) if as_there else "-"
    result["published"] = file.gigabytes or "-"
    if step := report.get("step"):
        devices = 4 * file.nodes
        result["tokens/s a device"] = round(step["tokens_per_second_per_device"])
        if file.tokens:
            result["published tokens/s"] = round(file.tokens / devices)
            result["estimated / published"] = round(step["tokens_per_second"] / file.tokens, 2)
        result["MFU, %"] = round(100 * step["mfu"], 1)
        result["waiting, %"] = round(100 * step["waited_seconds"] / step["seconds"])
        result["compiled in, s"] = round(report["compile_seconds"])
    Console().print(result, highlight=False)
    return result


def _gb(memory: dict[str, int]) -> float:
    return round(memory["peak_bytes"] / 1e9, 1)


def main() -> None:
    """Print the rows and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    names = list(FILES)[: 2 if quick else None]
    with ThreadPoolExecutor(PROCESSES) as pool:
        rows = list(pool.map(row, names))
    if not quick:
        results.write_json("kempnerforge_plans", rows, ("jax", "jaxlib"), device="none",
                           notes=["estimates; nothing was run"])  # fmt: skip


if __name__ == "__main__":
    main()
