"""Memory of a step by storage formats of parameters and moments, compiled without devices.

    python benchmarks/kept.py [--gpu] [--quick]

A model of Llama's shape with a billion parameters, split over four chips, one sequence of 2048
tokens each. `--gpu` is for four H100s instead of a v5e 2x2; each needs its compiler (`aot.py`,
`gpu_aot.py`). Memory of the whole step is reported by the compiler.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

import os

os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1"}

import jax
import results
from rich.console import Console

from jaxforge.config.job import JobConfig
from jaxforge.parallel import targets, xla_flags
from jaxforge.parallel.device_memory import bytes_per_device
from jaxforge.parallel.mesh import make_mesh
from jaxforge.program import Program

MODEL = {"dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 32000,
         "ffn_hidden_dim": 8192, "max_seq_len": 2048}  # fmt: skip
TRAIN = {"batch_size": 1, "seq_len": 2048, "activation_checkpointing": "full",
         "grad_sync": "microbatch"}  # fmt: skip
CASES = (
    ("float32", "nearest", "float32"),
    ("float32", "nearest", "bfloat16"),
    ("float32", "nearest", "8bit"),
    ("bfloat16", "nearest", "bfloat16"),
    ("bfloat16", "stochastic", "8bit"),
    ("bfloat16", "kahan", "8bit"),
)
"""Parameters, how they are rounded, moments."""
MB = 1e6


def measure(case: tuple[str, str, str], devices: list[jax.Device]) -> dict[str, float | str]:
    """Return the stored and the peak megabytes of one device."""
    params, rounding, moments = case
    train = {**TRAIN, "param_dtype": params, "param_rounding": rounding, "opt_state_dtype": moments}
    config = JobConfig.model_validate(
        {"model": MODEL, "train": train, "distributed": {"dp_shard": len(devices)}}
    )
    program = Program(config, make_mesh(config, devices))
    stored = bytes_per_device(program.abstract_state())
    flags = xla_flags.compiler_options(devices[0], {}, has=xla_flags.traits(config))
    stats = program.lower().compile(flags).memory_analysis()
    return {
        "parameters": params,
        "rounded": rounding,
        "moments": moments,
        "stored, MB": round(stored / MB),
        "at the fullest, MB": round(stats.peak_memory_in_bytes / MB),
    }


def main() -> None:
    """Print the table and write the results."""
    parser = results.arguments(__doc__)
    parser.add_argument("--gpu", action="store_true", help="four H100s instead of a v5e 2x2")
    args = parser.parse_args()
    jax.config.update("jax_enable_compilation_cache", False)
    devices = list(targets.gpus("h100", 1, 4) if args.gpu else targets.tpus("v5e:2x2"))
    rows = []
    for case in CASES[:1] if args.quick else CASES:
        rows.append(measure(case, devices))
        Console().print(*rows[-1].values(), highlight=False)
    if not args.quick:
        packages = ("jax", "jaxlib", "jax-cuda13-plugin" if args.gpu else "libtpu")
        notes = ["of one of four devices; AdamW"]
        results.write_json("kept", rows, packages, device="h100" if args.gpu else "v5e",
                           notes=notes)  # fmt: skip


if __name__ == "__main__":
    main()
