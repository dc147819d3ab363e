"""Memory, cycles and communication of mixtures of experts compiled for TPU slices, without a TPU.

    pip install "jax[tpu]"
    python benchmarks/experts_aot.py [--quick] [--cases WORDS]

The last two cases are a few layers of configs: XLA compiles one layer of each kind. Each chip has
one sequence of 4096 tokens, with full rematerialisation and gradients reduced per microbatch.
`jaxforge/tools/plan/hlo.py` describes the estimate of cycles, which excludes further rounds of
rows: a balanced load needs none. Products with experts are only counted in rows of their tiles, for
a random load: a tile that two experts share is multiplied for both. Results of single cases
(`--cases`) are printed and not written.
"""

import math
import os
import time
from pathlib import Path
from typing import NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import numpy as np
import results
from program_cost import cost_of, gathered
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.load import load_config
from jaxforge.kernels.megablox import choose_row_tile
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program
from jaxforge.tools.plan.hlo import HloProgram

MIXTRAL_8X7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32000,
                "ffn_hidden_dim": 14336, "num_experts": 8, "moe_top_k": 2,
                "moe_aux_loss_weight": 0.02}  # fmt: skip
QWEN3_30B_A3B = {"dim": 2048, "n_layers": 48, "n_heads": 32, "n_kv_heads": 4, "head_dim": 128,
                 "qk_norm": True, "vocab_size": 151936, "ffn_hidden_dim": 6144, "num_experts": 128,
                 "moe_top_k": 8, "moe_expert_dim": 768, "moe_aux_loss_weight": 0.001}  # fmt: skip
CONFIGS = Path(__file__).parents[1] / "configs"
SEQ = 4096
HEADROOM = 1.5  # rows that a device has room for, relative to an even load


def layers_of(path: str, **changes: int) -> dict:
    """Return the `[model]` section of a config with other numbers of layers."""
    return {**load_config(CONFIGS / path).model.model_dump(exclude_unset=True), **changes}


class Case(NamedTuple):
    """Model, slice and mesh."""

    name: str
    topology: str
    model: dict
    axes: dict[str, int]


CASES = (
    Case("Mixtral 8x7B, v5p 2x2x4, ep 8 x dp_shard 2", "v5p:2x2x4", MIXTRAL_8X7B,
         {"ep": 8, "dp_shard": 2}),
    Case("Mixtral 8x7B, v5p 2x2x4, ep 4 x dp_shard 4", "v5p:2x2x4", MIXTRAL_8X7B,
         {"ep": 4, "dp_shard": 4}),
    Case("Mixtral 8x7B, v5p 2x2x4, dp_shard 16", "v5p:2x2x4", MIXTRAL_8X7B, {"dp_shard": 16}),
    Case("Qwen3 30B A3B, v5e 8x8, ep 8 x dp_shard 8", "v5e:8x8", QWEN3_30B_A3B,
         {"ep": 8, "dp_shard": 8}),
    Case("Qwen3 30B A3B, v6e 4x8, ep 8 x dp_shard 4", "v6e:4x8", QWEN3_30B_A3B,
         {"ep": 8, "dp_shard": 4}),
    Case("DeepSeek-V3, 1 dense and 2 expert layers, v5p 2x2x4, ep 8 x dp_shard 2", "v5p:2x2x4",
         layers_of("deepseek/deepseek_v3_tpu_v5p_1024.toml", n_layers=3, moe_first_dense_layers=1),
         {"ep": 8, "dp_shard": 2}),
    Case("Qwen3-Next 80B A3B, 4 layers, v5p 2x2x4, ep 8 x dp_shard 2", "v5p:2x2x4",
         layers_of("qwen3_next/qwen3_next_80b_a3b_tpu_v5p_64.toml", n_layers=4),
         {"ep": 8, "dp_shard": 2}),
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


def measure(case: Case) -> dict[str, float]:
    """Return the compiler's figures of a case."""
    config = config_of(case)
    devices = list(targets.tpus(case.topology))
    lowered = Program(config, make_mesh(config, devices)).lower()
    options = xla_flags.compiler_options(devices[0], {}, has=(xla_flags.EXPERTS,))
    began = time.process_time()
    compiled = lowered.compile(options)
    seconds = time.process_time() - began
    program = HloProgram(compiled.as_text(), len(devices))
    cost, model, ep = cost_of(program), config.model, case.axes.get("ep", 1)
    widths = {model.dim, model.expert_dim}
    experts = [shape for shape in gathered(program) if widths <= set(shape)]
    own = model.num_experts // ep * math.prod(widths)
    return {
        "memory, GB": round(compiled.memory_analysis().peak_memory_in_bytes / 1e9, 1),
        "M cycles": round(sum(cost.cycles.values()) / 1e6),
        "of dense products": round(cost.cycles["matmul"] / 1e6),
        "all-to-alls waited for": cost.synchronous["all-to-all"],
        "GB in them": round(cost.sent["all-to-all"] / 1e9, 1),
        "GB in other synchronous collectives": round(
            (cost.synchronous_bytes - cost.sent["all-to-all"]) / 1e9, 1
        ),
        "gathers of experts over ep": sum(math.prod(shape) > own for shape in experts),
        "rows multiplied / active": round(multiplied(model, ep), 2),
        "CPU seconds of XLA": round(seconds),
    }


def multiplied(model: ModelConfig, ep: int) -> float:
    """Return the rows in tiles of a grouped product, relative to the rows of experts."""
    groups, rows = model.num_experts // ep, SEQ * model.moe_top_k
    tile = choose_row_tile(rows if ep == 1 else int(rows * HEADROOM), groups)
    ends = np.cumsum(np.random.default_rng(0).multinomial(rows, np.full(groups, 1 / groups)))
    starts = np.concatenate([[0], ends[:-1]])
    return float(np.sum(-(-ends // tile) - starts // tile) * tile / rows)


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    if not targets.has_tpu_compiler():
        raise SystemExit('the compiler for TPU is missing: pip install "jax[tpu]"')
    jax.config.update("jax_enable_compilation_cache", False)
    notes = [f"1 x {SEQ} tokens a chip, bfloat16, full remat; cycles leave out collectives and the "
             "kernels of attention and experts"]  # fmt: skip
    rows = []
    cases = [case for case in CASES if args.cases in case.name]
    for case in cases[: 1 if args.quick else None]:
        rows.append({"case": case.name, **measure(case)})
        Console().print(rows[-1], highlight=False)
        if not args.quick and not args.cases:  # after each: they take minutes
            results.write_json("experts_aot", rows, ("jax", "jaxlib", "libtpu"), device="tpu",
                               notes=notes)  # fmt: skip


if __name__ == "__main__":
    main()
