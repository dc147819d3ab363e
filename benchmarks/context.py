"""Planned memory and communication of long sequences with context parallelism.

    pip install ".[plan-tpu,plan-gpu]"
    python benchmarks/context.py [--quick]

Nothing runs on a device. docs/plan.md describes the estimates.

Not in `make bench`: needs a compiler for TPUs or GPUs.
"""

from typing import Any

import planned
import results
from rich.console import Console

CONFIGS = {"h100:2x8": "llama_8b_128k_gpu_16", "v5p:4x4x4": "llama_8b_128k_tpu_v5p_64"}
DEVICES = {"h100:2x8": 16, "v5p:4x4x4": 64}
CASES = (
    *(("h100:2x8", strategy, cp) for cp in (2, 4, 8) for strategy in ("ulysses", "ring")),
    *(("v5p:4x4x4", strategy, 8) for strategy in ("ulysses", "ring")),
)
EXCHANGES = ("all-to-all", "collective-permute")


def row(topology: str, strategy: str, cp: int) -> dict[str, Any]:
    """Return a row of the table."""
    report = planned.report(
        planned.CONFIGS / f"{CONFIGS[topology]}.toml", topology, f"--distributed.cp={cp}",
        f"--distributed.cp_strategy={strategy}",
        f"--distributed.dp_shard={DEVICES[topology] // cp}",
        "--train.global_batch_size=None", "--train.batch_size=1", "--train.grad_accum_steps=1",
        "--train.grad_sync=microbatch",
    )  # fmt: skip
    memory, step = report["memory_per_device"], report["step"]
    in_layers = (in_layer for in_layer in report["collectives"] if in_layer["in_loop"])
    exchanged = [in_layer for in_layer in in_layers if in_layer["kind"] in EXCHANGES]
    result = {
        "devices": topology,
        "way": strategy,
        "cp": cp,
        "memory, GB": round(memory["peak_bytes"] / 1e9, 1),
        "activations, GB": round(memory["activations_bytes"] / 1e9, 1),
        "exchanged a step, GB": round(sum(in_layer["bytes"] for in_layer in exchanged) / 1e9, 1),
        "waited for, ms": round(1e3 * sum(in_layer["waited_seconds"] for in_layer in exchanged), 1),
        "step, s": round(step["seconds"], 2),
        "tokens/s a device": round(step["tokens_per_second_per_device"]),
    }
    Console().print(result, highlight=False)
    return result


def main() -> None:
    """Print the rows and write the results."""
    quick = results.arguments(__doc__).parse_args().quick
    rows = [row(*case) for case in CASES[: 1 if quick else None]]
    if not quick:
        results.write_json("context", rows, ("jax", "jaxlib", "libtpu"), device="none",
                           notes=["estimates; nothing was run"])  # fmt: skip


if __name__ == "__main__":
    main()
