"""Train steps of mixtures of experts and recurrent mixers, compiled without their devices.

    pip install "jax[tpu]" ".[cuda]"
    python benchmarks/experts_aot.py [--quick] [--cases WORDS]

Each device has one sequence of 4096 tokens, with full rematerialisation and gradients reduced per
microbatch. Times are those of `jaxforge plan` (docs/plan.md): an even load of experts, so that no
further rounds of rows are needed. Ideal is the time of the active FLOPs, without recomputation, at
the device's peak. Results of single cases (`--cases`) replace those of an earlier run.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

# Before JAX: the compilers of both platforms run on this machine's CPU.
os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}

import jax
import results
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_config
from jaxforge.parallel import targets
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.parallel.hardware import CHIPS
from jaxforge.program import Program
from jaxforge.step.memory import step_memory
from jaxforge.tools.plan.plan import plan
from jaxforge.tools.plan.topology import Topology

MIXTRAL_8X7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32000,
                "ffn_hidden_dim": 14336, "num_experts": 8, "moe_top_k": 2,
                "moe_aux_loss_weight": 0.02}  # fmt: skip
QWEN3_30B_A3B = {"dim": 2048, "n_layers": 48, "n_heads": 32, "n_kv_heads": 4, "head_dim": 128,
                 "qk_norm": True, "vocab_size": 151936, "ffn_hidden_dim": 6144, "num_experts": 128,
                 "moe_top_k": 8, "moe_expert_dim": 768, "moe_aux_loss_weight": 0.001}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "configs"
SEQ = 4096


def layers_of(path: str, **changes: object) -> dict:
    """Return the `[model]` section of a config with other numbers of layers or experts."""
    return {**load_config(CONFIGS / path).model.model_dump(exclude_unset=True), **changes}


DEEPSEEK = layers_of("deepseek/deepseek_v3_gpu_2048.toml", n_layers=4, moe_first_dense_layers=1,
                     num_experts=128)  # fmt: skip
QWEN3_NEXT = layers_of("qwen3_next/qwen3_next_80b_a3b_gpu_64.toml", n_layers=4)
# One period of the published order: M - M - M - M - M * -
NEMOTRON_H = layers_of(
    "nemotron_h/nemotron_h_8b_gpu_64.toml", n_layers=11,
    mixer_pattern=[*["mamba2", "none"] * 4, "mamba2", "attention", "none"],
    feed_forward_pattern=[*["none", "dense"] * 4, "none", "none", "dense"],
)  # fmt: skip


class Case(NamedTuple):
    """Model, target hardware and mesh."""

    name: str
    topology: str
    model: dict
    axes: dict[str, int]

    def __str__(self) -> str:
        """Return the name of its row."""
        axes = " x ".join(f"{axis} {size}" for axis, size in self.axes.items())
        return f"{self.name}, {self.topology}, {axes}"


PACKAGES = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin")
SLICE, NODE = "v5p:2x2x4", "h100:1x8"
CASES = (
    Case("Qwen3 30B A3B", SLICE, QWEN3_30B_A3B, {"ep": 16}),
    Case("Qwen3 30B A3B", NODE, QWEN3_30B_A3B, {"ep": 8}),
    Case("DeepSeek-V3, 1 dense and 3 expert layers, 128 experts", SLICE, DEEPSEEK,
         {"ep": 8, "dp_shard": 2}),
    Case("DeepSeek-V3, 1 dense and 3 expert layers, 128 experts", NODE, DEEPSEEK, {"ep": 8}),
    Case("Qwen3-Next 80B A3B, 4 layers", SLICE, QWEN3_NEXT, {"ep": 8, "dp_shard": 2}),
    Case("Qwen3-Next 80B A3B, 4 layers", NODE, QWEN3_NEXT, {"ep": 8}),
    Case("Nemotron-H 8B, 11 layers", SLICE, NEMOTRON_H, {"dp_shard": 16}),
    Case("Nemotron-H 8B, 11 layers", NODE, NEMOTRON_H, {"dp_shard": 8}),
)  # fmt: skip


def config_of(case: Case) -> JobConfig:
    """Return the config as a user would write it."""
    train = {
        "batch_size": 1,
        "seq_len": SEQ,
        "activation_checkpointing": "full",
        "grad_sync": "microbatch",
    }
    model = {**case.model, "max_seq_len": SEQ}
    return JobConfig.model_validate({"model": model, "train": train, "distributed": case.axes})


def measure(case: Case) -> dict[str, float | str]:
    """Return the figures of a case's plan."""
    topology, began = Topology.parse(case.topology), time.process_time()
    planned = plan(config_of(case), topology)
    seconds = time.process_time() - began
    if planned.errors:
        raise SystemExit("\n".join(planned.errors))
    step, line, estimate = planned.step, planned.timeline, planned.estimate
    assert step is not None
    program = Program(step.config, step.mesh)
    stored = bytes_per_device(program.abstract_state())
    expected = step_memory(step.config, program.model, step.mesh, stored).total
    memory = {
        "memory, GB": round(step.memory.peak / 1e9, 1),
        "estimated before, GB": round(expected / 1e9, 1),
        "CPU seconds": round(seconds),
    }
    if line is None or estimate is None:
        return memory
    kinds = {kind: seconds * 1e3 for kind, seconds in estimate.seconds_by_kind.items()}
    products = sum(kinds.get(kind, 0) for kind in ("products", "attention", "experts"))
    per_device = estimate.flops_per_token_causal * estimate.tokens / topology.n_devices
    ideal = per_device / CHIPS[topology.chip].peak_flops * 1e3
    exchanged = sum(t.bytes for key, t in line.traffic.items() if key.kind == "all-to-all")
    return {
        "step, ms": round(estimate.seconds * 1e3, 1),
        "MFU, %": round(100 * estimate.mfu_causal, 1),
        "products / ideal": round(products / ideal, 2),
        **{f"{kind}, ms": round(kinds.get(kind, 0), 1)
           for kind in ("products", "attention", "experts", "memory")},
        "waits, ms": round(estimate.waited_seconds * 1e3, 1),
        "all-to-all, GB": round(exchanged / 1e9, 2),
        **memory,
    }  # fmt: skip


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    if not (targets.has_tpu_compiler() and targets.has_gpu_compiler()):
        raise SystemExit('a compiler is missing: pip install "jax[tpu]" ".[cuda]"')
    jax.config.update("jax_enable_compilation_cache", False)
    notes = [f"1 x {SEQ} tokens a device, bfloat16, full remat; times are simulated; CPU "
             "seconds of tracing and compiling"]  # fmt: skip
    path = results.directory() / "experts_aot-none.json"
    stored = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["case"]: row for row in stored}
    chosen = [case for case in CASES if args.cases in str(case)]
    for case in chosen[: 1 if args.quick else None]:
        rows[str(case)] = {"case": str(case), **measure(case)}
        Console().print(rows[str(case)], highlight=False)
        if not args.quick:  # after each: they take minutes
            measured = [rows[str(case)] for case in CASES if str(case) in rows]
            results.write_json("experts_aot", measured, PACKAGES, device="none", notes=notes)


if __name__ == "__main__":
    main()
