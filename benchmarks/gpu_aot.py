"""Memory and compile time of train steps compiled for H100s, without a GPU.

    pip install ".[cuda]"
    python benchmarks/gpu_aot.py [--quick] [--cases WORDS]

Llama 2 7B on one node with every kind of mesh, a mixture of experts (of the shape of Qwen3 30B A3B)
on one node and on two, then `configs/llama/*gpu*` on their clusters (`experts_aot.py` has other
layers). Memory is reported by the compiler and compared with the 80 GB of a device. Nothing
is timed on a GPU. Results of single cases (`--cases`) are printed and not written.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import os
import time
from typing import NamedTuple

os.environ |= {"JAX_PLATFORMS": "cpu"}

import jax
import results
from experts_aot import CONFIGS, QWEN3_30B_A3B
from rich.console import Console

from jaxforge.config import rules
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.parallel import hardware, targets, xla_flags
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program

LLAMA_2_7B = {"dim": 4096, "n_layers": 32, "n_heads": 32, "vocab_size": 32000,
              "ffn_hidden_dim": 11008, "max_seq_len": 4096}  # fmt: skip
PER_NODE = 8


class Case(NamedTuple):
    """Config and its number of nodes of eight GPUs."""

    name: str
    config: JobConfig
    nodes: int = 1


def case(
    name: str,
    distributed: dict[str, int | str],
    train: dict[str, int | str] | None = None,
    nodes: int = 1,
    **sections: dict,
) -> Case:
    """Return a case, by default Llama 2 7B with 4096 tokens per GPU and full remat."""
    usual = {"batch_size": 1, "seq_len": 4096, "activation_checkpointing": "full"}
    config = {"model": LLAMA_2_7B, "train": {**usual, **(train or {})}, "distributed": distributed}
    return Case(name, JobConfig.model_validate({**config, **sections}), nodes)


UPDATE, MICROBATCH = {"grad_sync": "update"}, {"grad_sync": "microbatch"}
HSDP_TP = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
WHOLE = {**QWEN3_30B_A3B, "max_seq_len": 4096}
HALF = {**WHOLE, "n_layers": 24}
STAGES = {**MICROBATCH, "grad_accum_steps": 8}
MESHES = (
    case("dp_shard 8", {"dp_shard": 8}, UPDATE),
    case("dp_shard 8, microbatch", {"dp_shard": 8}, MICROBATCH),
    case("tp 8", {"dp_shard": 1, "tp": 8}, MICROBATCH),
    case("dp_replicate 2 x dp_shard 2 x tp 2", HSDP_TP, UPDATE),
    case("dp_replicate 2 x dp_shard 2 x tp 2, microbatch", HSDP_TP, MICROBATCH),
    case("dp_shard 8, packed, microbatch", {"dp_shard": 8}, MICROBATCH,
         data={"pack_sequences": True}),
    case("dp_shard 8, Muon, microbatch", {"dp_shard": 8}, MICROBATCH, optimizer={"name": "muon"}),
    case("pp 4 x dp_shard 2, 1f1b, 8 microbatches", {"pp": 4, "dp_shard": 2}, STAGES),
    case("pp 2 x dp_shard 2 x tp 2, 1f1b, 8 microbatches", {"pp": 2, "dp_shard": 2, "tp": 2},
         STAGES),
    case("pp 4 x dp_shard 2, interleaved, 8 microbatches",
         {"pp": 4, "dp_shard": 2, "pp_schedule": "interleaved_1f1b", "pp_chunks": 2}, STAGES),
    case("experts, half the layers: ep 8", {"ep": 8}, MICROBATCH, model=HALF),
    case("experts, half the layers: pp 2 x ep 4, 1f1b, 8 microbatches", {"pp": 2, "ep": 4}, STAGES,
         model=HALF),
    case("experts: ep 8 x dp_shard 2, microbatch", {"ep": 8, "dp_shard": 2}, MICROBATCH, 2,
         model=WHOLE),
    case("experts: ep 8 x dp_shard 2, update", {"ep": 8, "dp_shard": 2}, UPDATE, 2,
         model=WHOLE),
)  # fmt: skip


def clusters() -> list[Case]:
    """Return the configs for GPU clusters, whose names end in the number of GPUs."""
    paths = sorted(CONFIGS.glob("llama/*_gpu_*.toml"))
    return [
        Case(path.name, load_config(path), max(1, int(path.stem.rpartition("_")[2]) // PER_NODE))
        for path in paths
    ]


def measure(case: Case) -> dict[str, float | str]:
    """Return the compiler's figures of a case, or the reason for its failure."""
    rules.check(case.config, case.nodes * PER_NODE)
    devices = list(targets.gpus("h100", case.nodes, PER_NODE))
    program = Program(case.config, make_mesh(case.config, devices))
    lowered, unroll = program.lower(), program.model.runtime.unroll
    start = time.perf_counter()
    options = xla_flags.compiler_options(devices[0], {}, has=xla_flags.traits(case.config, unroll))
    compiled = lowered.compile(options)
    seconds = time.perf_counter() - start
    peak = compiled.memory_analysis().peak_memory_in_bytes
    text = compiled.as_text()
    return {
        "peak memory, GB": round(peak / 1e9, 1),
        "of the device, %": round(100 * peak / hardware.CHIPS["h100"].capacity),
        "compiled in, s": round(seconds, 1),
        "calls of cuDNN's attention": text.count('"__cudnn$fmha'),
        "calls of attention for packed rows": text.count('"__gpu$xla.gpu.triton"'),
        "calls of kernels for experts": text.count('"mosaic_gpu'),
    }


def main() -> None:
    """Print the table and write the results."""
    args = results.arguments(__doc__, cases=True).parse_args()
    if not targets.has_gpu_compiler():
        raise SystemExit("the compiler for GPUs is missing: pip install '.[cuda]'")
    jax.config.update("jax_enable_compilation_cache", False)
    rows = []
    cases = [item for item in [*MESHES, *clusters()] if args.cases in item.name]
    for item in cases[: 2 if args.quick else None]:
        try:
            result = measure(item)
        except UserError as error:
            result = {"refused": str(error)}
        Console().print(item.name, result, highlight=False)
        rows.append({"case": item.name, "GPUs": item.nodes * PER_NODE, **result})
    notes = [
        "H100 80 GB; 1 x 4096 tokens a GPU in the first rows; bfloat16; compiled without a GPU"
    ]
    if not args.quick and not args.cases:
        results.write_json("gpu_aot", rows, ("jax", "jaxlib", "jax-cuda13-plugin"), device="h100",
                           notes=notes)  # fmt: skip


if __name__ == "__main__":
    main()
